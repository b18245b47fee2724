"""Record what a step does on fake tensors: every op, every storage that is born and dies, in order.

    user code ──► autograd, autocast ──► Recorder (a fake tensor mode) ──► shapes only, no memory

A storage dies when Python and autograd let go of it, exactly as it would on the device; a weak
reference tells when. Backward ops are given the module of the forward op whose autograd node runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import unset_fake_temporarily

from foretell.trace import types
from foretell.trace.cuda.tf32 import rounds
from foretell.trace.record.attributes import attributes, is_channels_last, tensors_in
from foretell.trace.record.fake_cache import Plainly
from foretell.trace.record.reads import ORDINARY, WRAPPERS, ReadingMode
from foretell.trace.record.values import MOST_OVERWRITTEN, about, follow, value_of
from foretell.trace.sandbox.devices import is_elsewhere

_DEVICE = torch.ops.prim.device.default
_CPU = torch.device("cpu")
_NO_SEQUENCE = 2**64 - 1
_GROUPED_MM = torch.ops.aten._grouped_mm.default
_BATCH_NORM_BACKWARD = torch.ops.aten.native_batch_norm_backward.default
"""Its shape rule makes the gradient of an input that wants none."""
_DENSE = {torch.ops.aten.native_batch_norm.default: 0, _BATCH_NORM_BACKWARD: 1}
"""Ops whose first output is dense, in the order of channels that this input has: shape rules give it that input's strides."""
_ROLL = torch.ops.aten.roll.default
"""On a CPU it keeps the order of channels; CUDA's does not, and nor does its shape rule."""
_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default
_MKLDNN_RNN = torch.ops.aten.mkldnn_rnn_layer.default
_KEEP_ELEMENTS = {torch.ops.aten.mse_loss.default, torch.ops.aten.smooth_l1_loss.default}
"""Losses whose sum or mean keeps the storage of all the elements it was made from: PyTorch shrinks the tensor, not that."""
_INTO_ZEROS = {"aten.scatter.src", "aten.scatter_add.default", "aten.index_add.default", "aten.index_put.default"}
"""How the gradient of what was picked goes to where it was."""
_ADDING = {"VarMeanBackward0", "StdMeanBackward0"}
"""Nodes whose formula has a sum."""
_WHOLE = ("bool", "int", "uint")
_PYTHON = ("forward", "recompute")
"""Phases in which ops are asked for by Python, and may be written down by autograd."""


def _fp32_statistics(output: Any) -> Any:
    """CUDA keeps mean and deviation of a low precision input in fp32; the CPU does not."""
    return (output[0], *(statistic.to(torch.float32) for statistic in output[1:]))


def _dense_gradient(output: Any) -> Any:
    """CUDA's gradient of the input is contiguous, whatever the layout of the input."""
    return (output[0] if output[0] is None else output[0].contiguous(), *output[1:])


_MENDS: dict[Any, Callable[[Any], Any]] = {
    torch.ops.aten.native_layer_norm.default: _fp32_statistics,
    torch.ops.aten.native_batch_norm.default: _fp32_statistics,
    torch.ops.aten.native_layer_norm_backward.default: _dense_gradient,
}
"""Outputs that CUDA makes in another dtype or layout than the shape rules of fake CPU tensors say."""
_MENDED = {id(func) for func in (*_MENDS, *_KEEP_ELEMENTS, *_DENSE, _BATCH_NORM_BACKWARD, _ROLL, _CONVOLUTION_BACKWARD, _MKLDNN_RNN)}
"""By identity: an overload's own hash takes longer than the question."""


class RecordedOp:
    """An op while it is being recorded; becomes a frozen `Op` at the end.

    `by_engine`: autograd itself adds two gradients that meet, or a gradient into zeros. Under a dispatch mode it makes a new
    tensor; in a plain run it adds in place wherever nobody else holds the first one.
    """

    __slots__ = ("allocates", "attrs", "by_engine", "frees", "inputs", "module", "name", "outputs", "phase")

    def __init__(self, name: str, module: str, phase: str) -> None:
        self.name, self.module, self.phase = name, module, phase
        self.inputs: tuple[types.Ref, ...] = ()
        self.outputs: tuple[types.Ref, ...] = ()
        self.attrs: tuple[Any, ...] = ()
        self.allocates: list[int] = []
        self.frees: list[int] = []
        self.by_engine = False


class Recorder(ReadingMode):
    """A fake tensor mode that writes down the ops it is asked for, program by program."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the wrapper that would guard against it costs time on every op

    def __init__(self, hints: Mapping[str, float] | None = None) -> None:
        super().__init__(hints)
        self.programs: dict[str, list[RecordedOp]] = {}
        self.sizes: dict[int, int] = {}
        self.born_in: dict[int, RecordedOp | None] = {}
        self.alive_at_backward: set[int] = set()
        self.moved: dict[int, int] = {}
        self._rows: list[RecordedOp] | None = None
        self._last: RecordedOp | None = None
        self._ids: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._valued: set[int] = set()
        self._specs: dict[tuple[Any, Any], types.TensorSpec] = {}
        self._paths: dict[int, str] = {}
        self._parameter_paths: dict[int, str] = {}
        self._stack: list[str] = []
        self._module_of: dict[int, str] = {}
        self.placed: list[weakref.ref[Tensor]] = []
        """Made on the device before the step."""
        self.capability: tuple[int, int] | None = None
        self.release = ""
        """Of torch: the one whose choices are made."""
        self.compiled: list[tuple[Any, str]] = []
        """Modules that the code compiles, and how."""
        self.left_out: set[str] = set()
        """Kinds of attention masks, `causal` and `full`, that the model leaves out here and builds under torch.compile."""

    # ------------------------------------------------------------------ where we are in the step

    @property
    def in_backward(self) -> bool:
        return self._phase == "backward"

    def phase(self, name: str) -> None:
        self._phase = name
        if name == "backward":
            self.alive_at_backward |= self.living()

    @contextmanager
    def program(self, name: str) -> Iterator[None]:
        """Everything run inside is recorded under this name."""
        self._rows = self.programs.setdefault(name, [])
        self._last = self._add_row("foretell.begin")
        try:
            yield
        finally:
            self._rows = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Real tensors in host memory, and no work of the device: reading data, numbering ranks."""
        rows, self._rows = self._rows, None
        try:
            with unset_fake_temporarily():
                yield
        finally:
            self._rows = rows

    @contextmanager
    def scope(self, module: nn.Module) -> Iterator[None]:
        """Ops inside belong to this module (a block that is computed again in backward)."""
        self._stack.append(self._paths.get(id(module), ""))
        try:
            yield
        finally:
            self._stack.pop()

    @contextmanager
    def modules(self, model: nn.Module) -> Iterator[None]:
        """Follow the calls of this model's modules, to know whose op it is."""
        for path, module in model.named_modules():
            self._paths.setdefault(id(module), path)
        for path, parameter in model.named_parameters(remove_duplicate=False):
            self._parameter_paths.setdefault(id(parameter), path.rpartition(".")[0])
        enter = nn.modules.module.register_module_forward_pre_hook(self._enter)
        leave = nn.modules.module.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            enter.remove()
            leave.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._stack.append(self._paths.get(id(module), self._here()))
        self._calls.append(next(self._numbers))

    def _leave(self, module: nn.Module, _: Any, output: Any = None) -> None:
        path = self._stack.pop()
        self._calls.pop()
        if not path and not self._stack and self._rows is not None and self._phase == "forward":
            row = self._add_row("foretell.model_end")
            returned = [t for t in tensors_in(output) if t.requires_grad and t.layout is torch.strided]
            row.inputs = self._refs([t for t in returned if t.untyped_storage()._cdata in self._ids], None)

    def _here(self) -> str:
        return self._stack[-1] if self._stack else ""

    # ------------------------------------------------------------------ ops

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return args[0].fake_device
        if self.shape_env is not None and any(issubclass(kind, WRAPPERS) for kind in kinds):
            return NotImplemented
        elsewhere = bool(kwargs) and is_elsewhere(kwargs.get("device"))
        if elsewhere:
            kwargs = {**kwargs, "device": _CPU}
        if self._depth:
            return self.dispatch(func, kinds, args, kwargs or {})
        if self._rows is None:
            output = self._unrecorded(func, kinds, args, kwargs or {})
            if elsewhere and isinstance(output, Tensor):
                self.placed.append(weakref.ref(output))
            return output
        return self._run(func, kinds, args, kwargs or {})

    def _unrecorded(self, func: Any, kinds: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """While the model is built."""
        self._depth += 1
        try:
            output = self.answered(func, kinds, args, kwargs)
        finally:
            self._depth -= 1
        follow(func, args, kwargs, output, False, str)
        return output

    def _run(self, func: Any, kinds: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self._depth += 1
        try:
            if func is _GROUPED_MM:
                output = self._grouped_mm(args, kwargs)
            else:
                output = self.answered(func, kinds, args, kwargs)
        finally:
            self._depth -= 1
        if id(func) in _MENDED:
            output = self._mended(func, args, output)
        with Plainly():
            self._write_down(func, args, kwargs, output)
        return output

    def _write_down(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        attrs = attributes(func, args)
        if self.capability is not None and self.capability >= (8, 0) and rounds(func, args):
            attrs = (*attrs, types.TF32)
        row = self.record(self._name(func), (args, kwargs), output, attrs)
        if self._matters(func, row):
            follow(func, args, kwargs, output, True, lambda: self.where(func))
            for tensor in tensors_in((args, kwargs, output)):
                if tensor.layout is torch.strided:
                    (self._valued.discard if value_of(tensor) is None else self._valued.add)(self.storage_id(tensor))

    def _mended(self, func: Any, args: Any, output: Any) -> Any:
        """What the device makes, where shape rules on a CPU say otherwise."""
        mend = _MENDS.get(func)
        if mend is not None and self.capability is not None:
            with self.muted():
                output = mend(output)
        if func in _KEEP_ELEMENTS and (len(args) < 3 or args[2] != 0):
            with self.muted():
                elements = torch.broadcast_shapes(args[0].shape, args[1].shape)
                output = args[0].new_empty(elements, dtype=output.dtype).as_strided((), ())
        if func is _BATCH_NORM_BACKWARD:
            output = tuple(made if wanted else None for made, wanted in zip(output, args[9], strict=True))
        if func is _ROLL and self.capability is None and is_channels_last(args[0]):
            with self.muted():
                output = output.contiguous(memory_format=torch.channels_last)
        if func is _CONVOLUTION_BACKWARD and self.capability is None and args[10][2] and not args[10][1]:
            with self.muted():
                output = (output[0], _unasked_gradient(args), output[2])
        if func in _DENSE and output[0] is not None and not output[0].is_contiguous():
            with self.muted():
                output = (output[0].contiguous(memory_format=suggest_memory_format(args[_DENSE[func]])), *output[1:])
        if func is _MKLDNN_RNN and self.capability is None:
            with self.muted():
                output = (*output[:3], output[0].new_empty(_workspace_of(func, args), dtype=torch.uint8))
        return output

    def knows(self, tensor: Tensor) -> None:
        """A tensor that has been seen has got values since."""
        self._valued.add(self.storage_id(tensor))

    def _matters(self, func: Any, row: RecordedOp) -> bool:
        """Whether an op may give its outputs values, or take some away."""
        op = about(func)
        if not op.follows:
            return False
        if op.writes:
            small = op.overwrites and self._phase != "update" and prod(row.inputs[0].spec.shape) <= MOST_OVERWRITTEN
            return small or any(ref.storage in self._valued for ref in row.inputs)
        if self._phase == "update":
            return False  # nobody reads what an optimizer makes
        if op.rule is not None and row.outputs and row.outputs[-1].spec.dtype.startswith(_WHOLE):
            return True
        return all(ref.storage in self._valued for ref in row.inputs)

    def _grouped_mm(self, args: Any, kwargs: Any) -> Any:
        """CUDA takes any float dtype here; the shape rule on fake tensors insists on bf16."""
        low = [value.to(torch.bfloat16) if _is_wide(value) else value for value in args]
        return _GROUPED_MM(*low, **kwargs).to(args[0].dtype)

    def emit(self, name: str, inputs: Any, make: Callable[[], Any], attrs: tuple[Any, ...] = ()) -> Any:
        """Record one op that PyTorch cannot run on fake CPU tensors; `make` builds its outputs."""
        self._depth += 1
        try:
            output = make()
        finally:
            self._depth -= 1
        if self._rows is not None and not self._depth:
            self.record(name, inputs, output, attrs)
        return output

    def record(self, name: str, inputs: Any, outputs: Any, attrs: tuple[Any, ...] = ()) -> RecordedOp:
        row = self._add_row(name)
        asked = self.capability is None and row.phase in _PYTHON and name.startswith("aten.")
        row.attrs = (*attrs, types.NO_GRAD) if asked and not _written_down(inputs) else attrs
        row.by_engine = (
            row.phase == "backward"
            and (name == "aten.add.Tensor" or (name in _INTO_ZEROS and self._is_of_zeros(inputs)))
            and not _in_formula()
            and not tensors_in(inputs)[0]._is_view()  # a view shares its storage with its base, which it holds
        )
        row.inputs = self._refs(inputs, None)
        row.outputs = self._refs(outputs, row)
        return row

    def _is_of_zeros(self, inputs: Any) -> bool:
        born = self.born_in.get(self.storage_id(tensors_in(inputs)[0]))
        return born is not None and born.name in ("aten.new_zeros.default", "aten.zeros.default", "aten.zeros_like.default")

    def _add_row(self, name: str) -> RecordedOp:
        module, phase = self._whose()
        row = RecordedOp(name, module, phase)
        assert self._rows is not None
        self._rows.append(row)
        self._last = row
        return row

    def _whose(self) -> tuple[str, str]:
        phase = self._phase
        if phase == "forward":
            here = self._here()
            self._module_of.setdefault(torch.autograd._get_sequence_nr() - 1, here)
            return here, phase
        if phase == "backward":
            if self._stack:
                here = self._stack[-1]
                self._module_of.setdefault(torch.autograd._get_sequence_nr() - 1, here)
                return here, "recompute"
            node = torch._C._current_autograd_node()
            if node is None:
                return "", phase
            number = node._sequence_nr()
            if number == _NO_SEQUENCE:
                return self._parameter_paths.get(id(node.variable), ""), phase
            return self._module_of.get(number, ""), phase
        return self._here(), phase

    def _refs(self, values: Any, born: RecordedOp | None) -> tuple[types.Ref, ...]:
        found = []
        for tensor in tensors_in(values):
            for part in (tensor,) if tensor.layout is torch.strided else self.parts(tensor):
                number = self._ids.get(part.untyped_storage()._cdata)
                found.append(types.Ref(self.storage_id(part, born) if number is None else number, self.spec(part)))
        return tuple(found)

    def parts(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """The dense tensors that a sparse one is made of: its values first."""
        with self.muted(), self:
            if tensor.layout is torch.sparse_coo:
                return tensor._values(), tensor._indices()
            rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
            first, second = (tensor.crow_indices(), tensor.col_indices()) if rows else (tensor.ccol_indices(), tensor.row_indices())
            return tensor.values(), first, second

    def spec(self, tensor: Tensor) -> types.TensorSpec:
        key = (tensor.shape, tensor.dtype)
        known = self._specs.get(key)
        if known is None:
            known = self._specs[key] = types.TensorSpec(tuple(int(n) for n in tensor.shape), str(tensor.dtype)[6:])
        return known

    # ------------------------------------------------------------------ storages

    def storage_id(self, tensor: Tensor, born: RecordedOp | None = None) -> int:
        """The id of a tensor's storage; a storage never seen before is born in `born`."""
        if tensor.layout is not torch.strided:
            tensor = self.parts(tensor)[0]
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._ids.get(key)
        if known is not None:
            return known
        number = len(self.sizes)
        self._ids[key] = number
        self.sizes[number] = 0 if tensor._is_zerotensor() else storage.nbytes()  # zeros of forward-mode derivatives are nowhere
        self.born_in[number] = born
        if "value" in storage.__dict__:
            self._valued.add(number)
        if born is not None:
            born.allocates.append(number)
        self._alive[number] = weakref.ref(storage, lambda _: self._died(key, number))
        return number

    def _died(self, key: int, number: int) -> None:
        self._ids.pop(key, None)
        self._alive.pop(number, None)
        if self._last is not None:
            self._last.frees.append(number)

    def living(self) -> set[int]:
        return set(self._alive)

    def _ordinary(self, source: Tensor) -> bool | None:
        asked = self.born_in.get(self.storage_id(source)) if self._rows is not None else None
        if asked is None:
            return None
        name = asked.name
        if name == "aten.eq.Scalar" and asked.inputs:
            born = self.born_in.get(asked.inputs[0].storage)
            name = f"{born.name} ==" if born is not None else name
        answer = ORDINARY.get(name, self._healthy(asked))
        if answer is not None:
            self.assumed.add(f"{name} in module '{self._here()}' is taken to be {answer}")
        return answer

    def _healthy(self, asked: RecordedOp) -> bool | None:
        """Whether a number is finite, infinite or none: as in a run that goes well. PyTorch takes these questions apart."""
        made = [born.name if (born := self.born_in.get(ref.storage)) is not None else "" for ref in asked.inputs]
        if asked.name == "aten.mul.Tensor" and made == ["aten.eq.Tensor", "aten.ne.Scalar"]:
            return True
        if asked.name == "aten.ne.Tensor" and len({ref.storage for ref in asked.inputs}) == 1:
            return False
        return False if asked.name == "aten.eq.Scalar" and made == ["aten.abs.default"] else None


def _workspace_of(func: Any, args: Any) -> int:
    """Bytes a CPU's recurrent layer keeps for backward: no shape rule says it, so the library itself is asked."""
    with unset_fake_temporarily(), torch.enable_grad():
        real = [torch.zeros(a.shape, dtype=a.dtype, requires_grad=True) if isinstance(a, Tensor) else a for a in args]
        kept = func(*real)[3]
    return 0 if kept is None else int(kept.numel())


def _unasked_gradient(args: Any) -> Tensor | None:
    """The weight's gradient, which a CPU's library makes with that of the bias."""
    _, data, weight, bias, *how = args[:10]
    backend = torch._C._select_conv_backend(data, weight, None, *how, bias)
    mkldnn = str(backend).endswith(("Mkldnn", "???"))  # the transposed one has no name in Python
    return torch.empty_like(weight) if mkldnn else None


def _in_formula() -> bool:
    """Whether the autograd node that runs adds by itself: a user's own `torch.autograd.Function`, or one of PyTorch's."""
    node = torch._C._current_autograd_node()
    return isinstance(node, torch.autograd.function.BackwardCFunction) or (node is not None and node.name() in _ADDING)


def _written_down(inputs: Any) -> bool:
    """Whether autograd makes a node for an op with these inputs."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in(inputs))


def _is_wide(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float16)
