"""RMSNorm and LayerNorm, each with or without the residual add: one forward, one backward, one sum of partial gradients.

A row is held in registers by one program, so that it is read once. Backward programs take every so-many-th row; while one row is
reduced the next is on its way.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretell.kernels import measured
from foretell.kernels.kernel import HALVES, TrainingKernel, wider
from foretell.kernels.layer_norm import ADD_LAYER_NORM, LAYER_NORM
from foretell.kernels.rms_norm import ADD_RMS_NORM, RMS_NORM

COLUMNS, ROWS = 16, 256
"""Of a program that adds up the parts of the weight's gradient: few turns, as each waits for its loads."""


@triton.jit
def forward_rows(x, residual, weight, bias, total, y, mean, rstd, rows, width, eps, offset,
                 BLOCK: tl.constexpr, EACH: tl.constexpr, ADD: tl.constexpr, MEAN: tl.constexpr, WEIGHT: tl.constexpr,
                 BIAS: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = at < width
    for each in range(EACH):
        row = tl.program_id(0).to(tl.int64) * EACH + each
        if row < rows:
            value = tl.load(x + row * width + at, mask=inside, other=0.0).to(WIDE)
            if ADD:
                value = value + tl.load(residual + row * width + at, mask=inside, other=0.0).to(WIDE)
                rounded = value.to(total.dtype.element_ty)
                tl.store(total + row * width + at, rounded, mask=inside)
                value = rounded.to(WIDE)
            if MEAN:
                middle = tl.sum(value, 0) / width
                tl.store(mean + row, middle)
                value = tl.where(inside, value - middle, 0.0)
            scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
            tl.store(rstd + row, scale)
            value = value * scale
            if WEIGHT:
                value = value * (offset + tl.load(weight + at, mask=inside, other=0.0).to(WIDE))
            if BIAS:
                value = value + tl.load(bias + at, mask=inside, other=0.0).to(WIDE)
            tl.store(y + row * width + at, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def backward_rows(dy, dsum, x, weight, mean, rstd, dx, dweights, dbiases, rows, width, offset,
                  BLOCK: tl.constexpr, ADD: tl.constexpr, MEAN: tl.constexpr, WEIGHT: tl.constexpr, WANTS: tl.constexpr,
                  BIAS: tl.constexpr, AHEAD: tl.constexpr, HOLD: tl.constexpr, AGAIN: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    first, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    at = tl.arange(0, BLOCK)
    inside = at < width
    if WEIGHT and HOLD:
        learned = offset + tl.load(weight + at, mask=inside, other=0.0).to(WIDE)
    dweight = tl.zeros([BLOCK], WIDE)
    dbias = tl.zeros([BLOCK], WIDE)
    if AHEAD:
        next_x = tl.load(x + first * width + at, mask=inside, other=0.0)
        next_dy = tl.load(dy + first * width + at, mask=inside, other=0.0)
        if ADD:
            next_sum = tl.load(dsum + first * width + at, mask=inside, other=0.0)
    for row in range(first, rows, programs):
        if AHEAD:
            value, up = next_x.to(WIDE), next_dy.to(WIDE)
            after = tl.minimum(row + programs, rows - 1)  # past the end they all ask for the last row, which the cache has
            next_x = tl.load(x + after * width + at, mask=inside, other=0.0)
            next_dy = tl.load(dy + after * width + at, mask=inside, other=0.0)
            if ADD:
                through = next_sum.to(WIDE)
                next_sum = tl.load(dsum + after * width + at, mask=inside, other=0.0)
        else:
            value = tl.load(x + row * width + at, mask=inside, other=0.0).to(WIDE)
            up = tl.load(dy + row * width + at, mask=inside, other=0.0).to(WIDE)
            if ADD and not AGAIN:
                through = tl.load(dsum + row * width + at, mask=inside, other=0.0).to(WIDE)
        scale = tl.load(rstd + row)
        if MEAN:
            middle = tl.load(mean + row)
            value = tl.where(inside, value - middle, 0.0)
        unit = value * scale
        wide = up
        if WEIGHT:
            if not HOLD:
                learned = offset + tl.load(weight + at, mask=inside, other=0.0).to(WIDE)
            wide = up * learned
        along = tl.sum(wide * unit, 0) / width
        if MEAN:
            level = tl.sum(wide, 0) / width
        if AGAIN:
            # From the cache: a row this wide does not fit beside its sums.
            unit = tl.load(x + row * width + at, mask=inside, other=0.0, eviction_policy="evict_first").to(WIDE)
            if MEAN:
                unit = tl.where(inside, unit - middle, 0.0)
            unit = unit * scale
            up = tl.load(dy + row * width + at, mask=inside, other=0.0, eviction_policy="evict_first").to(WIDE)
            wide = up
            if WEIGHT:
                wide = up * (offset + tl.load(weight + at, mask=inside, other=0.0, eviction_policy="evict_last").to(WIDE))
        if WANTS:
            dweight += up * unit
        if BIAS:
            dbias += up
        part = wide - unit * along
        if MEAN:
            part = part - level
        part = part * scale
        if ADD:
            if AGAIN:
                through = tl.load(dsum + row * width + at, mask=inside, other=0.0).to(WIDE)
            part = part + through
        tl.store(dx + row * width + at, part.to(dx.dtype.element_ty), mask=inside)
    if WANTS:
        tl.store(dweights + first * width + at, dweight, mask=inside)
    if BIAS:
        tl.store(dbiases + first * width + at, dbias, mask=inside)


@triton.jit
def add_parts(dweights, dbiases, dweight, dbias, parts, width, COLUMNS: tl.constexpr, ROWS: tl.constexpr, WANTS: tl.constexpr,
              BIAS: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    of = tl.arange(0, ROWS)
    weights = tl.zeros([ROWS, COLUMNS], WIDE)
    biases = tl.zeros([ROWS, COLUMNS], WIDE)
    for start in range(0, parts, ROWS):
        there = ((start + of)[:, None] < parts) & (at[None, :] < width)
        place = (start + of)[:, None] * width + at[None, :]
        if WANTS:
            weights += tl.load(dweights + place, mask=there, other=0.0)
        if BIAS:
            biases += tl.load(dbiases + place, mask=there, other=0.0)
    if WANTS:
        tl.store(dweight + at, tl.sum(weights, 0).to(dweight.dtype.element_ty), mask=at < width)
    if BIAS:
        tl.store(dbias + at, tl.sum(biases, 0).to(dbias.dtype.element_ty), mask=at < width)


# ---------------------------------------------------------------- launches


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _wide(dtype: torch.dtype) -> Any:
    return tl.float64 if wider(dtype) == torch.float64 else tl.float32


def _forward(
    kernel: TrainingKernel, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, mean: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """sum, y, mean, rstd; those that were not asked for are x."""
    width, rows = x.shape[-1], x.shape[:-1].numel()
    x = x.contiguous()
    y = torch.empty_like(x)
    total = torch.empty_like(x) if residual is not None else x
    rstd = torch.empty(rows, dtype=wider(x.dtype), device=x.device)
    middle = torch.empty_like(rstd) if mean else rstd
    chosen = measured.config(kernel, {"rows": rows, "width": width}, x.device)
    each = chosen.get("each", 1)
    if x.numel():
        forward_rows[(triton.cdiv(rows, each),)](
            x, x if residual is None else residual.contiguous(), x if weight is None else weight, x if bias is None else bias, total, y, middle,
            rstd, rows, width, eps, offset, BLOCK=triton.next_power_of_2(width), EACH=each, ADD=residual is not None, MEAN=mean,
            WEIGHT=weight is not None, BIAS=bias is not None, WIDE=_wide(x.dtype), num_warps=chosen["warps"], enable_fp_fusion=True,
        )  # fmt: skip
    return total, y, middle, rstd


def _backward(
    kernel: TrainingKernel, dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor | None, rstd: Tensor, offset: float,
    wants: bool, biased: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dx, dweight, dbias; empty where not wanted."""
    width, rows = x.shape[-1], x.shape[:-1].numel()
    x, dy = x.contiguous(), dy.contiguous()
    dx = torch.empty_like(x)
    chosen = measured.config(kernel, {"rows": rows, "width": width}, x.device)
    parts = min(rows, chosen["per_sm"] * multiprocessors(x.device))
    learned = x if weight is None else weight
    shape = {"WANTS": wants, "BIAS": biased, "WIDE": _wide(x.dtype)}
    dweights, dbiases = (x.new_empty((parts, width) if one else 0, dtype=rstd.dtype) for one in (wants, biased))
    dweight, dbias = (learned.new_zeros(width) if one and not rows else learned.new_empty(width if one else 0) for one in (wants, biased))
    if x.numel():
        backward_rows[(parts,)](
            dy, x if dsum is None else dsum.contiguous(), x, learned, rstd if mean is None else mean, rstd, dx, dweights, dbiases, rows, width,
            offset, BLOCK=triton.next_power_of_2(width), ADD=dsum is not None, MEAN=mean is not None, WEIGHT=weight is not None,
            AHEAD=bool(chosen.get("ahead", 1)) and x.dtype in HALVES, HOLD=bool(chosen.get("hold", 1)),
            AGAIN=bool(chosen.get("again", 0)), num_warps=chosen["backward_warps"],
            enable_fp_fusion=True, **shape,
        )  # fmt: skip
        if wants or biased:
            add_parts[(triton.cdiv(width, COLUMNS),)](
                dweights, dbiases, dweight, dbias, parts, width, COLUMNS=COLUMNS, ROWS=ROWS, num_warps=8, enable_fp_fusion=True, **shape
            )  # fmt: skip
    return dx, dweight, dbias


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    _, y, _, rstd = _forward(RMS_NORM, x, None, weight, None, eps, offset, mean=False)
    return y, rstd


def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, wants: bool) -> tuple[Tensor, Tensor]:
    return _backward(RMS_NORM, dy, None, x, weight, None, rstd, offset, wants)[:2]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float) -> tuple[Tensor, Tensor, Tensor]:
    total, y, _, rstd = _forward(ADD_RMS_NORM, x, residual, weight, None, eps, offset, mean=False)
    return total, y, rstd


def add_rms_norm_backward(
    dy: Tensor, dsum: Tensor, total: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, wants: bool
) -> tuple[Tensor, Tensor]:
    return _backward(ADD_RMS_NORM, dy, dsum, total, weight, None, rstd, offset, wants)[:2]


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return _forward(LAYER_NORM, x, None, weight, bias, eps, 0.0, mean=True)[1:]


def layer_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, wants: bool, biased: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _backward(LAYER_NORM, dy, None, x, weight, mean, rstd, 0.0, wants, biased)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _forward(ADD_LAYER_NORM, x, residual, weight, bias, eps, 0.0, mean=True)


def add_layer_norm_backward(
    dy: Tensor, dsum: Tensor, total: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, wants: bool, biased: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _backward(ADD_LAYER_NORM, dy, dsum, total, weight, mean, rstd, 0.0, wants, biased)
