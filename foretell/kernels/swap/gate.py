"""Which calls of a module its kernel takes; every other goes to the module's own forward.

A tensor of a subclass (DTensor, functorch's), another device or format, a shape or strides nobody verified: all of them are left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from foretell.kernels.kernel import ShapeBucket, TrainingKernel

PLAIN = (Tensor, nn.Parameter, FakeTensor)

NEVER, FLOAT32, UNTOUCHED = "never", "float32", "untouched"
"""What autocast means for the module: its kernel is for float32 alone, its op is cast to float32, its ops stay as they are."""


def contiguous(x: Tensor) -> bool:
    return x.is_contiguous()


def side_by_side(x: Tensor) -> bool:
    return x.stride(-1) == 1


@dataclass(frozen=True, kw_only=True)
class KernelGate:
    """Where a kernel stands for a module."""

    kernel: TrainingKernel
    buckets: Mapping[torch.dtype, tuple[ShapeBucket, ...]]
    devices: tuple[str, ...] = ("cuda",)
    autocast: str = NEVER
    layout: Callable[[Tensor], bool] = contiguous
    once: bool = False
    """Whether every graph is gone through once, so that a backward may write over what it needs no more."""
    emulated: bool = False
    """Tensors of a CPU are taken for those of a GPU: a trace."""

    def takes(self, *tensors: Tensor | None) -> bool:
        """`tensors`: the call's, as the kernel's `shape_of` takes them; the first decides on format and device."""
        first = tensors[0]
        if first is None:
            return False
        kind = "cuda" if self.emulated else first.device.type
        if kind not in self.devices:
            return False
        dtype = first.dtype
        if self.autocast != UNTOUCHED and torch.is_autocast_enabled(first.device.type):
            if kind == "cuda" and self.autocast == FLOAT32:
                dtype = torch.float32
            elif dtype != torch.float32:
                return False
        if dtype not in self.buckets:
            return False
        for one in tensors:
            if one is not None and not (
                type(one) in PLAIN and one.device == first.device and one.dtype in (first.dtype, dtype) and self.layout(one)
            ):
                return False
        shape = self.kernel.shape_of(*tensors)
        return any(one.holds(shape) for one in self.buckets[dtype])
