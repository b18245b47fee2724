"""Which calls of a module its kernel takes; every other goes to the module's own forward.

A tensor of a subclass (DTensor, functorch's), another device or format, a shape or strides nobody verified: all of them are left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from foretell.kernels.kernel import ShapeBucket, TrainingKernel

PLAIN = (Tensor, nn.Parameter, FakeTensor)


@dataclass(frozen=True, kw_only=True)
class KernelGate:
    """Where a kernel stands for a module."""

    kernel: TrainingKernel
    buckets: Mapping[torch.dtype, tuple[ShapeBucket, ...]]
    devices: tuple[str, ...] = ("cuda",)
    cast: bool = False
    """Whether CUDA's autocast casts the module's op to float32, as it does the kernel's."""

    def takes(self, *tensors: Tensor | None) -> bool:
        """`tensors`: the call's, as the kernel's `shape_of` takes them; the first decides on format and device."""
        first = tensors[0]
        if first is None or first.device.type not in self.devices:
            return False
        dtype = first.dtype
        if torch.is_autocast_enabled(first.device.type):
            if first.device.type == "cuda" and self.cast:
                dtype = torch.float32
            elif dtype != torch.float32:
                return False
        for one in tensors:
            if one is not None and (type(one) not in PLAIN or one.device != first.device or one.dtype not in (first.dtype, dtype)):
                return False
        if dtype not in self.buckets or not first.is_contiguous():
            return False
        shape = self.kernel.shape_of(*tensors)
        return any(one.holds(shape) for one in self.buckets[dtype])
