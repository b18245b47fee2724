"""Tensors of the user's own class (`Tensor._make_subclass`, `as_subclass`) while all tensors are fake.

A fake tensor cannot become one of another class, so it becomes one of both: the user's and PyTorch's fake one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from foretell.trace.sandbox.replaced import replaced


class _Plain:
    """PyTorch's way of giving results the class of what they were made of; fake tensors have none."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Tensor.__torch_function__.__func__(cls, func, types, args, kwargs or {})  # type: ignore[attr-defined]


@contextmanager
def own_classes() -> Iterator[None]:
    """Until the end of the block."""
    made: dict[type, type] = {}
    plain, changed = Tensor._make_subclass, Tensor.as_subclass

    def both(kind: type) -> type:
        if issubclass(kind, FakeTensor):
            return kind
        if kind not in made:
            made[kind] = type(kind.__name__, (kind, _Plain, FakeTensor), {"__torch_dispatch__": FakeTensor.__torch_dispatch__})
        return made[kind]

    def make(kind: Any, data: Tensor, require_grad: bool = False, **options: Any) -> Any:
        if not isinstance(data, FakeTensor) or kind.__module__.partition(".")[0] == "torch":
            return plain(kind, data, require_grad, **options)
        with torch._C.DisableTorchFunctionSubclass():
            tensor: Any = data.detach()
            tensor.__class__ = both(kind)
            return tensor.requires_grad_(require_grad)

    def as_subclass(tensor: Tensor, kind: Any) -> Any:
        if not isinstance(tensor, FakeTensor):
            return tensor if issubclass(kind, FakeTensor) else changed(tensor, kind)  # inside PyTorch's rules for shapes
        with torch._C.DisableTorchFunctionSubclass():
            twin: Any = tensor.view_as(tensor)
            twin.__class__ = FakeTensor if issubclass(FakeTensor, kind) else both(kind)
            return twin

    with replaced([(Tensor, "_make_subclass", staticmethod(make)), (Tensor, "as_subclass", as_subclass)]):
        yield
