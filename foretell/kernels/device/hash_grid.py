"""Hashed tables: features of points, the MLP behind them in the same launch, and the tables' gradient by atomics."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretell.kernels.papers.hash_grid import encode_backward as plain_backward
from foretell.kernels.papers.hash_grid import plain_encode

POINTS = 64
"""Of a program."""
MOST = 128
"""Features, hidden units or results that a program holds."""


@triton.jit
def _lookup(x, sides, point, feature, points, entries, corner: tl.constexpr, LEVELS: tl.constexpr, EACH: tl.constexpr,
            POWER: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """Place in the table and weight of a corner, for points by features. Of a hash below a power of two the low 32 bits are enough."""
    level = feature // EACH
    side = tl.load(sides + level, mask=level < LEVELS, other=1).to(tl.float32)
    row = tl.zeros([1, 1], tl.int32 if POWER else tl.int64)
    weight = tl.full([1, 1], 1.0, tl.float32)
    for axis in tl.static_range(3):
        at = tl.load(x + point * 3 + axis, mask=point < points, other=0.0).to(tl.float32)
        scaled = (0.5 + 0.5 * at)[:, None] * side[None, :]
        below = tl.floor(scaled)
        part = scaled - below
        cell = below.to(row.dtype)
        if (corner >> axis) & 1:
            cell = cell + 1
            weight = weight * part
        else:
            weight = weight * (1.0 - part)
        if axis == 1:
            cell = cell * (-1640531535 if POWER else 2654435761)
        if axis == 2:
            cell = cell * 805459861
        row = row ^ cell
    if POWER:
        row = row & (entries - 1)
    else:
        row = row % entries
        row = tl.where(row < 0, row + entries, row)
    return (row + level[None, :] * entries) * EACH + (feature % EACH)[None, :], weight


@triton.jit
def _features(x, table, sides, point, feature, points, entries, LEVELS: tl.constexpr, EACH: tl.constexpr, POINTS: tl.constexpr,
              WIDE: tl.constexpr, POWER: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    there = (point[:, None] < points) & (feature[None, :] < LEVELS * EACH)
    total = tl.zeros([POINTS, WIDE], tl.float32)
    for corner in tl.static_range(8):
        place, weight = _lookup(x, sides, point, feature, points, entries, corner, LEVELS, EACH, POWER)
        total += weight * tl.load(table + place, mask=there, other=0.0).to(tl.float32)
    return total, there


@triton.jit
def encode_points(x, table, sides, out, points, entries, LEVELS: tl.constexpr, EACH: tl.constexpr, POINTS: tl.constexpr,
                  WIDE: tl.constexpr, POWER: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    point = tl.program_id(0).to(tl.int64) * POINTS + tl.arange(0, POINTS)
    feature = tl.arange(0, WIDE)
    total, there = _features(x, table, sides, point, feature, points, entries, LEVELS, EACH, POINTS, WIDE, POWER)
    tl.store(out + point[:, None] * (LEVELS * EACH) + feature[None, :], total.to(out.dtype.element_ty), mask=there)


@triton.jit
def scatter_points(up, x, sides, dtable, points, entries, LEVELS: tl.constexpr, EACH: tl.constexpr, POINTS: tl.constexpr,
                   WIDE: tl.constexpr, POWER: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    point = tl.program_id(0).to(tl.int64) * POINTS + tl.arange(0, POINTS)
    feature = tl.arange(0, WIDE)
    there = (point[:, None] < points) & (feature[None, :] < LEVELS * EACH)
    down = tl.load(up + point[:, None] * (LEVELS * EACH) + feature[None, :], mask=there, other=0.0).to(tl.float32)
    for corner in tl.static_range(8):
        place, weight = _lookup(x, sides, point, feature, points, entries, corner, LEVELS, EACH, POWER)
        tl.atomic_add(dtable + place, weight * down, mask=there)


@triton.jit
def encode_and_mlp(x, table, sides, w1, b1, w2, b2, out, points, entries, hidden, results,
                   LEVELS: tl.constexpr, EACH: tl.constexpr, POINTS: tl.constexpr, WIDE: tl.constexpr, HIDDEN: tl.constexpr,
                   RESULTS: tl.constexpr, POWER: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    point = tl.program_id(0).to(tl.int64) * POINTS + tl.arange(0, POINTS)
    feature, unit, result = tl.arange(0, WIDE), tl.arange(0, HIDDEN), tl.arange(0, RESULTS)
    total, _ = _features(x, table, sides, point, feature, points, entries, LEVELS, EACH, POINTS, WIDE, POWER)
    first = tl.load(w1 + unit[None, :] * (LEVELS * EACH) + feature[:, None],
                    mask=(unit[None, :] < hidden) & (feature[:, None] < LEVELS * EACH), other=0.0)  # fmt: skip
    inner = tl.dot(total.to(first.dtype), first, input_precision=PRECISION).to(tl.float32)
    inner += tl.load(b1 + unit, mask=unit < hidden, other=0.0).to(tl.float32)[None, :]
    inner = tl.maximum(inner, 0.0)
    second = tl.load(w2 + result[None, :] * hidden + unit[:, None], mask=(result[None, :] < results) & (unit[:, None] < hidden), other=0.0)
    last = tl.dot(inner.to(second.dtype), second, input_precision=PRECISION).to(tl.float32)
    last += tl.load(b2 + result, mask=result < results, other=0.0).to(tl.float32)[None, :]
    tl.store(out + point[:, None] * results + result[None, :], last.to(out.dtype.element_ty),
             mask=(point[:, None] < points) & (result[None, :] < results))  # fmt: skip


def _power(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _shape(table: Tensor, sides: Tensor, entries: int) -> dict[str, Any]:
    few = entries & (entries - 1) == 0 and table.numel() < 2**31
    wide = _power(sides.numel() * table.shape[1])
    return {"LEVELS": sides.numel(), "EACH": table.shape[1], "POINTS": POINTS, "WIDE": wide, "POWER": few, "num_warps": 8 if wide <= 32 else 16}


def serves(x: Tensor, *wide: int) -> bool:
    return x.dtype != torch.float64 and max(wide) <= MOST and x.shape[0] > 0


def encode(x: Tensor, table: Tensor, sides: Tensor, entries: int) -> Tensor:
    features = sides.numel() * table.shape[1]
    if not serves(x, features):
        return plain_encode(x, table, sides, entries)
    out = x.new_empty(x.shape[0], features)
    encode_points[(triton.cdiv(x.shape[0], POINTS),)](x, table, sides, out, x.shape[0], entries, **_shape(table, sides, entries))
    return out


def encode_backward(up: Tensor, x: Tensor, table: Tensor, sides: Tensor, entries: int) -> Tensor:
    if not serves(x, up.shape[1]):
        return plain_backward(up, x, table, sides, entries)
    found = torch.zeros(table.shape, dtype=torch.float32, device=table.device)
    scatter_points[(triton.cdiv(x.shape[0], POINTS),)](up, x, sides, found, x.shape[0], entries, **_shape(table, sides, entries))
    return found.to(table.dtype)


def mlp(x: Tensor, table: Tensor, sides: Tensor, entries: int, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    hidden, results = w1.shape[0], w2.shape[0]
    if not serves(x, w1.shape[1], hidden, results):
        return torch.addmm(b2, torch.relu(torch.addmm(b1, encode(x, table, sides, entries), w1.t())), w2.t())
    out = x.new_empty(x.shape[0], results)
    precision = "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    encode_and_mlp[(triton.cdiv(x.shape[0], POINTS),)](
        x, table, sides, w1, b1, w2, b2, out, x.shape[0], entries, hidden, results, HIDDEN=_power(hidden), RESULTS=_power(results),
        PRECISION=precision, **_shape(table, sides, entries),
    )  # fmt: skip
    return out
