"""Packed weights unpacked on CUDA by one kernel, which allocates nothing but the result."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

AT_ONCE = 1024
"""Weights of one program."""


@triton.jit
def _unpack(packed, absmax, table, out, count, BITS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    inside = place < count
    number = tl.load(packed + place * BITS // 8, mask=inside, other=0).to(tl.int32)
    if BITS == 4:
        number = tl.where(place % 2 == 0, number >> 4, number & 15)
    scale = tl.load(absmax + place // 64, mask=inside, other=0.0)
    value = tl.load(table + number, mask=inside, other=0.0) * scale
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


def unpack(packed: Tensor, absmax: Tensor, table: Tensor, out: Tensor, bits: int) -> None:
    """Fill `out` with the values of packed weights of 4 or 8 bits, one scale for every 64; all are contiguous."""
    count = out.numel()
    _unpack[(triton.cdiv(count, AT_ONCE),)](packed, absmax, table, out, count, BITS=bits, WIDTH=AT_ONCE)
