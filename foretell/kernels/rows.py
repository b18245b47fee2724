"""What kernels over rows share: a call has so many rows of so many elements, and a row is held in registers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foretell.kernels.kernel import Shape, ShapeBucket, wider

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MANY = 2048
"""Rows from which a call is long enough to be worth the CPU's time for it; those of fewer are a bucket apart."""
WIDTHS = {
    (1, 1024): {"warps": 2, "each": 1, "backward_warps": 4, "per_sm": 8, "ahead": 1},
    (1025, 2048): {"warps": 4, "each": 1, "backward_warps": 4, "per_sm": 4, "ahead": 1},
    (2049, 4096): {"warps": 4, "each": 1, "backward_warps": 8, "per_sm": 3, "ahead": 1},
    (4097, 8192): {"warps": 8, "each": 1, "backward_warps": 16, "per_sm": 2, "ahead": 1},
    (8193, 16384): {"warps": 16, "each": 1, "backward_warps": 32, "per_sm": 1, "ahead": 1},
}
BUCKETS = tuple(
    ShapeBucket(name=f"width to {width[1]}, {name}", limits={"rows": rows, "width": width}, config=config)
    for width, config in WIDTHS.items()
    for name, rows in (("many rows", (MANY, 1 << 40)), ("few rows", (0, MANY - 1)))
)
DECLARED = tuple({"rows": rows, "width": width} for rows in (16384, MANY) for width in (4096, 8192, 1024, 2048, 16384))


def shape_of(x: Tensor, *_: Any) -> Shape:
    return {"rows": x.shape[:-1].numel(), "width": x.shape[-1]}


def drawn(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape["rows"], shape["width"], dtype=dtype, device=device)


def like(x: Tensor) -> Tensor:
    """What a kernel writes for x: of its shape, contiguous."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def each_row(x: Tensor) -> Tensor:
    """A number of a row, in the format a kernel computes in."""
    return x.new_empty(x.shape[:-1].numel(), dtype=wider(x.dtype))
