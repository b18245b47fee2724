"""RMSNorm and LayerNorm, each with or without the residual add: one forward, one backward, one sum of partial gradients.

A row is held in registers by one program, so that it is read once. Backward programs take every so-many-th row; while one row is
reduced the next is on its way.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretell.kernels import measured
from foretell.kernels.kernel import TrainingKernel, interpreted
from foretell.kernels.rms_norm import ADD_RMS_NORM, RMS_NORM

PARTS = 64
"""Columns of a program that adds up the parts of the weight's gradient."""


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
            scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / width + eps)
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
                  BIAS: tl.constexpr, AHEAD: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    first, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    at = tl.arange(0, BLOCK)
    inside = at < width
    if WEIGHT:
        learned = offset + tl.load(weight + at, mask=inside, other=0.0).to(WIDE)
    dweight = tl.zeros([BLOCK], WIDE)
    dbias = tl.zeros([BLOCK], WIDE)
    if AHEAD:
        next_x = tl.load(x + first * width + at, mask=inside & (first < rows), other=0.0)
        next_dy = tl.load(dy + first * width + at, mask=inside & (first < rows), other=0.0)
        if ADD:
            next_sum = tl.load(dsum + first * width + at, mask=inside & (first < rows), other=0.0)
    for row in range(first, rows, programs):
        if AHEAD:
            value, up = next_x.to(WIDE), next_dy.to(WIDE)
            there = inside & (row + programs < rows)
            next_x = tl.load(x + (row + programs) * width + at, mask=there, other=0.0)
            next_dy = tl.load(dy + (row + programs) * width + at, mask=there, other=0.0)
            if ADD:
                through = next_sum.to(WIDE)
                next_sum = tl.load(dsum + (row + programs) * width + at, mask=there, other=0.0)
        else:
            value = tl.load(x + row * width + at, mask=inside, other=0.0).to(WIDE)
            up = tl.load(dy + row * width + at, mask=inside, other=0.0).to(WIDE)
            if ADD:
                through = tl.load(dsum + row * width + at, mask=inside, other=0.0).to(WIDE)
        scale = tl.load(rstd + row)
        if MEAN:
            value = tl.where(inside, value - tl.load(mean + row), 0.0)
        unit = value * scale
        if WANTS:
            dweight += up * unit
        if BIAS:
            dbias += up
        if WEIGHT:
            up = up * learned
        part = up - unit * (tl.sum(up * unit, 0) / width)
        if MEAN:
            part = part - tl.sum(up, 0) / width
        part = part * scale
        if ADD:
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
