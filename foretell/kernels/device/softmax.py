"""Softmax in two passes over a row, by programs of a row each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretell.kernels.papers.softmax import plain

BLOCK = 4096


@triton.jit
def _pair(x):  # type: ignore[no-untyped-def]
    n = tl.maximum(tl.floor(x * 1.4426950408889634 + 0.5), -65536.0)
    m = tl.exp(x - n * 0.6875 - n * 0.005645751953125 - n * 1.4286068203094172e-06)
    return tl.where(n == -65536.0, 0.0, m), n


@triton.jit
def two_pass_rows(x, y, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    total, power = tl.zeros([BLOCK], tl.float32), tl.full([BLOCK], -65536.0, tl.float32)
    for start in range(0, width, BLOCK):
        value = tl.load(x + row + start + at, mask=start + at < width, other=float("-inf"), eviction_policy="evict_first").to(tl.float32)
        m, n = _pair(value)
        higher = tl.maximum(power, n)
        total = total * tl.exp2(power - higher) + m * tl.exp2(n - higher)
        power = higher
    highest = tl.max(power, 0)
    scale = 1.0 / tl.sum(total * tl.exp2(power - highest), 0)
    for start in range(0, width, BLOCK):
        value = tl.load(x + row + start + at, mask=start + at < width, other=float("-inf")).to(tl.float32)
        m, n = _pair(value)
        tl.store(y + row + start + at, (m * tl.exp2(n - highest) * scale).to(y.dtype.element_ty), mask=start + at < width)


def two_pass(x: Tensor) -> Tensor:
    if x.dtype == torch.float64 or not x.numel():
        return plain(x)
    y, width = torch.empty_like(x), x.shape[-1]
    block = min(BLOCK, triton.next_power_of_2(width))
    two_pass_rows[(x.numel() // width,)](x, y, width, BLOCK=block, num_warps=8 if block == BLOCK else 4)
    return y
