"""Record a flow: a mode that sees every torch call of the model's code, over fake tensors that hold no numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from foretell.errors import ForetellError, ModelError
from foretell.trace.flow.calls import (
    ADAPTED_CALLS,
    CUSTOM,
    OPENED,
    Call,
    Flow,
    FlowValue,
    SliceKey,
    ValueRef,
    call_name,
    opened,
)
from foretell.trace.record.recorder import Recorder
from foretell.trace.record.step import Workload, compute_loss

_WRITES = frozenset({"__setitem__"})
"""Calls that change their first tensor and give nothing back."""


def record(workload: Workload) -> Flow:
    from foretell.trace.sandbox.blame import step_error

    watch = _CallWatch(workload.model)
    recorder = Recorder()
    recorder.allow_non_fake_inputs = True
    try:
        with recorder, recorder.program("forward"), watch.modules(), watch.functions(), watch, torch.enable_grad():
            recorder.phase("forward")
            watch.inputs = frozenset(watch.number(t) for t in _tensors(workload.batch))
            compute_loss(workload)
    except ForetellError:
        raise
    except Exception as error:
        raise step_error(type(workload.model).__name__, error) from error
    return watch.flow()


class _CallWatch(TorchFunctionMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.values: list[FlowValue] = []
        self.calls: list[Call] = []
        self.inputs: frozenset[int] = frozenset()
        self.custom: dict[type, None] = {}
        self._held: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._muted = 0
        self._stack: list[str] = []
        self._paths: dict[int, str] = {}
        for path, module in model.named_modules():
            self._paths.setdefault(id(module), path)
        names: dict[int, list[str]] = {}
        self._parameters: dict[int, tuple[str, ...]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(self.number(parameter), []).append(name)
        self._parameters = {number: tuple(found) for number, found in names.items()}

    # ------------------------------------------------------------ calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = call_name(func)
        if name == "__iter__":
            with self:
                return iter(args[0].unbind(0))
        if name in OPENED and not self._muted:
            with self:
                return opened(func)(*args, **kwargs)
        self._muted += name in ADAPTED_CALLS
        try:
            output = func(*args, **kwargs)
        finally:
            self._muted -= name in ADAPTED_CALLS
        if not self._muted:
            self._note(name, args, kwargs, args[0] if name in _WRITES else output)
        return output

    def _note(self, name: str, args: Any, kwargs: Any, output: Any) -> None:
        found = list(_tensors(output))
        if not found:
            return
        given = tuple(self._frozen(value) for value in args)
        named = {key: self._frozen(value) for key, value in kwargs.items()}
        module = self._stack[-1] if self._stack else ""
        self.calls.append(Call(name, module, given, named, tuple(self._fresh(tensor) for tensor in found)))

    def number(self, tensor: Tensor) -> int:
        """The value that a tensor is now."""
        known = self._numbers.get(id(tensor))
        if known is not None:
            return known
        if tensor.grad_fn is not None:
            where = self._stack[-1] if self._stack else ""
            raise ModelError(
                f"{where or type(self.model).__name__} uses a tensor that comes from code PyTorch does not show (torch.jit.script?)",
                "write that part as plain PyTorch",
            )
        return self._fresh(tensor)

    def _fresh(self, tensor: Tensor) -> int:
        self._held.append(tensor)  # so that no other tensor gets its id
        self._numbers[id(tensor)] = len(self.values)
        shape = tuple(int(size) for size in tensor.shape)
        self.values.append(FlowValue(shape, str(tensor.dtype)[6:], tensor.requires_grad))
        return len(self.values) - 1

    def _frozen(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return ValueRef(self.number(value))
        if isinstance(value, (list, tuple)):
            return tuple(self._frozen(item) for item in value)
        if isinstance(value, slice):
            return SliceKey(*(self._frozen(edge) for edge in (value.start, value.stop, value.step)))
        if value is None or value is Ellipsis or isinstance(value, (bool, int, float, str)):
            return value
        return str(value)

    # ------------------------------------------------------------ where the calls come from

    @contextmanager
    def modules(self) -> Iterator[None]:
        enter = nn.modules.module.register_module_forward_pre_hook(
            lambda module, _: self._stack.append(self._paths.get(id(module), ""))
        )
        leave = nn.modules.module.register_module_forward_hook(lambda *_: _drop(self._stack), always_call=True)
        try:
            yield
        finally:
            enter.remove()
            leave.remove()

    @contextmanager
    def functions(self) -> Iterator[None]:
        """A user's own autograd function is one call: its backward is code of its own."""
        function: Any = torch.autograd.Function
        plain = function.__dict__["apply"]

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            self._muted += 1
            try:
                output = plain.__get__(None, cls)(*args, **kwargs)
            finally:
                self._muted -= 1
            if not self._muted:
                self.custom[cls] = None
                self._note(f"{CUSTOM} {cls.__name__}", args, kwargs, output)
            return output

        function.apply = classmethod(apply)
        try:
            yield
        finally:
            function.apply = plain

    def flow(self) -> Flow:
        numbers = {}
        for path, module in self.model.named_modules():
            found = {name: value for name, value in vars(module).items() if "head" in name and type(value) is int}
            if found:
                numbers[path] = found
        return Flow(
            values=tuple(self.values), calls=tuple(self.calls), parameters=self._parameters, inputs=self.inputs,
            numbers=numbers, functions=tuple(self.custom),
        )  # fmt: skip


def _drop(stack: list[str]) -> None:
    stack.pop()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
