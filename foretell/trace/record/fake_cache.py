"""Fake tensors look up every op in a cache; what they look it up by, and the tensors they find, are made here, in a fraction of the time.

    op and arguments ── key ──► what the op gave once ──► tensors of that shape
                          ├─ not there: by shape rules, and what they give is kept under this one key
                          └─ not ordinary: torch's own way

The key has all that torch's own has: what it leaves out (memory format, layout, the figures of sparse tensors) follows from
sizes and strides, or is the same for every tensor that is written down here. A tensor is made as torch makes it, and has the
attributes of one that torch has made. What torch would not keep is not kept, but for ops whose views it cannot tell: whose
memory an output has is seen when it is made for the first time. Anything else is left to torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, _BypassDispatchCache

from foretell.trace.record.attributes import tensors_in

_PARAMETERS = {
    "dispatch": "self func types args kwargs", "_validate_cache_key": "self func args kwargs", "_dispatch_impl": "self func types args kwargs",
    "_make_cache_entry": "self state key func args kwargs output", "_output_from_cache_entry": "self state entry key func args",
}  # fmt: skip
"""What torch's own methods were given when this was written."""
_PLAIN = frozenset((int, float, bool, str, NoneType, torch.dtype, torch.device, torch.layout, torch.memory_format))
"""Arguments that are keys themselves, with their type: 1 and 1.0 are equal and give other tensors."""
_META = torch.device("meta")
_DEVICE = "_fake_device" if isinstance(inspect.getattr_static(FakeTensor, "fake_device", None), property) else "fake_device"
"""Where a fake tensor has the device that it is said to be on."""
_BYPASS, _AS_TORCH = object(), object()
"""Kept for what shape rules work out anew each time; for what torch looks up."""
_UNSEEN = (None, None)
_MAY_BE_VIEWS = ("unsafe view", "CompositeImplicitAutograd")
"""Why torch does not keep what some ops give: their schema does not tell views."""
_HANDLED = {id(func) for name in ("_DISPATCH_META_HANDLERS", "_DISPATCH_HANDLE_DIRECTLY") for func in getattr(fake_tensor, name)}
"""Questions that torch answers before it looks up anything."""
Plainly = torch._C.DisableTorchFunctionSubclass
"""A block that asks much of fake tensors, and takes a fraction of the time where torch need not look for each whether its class answers."""
_subclass = torch._C.TensorBase._make_subclass
"""PyTorch's, also while `Tensor` has another one."""


class FakeOutputs(NamedTuple):
    """How to make what an op gives."""

    within: type | None
    """What its outputs are in, if they are several."""
    outputs: tuple[tuple[Any, ...], ...]


class _NotKept(Exception):
    """Nothing is kept of an op: who is asked each time."""


def is_known() -> bool:
    """Whether torch keeps what ops give as it did when this was written."""
    return all(
        hasattr(FakeTensorMode, name) and " ".join(inspect.signature(getattr(FakeTensorMode, name)).parameters) == parameters
        for name, parameters in _PARAMETERS.items()
    )


class QuickFakes(FakeTensorMode):
    """A fake tensor mode that is quick with ops that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self._quick = is_known() and self.cache_enabled and not self.cache_crosscheck_enabled
        self._attributes: dict[torch.device, dict[str, Any]] = {}
        lenient = self._allow_unsafe_data_ptr_access
        self._without_data = torch._C._set_warn_deprecated_on_mutable_data_ptr if lenient else torch._C._set_throw_on_mutable_data_ptr

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._quick or not self.cache_enabled or self.shape_env is not None:
            return super().dispatch(func, types, args, kwargs or {})
        with Plainly():
            key = self._key(func, args, kwargs)
            kept = _AS_TORCH if key is None else self.cache.get(key, _UNSEEN)[1]  # type: ignore[call-overload]
            if type(kept) is FakeOutputs:
                outputs = [self._made(one, args) for one in kept.outputs]
                return outputs[0] if kept.within is None else kept.within(outputs)
        how = super().dispatch if kept is _AS_TORCH or id(func) in _HANDLED else self._dispatch_impl
        if getattr(func, "namespace", "") == "aten":
            with Plainly():
                output = how(func, types, args, kwargs or {})
        else:  # anybody's code, with tensors of any class
            output = how(func, types, args, kwargs or {})
        if kept is None and how == self._dispatch_impl:
            with Plainly():
                kept = self._kept(func, args, kwargs or {}, output)
            self.cache[key] = (func, kept)  # type: ignore[index, assignment]  # the op stays: no other gets its id
        return output

    def _key(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
        found: list[Any] = [id(func), torch.get_default_dtype(), torch._C._get_default_device(), torch.is_inference_mode_enabled()]
        if not self._describe(found, args):
            return None
        if kwargs:
            found += kwargs
            if not self._describe(found, kwargs.values()):
                return None
        return tuple(found)

    def _describe(self, found: list[Any], args: Iterable[Any]) -> bool:
        """Add what matters of each argument; False where one is left to torch."""
        for arg in args:
            kind = type(arg)
            if kind is FakeTensor:
                own = arg.__dict__
                if own["fake_mode"] is not self or own["constant"] is not None or arg.layout is not torch.strided:
                    return False
                found += (
                    arg.dtype, arg.shape, arg.stride(), own[_DEVICE], arg.storage_offset(), arg.untyped_storage().nbytes(),
                    arg.requires_grad, arg.is_conj(), arg.is_neg(), arg.is_inference(),
                )  # fmt: skip
            elif kind in _PLAIN:
                found += (kind, arg)
            elif kind is tuple or kind is list:
                found += (kind, len(arg))
                if not self._describe(found, arg):
                    return False
            else:
                return False
        return True

    def _made(self, one: tuple[Any, ...], args: Any) -> Any:
        if len(one) == 2:
            return args[one[1]] if one[0] == "argument" else one[1]
        shape, stride, dtype, requires_grad, device, view_of, offset = one
        with torch._C._DisableTorchDispatch():
            meta = torch.empty_strided(shape, stride, dtype=dtype, device=_META, requires_grad=requires_grad)
            if view_of is not None:
                meta.set_(args[view_of].untyped_storage(), offset, shape, stride)
        attributes = self._attributes.get(device)
        if attributes is None:
            output = FakeTensor(self, meta, device)
            self._attributes[device] = dict(vars(output))
            return output
        made: Any = _subclass(FakeTensor, meta, requires_grad, dispatch_device=True, device_for_backend_keys=device)
        self._without_data(made)
        made.__dict__.update(attributes)
        return made

    def _kept(self, func: Any, args: Any, kwargs: Any, output: Any) -> Any:
        """How to make what an op gave, or whom to ask each time: as torch decides it, and where torch gives up because an output may be
        a view, by what it is a view of."""
        if not isinstance(func, torch._ops.OpOverload):
            return _AS_TORCH
        declared = not isinstance(output, list)
        try:
            self._validate_cache_key(func, args, kwargs)
        except _BypassDispatchCache as refused:
            if getattr(refused, "reason", "") not in _MAY_BE_VIEWS:
                return _BYPASS
            declared = False
        within = next((kind for kind in (tuple, list) if isinstance(output, kind)), None)
        parts = output if within else (output,)
        try:
            kept = FakeOutputs(within, tuple([self._part(func, args, kwargs, one, declared) for one in parts]))
        except _NotKept as whom:
            return whom.args[0]
        made = [one.untyped_storage()._cdata for one, how in zip(parts, kept.outputs, strict=True) if len(how) > 2 and how[5] is None]
        return kept if declared or len(made) == len(set(made)) else _BYPASS

    def _part(self, func: Any, args: Any, kwargs: Any, output: Any, declared: bool) -> tuple[Any, ...]:
        """How to make one output. `declared`: its schema says whether it is a view."""
        if output is None or isinstance(output, int):
            return "constant", output
        if type(output) is not FakeTensor or output.constant is not None or output.layout is not torch.strided:
            raise _NotKept(_BYPASS)
        if any(one is output for one in kwargs.values()):
            raise _NotKept(_BYPASS)
        for place, one in enumerate(args):
            if one is output:
                return "argument", place
        if output.is_conj() or output.is_neg():
            raise _NotKept(_AS_TORCH if declared else _BYPASS)
        view_of = _viewed(func, args) if declared else _aliased(output, args, kwargs)
        how = (
            tuple(output.shape), output.stride(), output.dtype, output.requires_grad, output.fake_device, view_of, output.storage_offset()
        )  # fmt: skip
        made = self._made(how, args)
        same = torch._C._dispatch_key_set(made) == torch._C._dispatch_key_set(output)
        if not same or not (declared or made.untyped_storage().nbytes() == output.untyped_storage().nbytes()):
            raise _NotKept(_BYPASS)
        return how


def _viewed(func: Any, args: Any) -> int | None:
    """The tensor that an op gives a view of, by its schema."""
    if not func.is_view:
        return None
    places = [place for place, one in enumerate(args) if isinstance(one, Tensor)]
    if len(places) != 1:
        raise _NotKept(_BYPASS)
    return places[0]


def _aliased(output: Any, args: Any, kwargs: Any) -> int | None:
    """The argument whose memory an output has."""
    memory = output.untyped_storage()._cdata
    for place, one in enumerate(args):
        if isinstance(one, Tensor) and one.untyped_storage()._cdata == memory:
            return place
    if any(one.untyped_storage()._cdata == memory for one in tensors_in([args, kwargs])):
        raise _NotKept(_BYPASS)
    return None
