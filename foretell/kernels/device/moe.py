"""What lies between the products of a mixture of experts: the activation, its gradient with that of the shares, and rows put together."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretell.kernels import catalog, measured
from foretell.kernels.moe import KERNEL, backward, forward

catalog.KERNELS.setdefault(KERNEL.name, KERNEL)


@triton.jit
def _activated(h, a, inner, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inner
    gate = tl.load(h + row * 2 * inner + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(h + row * 2 * inner + inner + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(a + row * inner + at, (gate * tl.sigmoid(gate) * up).to(a.dtype.element_ty), mask=inside)


@triton.jit
def _activated_backward(h, da, share, dh, a, dshare, inner, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    part = tl.load(share + row).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, inner, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < inner
        gate = tl.load(h + row * 2 * inner + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(h + row * 2 * inner + inner + at, mask=inside, other=0.0).to(tl.float32)
        wide = tl.load(da + row * inner + at, mask=inside, other=0.0).to(tl.float32)
        open_ = tl.sigmoid(gate)
        made = gate * open_ * up
        total += wide * made
        wide *= part
        tl.store(dh + row * 2 * inner + at, (wide * up * open_ * (1.0 + gate * (1.0 - open_))).to(dh.dtype.element_ty), mask=inside)
        tl.store(dh + row * 2 * inner + inner + at, (wide * gate * open_).to(dh.dtype.element_ty), mask=inside)
        tl.store(a + row * inner + at, (made * part).to(a.dtype.element_ty), mask=inside)
    tl.store(dshare + row, tl.sum(total, 0))


@triton.jit
def _combined(rows, place, share, out, width, CHOICES: tl.constexpr, BLOCK: tl.constexpr, SHARE: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(CHOICES):
        row = tl.load(place + token * CHOICES + choice).to(tl.int64)
        found = tl.load(rows + row * width + at, mask=inside, other=0.0).to(tl.float32)
        if SHARE:
            found *= tl.load(share + token * CHOICES + choice).to(tl.float32)
        total += found
    tl.store(out + token * width + at, total.to(out.dtype.element_ty), mask=inside)


# ---------------------------------------------------------------- launches


def activate(h: Tensor) -> Tensor:
    inner, config = h.shape[1] // 2, _config(h)
    a = h.new_empty(len(h), inner)
    block = min(config["block"], triton.next_power_of_2(inner))
    if a.numel():
        _activated[(len(h), triton.cdiv(inner, block))](h, a, inner, BLOCK=block, num_warps=config["warps"])
    return a


def activate_backward(h: Tensor, da: Tensor, share: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    inner, config = h.shape[1] // 2, _config(h)
    dh, a, dshare = h.new_empty(h.shape), da.new_empty(da.shape), torch.zeros(len(h), dtype=torch.float32, device=h.device)
    if da.numel():
        block = min(config["row_block"], triton.next_power_of_2(inner))
        _activated_backward[(len(h),)](h, da, share, dh, a, dshare, inner, BLOCK=block, num_warps=config["row_warps"])
    return dh, a, dshare


def combine(rows: Tensor, place: Tensor, share: Tensor | None) -> Tensor:
    config, (tokens, choices) = _config(rows), place.shape
    out = rows.new_empty(tokens, rows.shape[1])
    block = min(config["block"], triton.next_power_of_2(rows.shape[1]))
    if out.numel():
        _combined[(tokens, triton.cdiv(rows.shape[1], block))](
            rows, place, place if share is None else share.contiguous(), out, rows.shape[1], CHOICES=choices, BLOCK=block, SHARE=share is not None,
            num_warps=config["warps"],
        )  # fmt: skip
    return out


def moe(*given: Any) -> tuple[Tensor, ...]:
    return forward(*given)


def moe_backward(*given: Any) -> tuple[Tensor, ...]:
    return backward(*given)


def _config(rows: Tensor) -> Any:
    return measured.config(KERNEL, {"tokens": len(rows)}, rows.device)
