"""AdamW and sums of squares over any number of tensors in one launch: a table has their addresses, another which block is whose."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretell.kernels import catalog, measured
from foretell.kernels.adamw import KERNEL, shape_of

catalog.KERNELS.setdefault(KERNEL.name, KERNEL)
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float64: tl.float64}
_COLUMNS: tl.constexpr = tl.constexpr(8)
"""Of the table: parameter, gradient, two moments, copy, step count, elements, and one to fill the line."""
_KEPT = 16
_LINE = 16


@triton.jit
def _at(table, place, at, TYPE: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elements of the tensor whose address stands there."""
    found = tl.load(table + place).to(tl.pointer_type(TYPE)) + at
    if ALIGNED:
        found = tl.multiple_of(found, 16)
    return found


@triton.jit
def _load(pointers, inside, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block that is all there is read 16 bytes at a time, which a mask would forbid."""
    if WHOLE:
        return tl.load(pointers).to(tl.float32)
    else:
        return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store(pointers, value, inside, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    if WHOLE:
        tl.store(pointers, value)
    else:
        tl.store(pointers, value, mask=inside)


@triton.jit
def _one_less_power(step, log):  # type: ignore[no-untyped-def]
    """1 - beta ** step, also where that is nearly 0."""
    u = step * log
    near = -u * (1.0 + u / 2.0 * (1.0 + u / 3.0 * (1.0 + u / 4.0 * (1.0 + u / 5.0 * (1.0 + u / 6.0)))))
    return tl.where(u > -0.25, near, 1.0 - tl.exp(u))


@triton.jit
def _block(table, row, at, inside, factor, found_inf, lr, decay, beta1, rest1, log1, beta2, rest2, log2, eps,
           P: tl.constexpr, G: tl.constexpr, S: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, FACTOR: tl.constexpr,
           SKIP: tl.constexpr, COPY: tl.constexpr, MAXIMIZE: tl.constexpr, ZERO: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    grads = _at(table, row + 1, at, G, ALIGNED)
    go_on = True
    if SKIP:
        go_on = tl.load(found_inf) == 0.0
    if go_on:
        params, firsts, seconds = _at(table, row, at, P, ALIGNED), _at(table, row + 2, at, S, ALIGNED), _at(table, row + 3, at, S, ALIGNED)
        step = tl.load(tl.load(table + row + 5).to(tl.pointer_type(tl.float32)))
        p, g = _load(params, inside, WHOLE), _load(grads, inside, WHOLE)
        m, v = _load(firsts, inside, WHOLE), _load(seconds, inside, WHOLE)
        if FACTOR:
            g *= tl.load(factor)
        if MAXIMIZE:
            g = -g
        m = beta1 * m + rest1 * g
        v = beta2 * v + rest2 * g * g
        bound = tl.sqrt(v) * (1.0 / tl.sqrt(_one_less_power(step, log2))) + eps
        p = decay * p - (lr / _one_less_power(step, log1)) * (m / bound)
        _store(params, p.to(P), inside, WHOLE)
        _store(firsts, m.to(S), inside, WHOLE)
        _store(seconds, v.to(S), inside, WHOLE)
        if COPY:
            _store(_at(table, row + 4, at, C, ALIGNED), p.to(P).to(C), inside, WHOLE)
    if ZERO:
        _store(grads, tl.zeros([BLOCK], G), inside, WHOLE)


@triton.jit
def _update(table, blocks, factor, found_inf, lr, decay, beta1, rest1, log1, beta2, rest2, log2, eps,
            P: tl.constexpr, G: tl.constexpr, S: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, FACTOR: tl.constexpr,
            SKIP: tl.constexpr, COPY: tl.constexpr, MAXIMIZE: tl.constexpr, ZERO: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    row = tl.load(blocks + 2 * block).to(tl.int64) * _COLUMNS
    first = tl.load(blocks + 2 * block + 1).to(tl.int64) * BLOCK
    at, size = first + tl.arange(0, BLOCK), tl.load(table + row + 6)
    if first + BLOCK <= size:
        _block(table, row, at, at < size, factor, found_inf, lr, decay, beta1, rest1, log1, beta2, rest2, log2, eps,
               P, G, S, C, BLOCK, ALIGNED, FACTOR, SKIP, COPY, MAXIMIZE, ZERO, True)  # fmt: skip
    else:
        _block(table, row, at, at < size, factor, found_inf, lr, decay, beta1, rest1, log1, beta2, rest2, log2, eps,
               P, G, S, C, BLOCK, ALIGNED, FACTOR, SKIP, COPY, MAXIMIZE, ZERO, False)  # fmt: skip


@triton.jit
def _summed(table, blocks, parts, G: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0).to(tl.int64)
    row = tl.load(blocks + 2 * block).to(tl.int64) * _COLUMNS
    first = tl.load(blocks + 2 * block + 1).to(tl.int64) * BLOCK
    at, size = first + tl.arange(0, BLOCK), tl.load(table + row + 6)
    grads = _at(table, row + 1, at, G, ALIGNED)
    if first + BLOCK <= size:
        g = _load(grads, at < size, True)
    else:
        g = _load(grads, at < size, False)
    tl.store(parts + block, tl.sum(g * g, 0))


# ---------------------------------------------------------------- tables


class _Recent(collections.OrderedDict[Any, Any]):
    """The last few answers to the same question."""

    def __missing__(self, key: Any) -> None:
        return None

    def keep(self, key: Any, made: Any) -> Any:
        self[key] = made
        while len(self) > _KEPT:
            self.popitem(last=False)
        return made


_TABLES, _BLOCKS = _Recent(), _Recent()


def _moved(values: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """On the device without waiting, and where it came from: a CUDA graph reads that again."""
    if device.type != "cuda":
        return values, values
    pinned = values.pin_memory()
    return pinned.to(device, non_blocking=True), pinned


def _table(columns: Sequence[Sequence[Tensor]], device: torch.device) -> tuple[Tensor, bool]:
    """Addresses row by row, and whether all of them begin a line."""
    key = (device, tuple(tuple(one.data_ptr() for one in column) for column in columns), tuple(one.numel() for one in columns[0]))
    found = _TABLES[key]
    if found is None:
        rows = torch.zeros(len(columns[0]), int(_COLUMNS.value), dtype=torch.int64)
        for place, addresses in enumerate(key[1]):
            if addresses:
                rows[:, place] = torch.tensor(addresses, dtype=torch.int64)
        rows[:, 6] = torch.tensor(key[2])
        found = _TABLES.keep(key, (*_moved(rows, device), not bool((rows[:, :5] % _LINE).any())))
    return found[0], found[2]


def _blocks(sizes: Sequence[int], block: int, device: torch.device) -> Tensor:
    """Whose each block is, and which of its blocks."""
    key = (device, tuple(sizes), block)
    found = _BLOCKS[key]
    if found is None:
        counts = torch.tensor([-(-size // block) for size in sizes])
        whose = torch.repeat_interleave(counts)
        begins = counts.cumsum(0) - counts
        which = torch.arange(len(whose)) - begins[whose]
        found = _BLOCKS.keep(key, _moved(torch.stack([whose, which], 1).to(torch.int32), device))
    made: Tensor = found[0]
    return made


def _alike(*columns: Sequence[Tensor]) -> list[list[int]]:
    """Rows whose formats and device are the same together."""
    found: dict[Any, list[int]] = {}
    for place, row in enumerate(zip(*columns, strict=True)):
        if row[0].numel():
            found.setdefault((row[0].device, *(one.dtype for one in row)), []).append(place)
    return list(found.values())


# ---------------------------------------------------------------- launches


def adamw_(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor], steps: Sequence[Tensor],
    copies: Sequence[Tensor], factor: Tensor | None, found_inf: Tensor | None, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float, maximize: bool, zero: bool,
) -> None:  # fmt: skip
    torch._foreach_add_(list(steps), 1.0)
    if found_inf is not None:
        torch._foreach_sub_(list(steps), found_inf)
    every = (params, grads, exp_avgs, exp_avg_sqs, copies or params)
    logs = [math.log(beta) if beta > 0 else -math.inf for beta in (beta1, beta2)]
    for rows in _alike(*every):
        columns = [[column[row] for row in rows] for column in (*every, steps)]
        config = _config(columns[0])
        table, aligned = _table(columns, columns[0][0].device)
        blocks = _blocks([one.numel() for one in columns[0]], config["block"], columns[0][0].device)
        p, g, m, _, c = (column[0].dtype for column in columns[:5])
        _update[(len(blocks),)](
            table, blocks, factor if factor is not None else table, found_inf if found_inf is not None else table, lr, 1 - lr * weight_decay, beta1,
            1 - beta1, logs[0], beta2, 1 - beta2, logs[1], eps, P=_TYPES[p], G=_TYPES[g], S=_TYPES[m], C=_TYPES[c], BLOCK=config["block"],
            ALIGNED=aligned, FACTOR=factor is not None, SKIP=found_inf is not None, COPY=bool(copies), MAXIMIZE=maximize, ZERO=zero,
            num_warps=config["warps"],
        )  # fmt: skip


def squares(grads: Sequence[Tensor]) -> Tensor:
    parts = []
    for rows in _alike(grads):
        mine = [grads[row] for row in rows]
        config = _config(mine)
        table, aligned = _table([mine, mine], mine[0].device)
        blocks = _blocks([one.numel() for one in mine], config["norm_block"], mine[0].device)
        found = torch.empty(len(blocks), dtype=torch.float32, device=mine[0].device)
        _summed[(len(blocks),)](table, blocks, found, G=_TYPES[mine[0].dtype], BLOCK=config["norm_block"], ALIGNED=aligned, num_warps=config["norm_warps"])
        parts.append(found.sum())
    return torch.stack([part.to(grads[0].device) for part in parts]).sum() if parts else grads[0].new_zeros((), dtype=torch.float32)


def _config(params: Sequence[Tensor]) -> Mapping[str, int]:
    return measured.config(KERNEL, shape_of(params), params[0].device)
