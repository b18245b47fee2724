"""What kernels over rows share: a call has so many rows of so many elements, and a row is held in registers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from foretell.kernels.kernel import Shape, ShapeBucket, wider

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROWS = {"many": (8192, 1 << 40), "some": (2048, 8191), "few": (0, 2047)}
"""Rows of a bucket. An op in Python takes the CPU longer than one of torch's: whether that is hidden depends on how many there are."""
WIDTHS = (1024, 2048, 4096, 8192, 16384)
"""Elements of a row at most, of each bucket."""


def buckets(*configs: Mapping[str, int], widths: tuple[int, ...] = WIDTHS) -> tuple[ShapeBucket, ...]:
    """One for each width and number of rows.

    A norm's are: warps of a forward program and the rows it has *each*; warps of a backward program, how many of them a multiprocessor
    has, whether the next row is asked for *ahead*, whether the weight is *held* in registers, whether a row is read *again* from the
    cache. Chosen are those that fit the 65,536 registers of sm_90 with the most bytes under way.
    """
    least = (1, *(one + 1 for one in widths))
    return tuple(
        ShapeBucket(name=f"width to {most}, {name} rows", limits={"rows": rows, "width": (least[place], most)}, config=config)
        for place, (most, config) in enumerate(zip(widths, configs, strict=True))
        for name, rows in ROWS.items()
    )


DECLARED = tuple({"rows": rows, "width": width} for rows in (16384, 8192, 2048) for width in (4096, 8192, 1024, 2048, 16384))


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


def has_rows(x: Tensor) -> bool:
    """Whether its rows of elements side by side are as far apart as any two: so are the halves of a tensor, and contiguous ones."""
    strides, shape = x.stride(), x.shape
    return x.dim() > 0 and strides[-1] == 1 and all(strides[at] == strides[at + 1] * shape[at + 1] for at in range(x.dim() - 2))


def as_rows(x: Tensor) -> Tensor:
    """(rows, width): of its memory where it has rows, else of a copy."""
    return x.view(-1, x.shape[-1]) if has_rows(x) else x.reshape(-1, x.shape[-1]).contiguous()


def apart(ctx: Any, total: Tensor) -> tuple[Tensor, ...]:
    """The sum of an add and a norm, where only the norm's parameters are trained: it has no gradient then."""
    return () if ctx.needs_input_grad[0] or ctx.needs_input_grad[1] else (total,)


def must(holds: bool, what: str) -> None:
    """A kernel reads where its arguments say, so that what does not fit is refused before."""
    if not holds:
        raise NotImplementedError(f"this kernel takes {what}; torch's own op may take more")
