"""Lazy modules (`nn.LazyLinear`, ...) on fake tensors: their parameters become fake ones when the first batch shows sizes.

PyTorch changes an uninitialised parameter into a plain one in place. A fake tensor cannot be made in place, so that
a module is given a new one instead, under the same name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, UninitializedTensorMixin

from foretell.trace.sandbox.replaced import replaced


@contextmanager
def lazy_modules() -> Iterator[None]:
    current: list[nn.Module] = []
    infer, new_parameter, new_buffer = LazyModuleMixin._infer_parameters, UninitializedParameter.__new__, UninitializedBuffer.__new__

    def inferred(module: Any, *args: Any, **kwargs: Any) -> Any:
        current.append(module)
        try:
            return infer(module, *args, **kwargs)
        finally:
            current.pop()

    def materialize(tensor: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
        made: Any = torch.empty(shape, dtype=dtype or tensor.dtype)
        module = current[-1]
        if isinstance(tensor, UninitializedParameter):
            made = nn.Parameter(made, tensor.requires_grad)
        for tensors in (module._parameters, module._buffers):
            for name, held in tensors.items():
                if held is tensor:
                    tensors[name] = made

    def parameter(kind: Any, *args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return new_parameter(kind, *args, **{**kwargs, "device": None})

    def buffer(kind: Any, *args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return new_buffer(kind, *args, **{**kwargs, "device": None})

    changes = (
        (LazyModuleMixin, "_infer_parameters", inferred), (UninitializedTensorMixin, "materialize", materialize),
        (UninitializedParameter, "__new__", staticmethod(parameter)), (UninitializedBuffer, "__new__", staticmethod(buffer)),
    )  # fmt: skip
    with replaced(changes):
        yield
