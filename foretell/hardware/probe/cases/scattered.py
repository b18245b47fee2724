"""Ops that go where data say, at the sizes that graphs, experts and tables of words have.

    experts     products of experts whose rows are few or many, alike or not, forward and backward
    scans       running sums along columns as well as rows, few columns and many rows too
    places      rows picked by several indices, from small tables and large ones, and their gradients added there
    bags        sums of rows of a table, and long lists of words
"""

# mypy: no-warn-return-any

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from foretell.hardware.probe.cases.families import Call, Draw
from foretell.hardware.probe.cases.families import back as back

EXPERT_FLOPS, EXPERT_ELEMENTS = 4e11, 1.2e9


def experts(d: Draw) -> Call:
    dtype = torch.float32 if d.rng.random() < 0.25 else torch.bfloat16
    count, n, k = d.one((4, 8, 8, 16, 32, 64, 128)), d.size(64, 8192, d.one((64, 64, 16))), d.size(64, 8192, d.one((64, 64, 16)))
    while count * n * k > EXPERT_ELEMENTS * d.scale or 2 * count * n * k > EXPERT_FLOPS * d.scale:
        n, k = max(64, n // 32 * 16), max(64, k // 32 * 16)
    most = max(count, int(EXPERT_FLOPS * d.scale / (2 * n * k)))
    rows = max(count, min(most, 1 << 17, count * d.size(1, 4096, 1)))
    shares = torch.ones(count) if d.rng.random() < 0.3 else torch.rand(count) ** d.one((1.0, 3.0)) + 1e-3
    ends = (shares.cumsum(0) / shares.sum() * rows).round().to(torch.int32)
    ends[-1] = rows
    ends = ends.to(d.device)
    x, w = d.tensor(rows, k, dtype=dtype), d.tensor(count, n, k, dtype=dtype)
    return lambda: back(torch._grouped_mm(x, w.transpose(-2, -1), ends))


def scans(d: Draw) -> Call:
    columns = d.one((1, 2, 4, 8, 16, 32, 64, 64, 128, 256))
    rows = max(8, d.elements(1 << 10, 1 << 26) // columns)
    batch = d.one((1, 1, 4, 32))
    shape = (max(1, rows // batch), columns) if batch == 1 else (batch, max(1, rows // batch), columns)
    dtype, dim = d.one((*d.dtypes, torch.int64, torch.int64, torch.int32)), -1 if d.rng.random() < 0.25 else -2
    whole = dtype in (torch.int64, torch.int32)
    x = torch.randint(0, 2, shape, device=d.device).to(dtype) if whole else d.tensor(*shape, dtype=dtype)
    return (lambda: torch.cumsum(x, dim)) if whole else (lambda: back(torch.cumsum(x, dim)))


def places(d: Draw) -> Call:
    dtype, columns = d.one(d.dtypes), d.one((1, 1, 3, 4, 12, 16, 32, 64, 64, 100, 128, 256, 512, 768, 1024))
    rows = d.one((9, 49, 169, 729, 2209, d.size(64, 1 << 20, 1), d.size(64, 1 << 20, 1), d.size(64, 1 << 20, 1)))
    rows = max(4, min(rows, int((1 << 27) * d.scale) // columns))
    count = max(4, d.elements(1 << 10, 1 << 27) // columns)
    table = d.tensor(rows, columns, dtype=dtype)
    index = d.integers(rows, count)
    side = max(2, int(rows**0.5))
    square, height, width = d.tensor(side, side, columns, dtype=dtype), d.integers(side, count), d.integers(side, count)
    batch = d.one((2, 8, 32))
    middle, few = d.tensor(batch, max(2, rows // batch), columns, dtype=dtype), max(2, min(4096, count // batch))
    across = d.integers(max(2, rows // batch), few)
    each, which = d.integers(max(2, rows // batch), batch, few), torch.arange(batch, device=d.device)[:, None]
    zeros = torch.zeros_like(table)
    source = d.tensor(count, columns, dtype=dtype, grad=False)
    return d.one((
        lambda: back(table[index]), lambda: back(table[index]), lambda: back(square[height, width]), lambda: back(middle[:, across]),
        lambda: back(middle[which, each]), lambda: back(table.index_select(0, index)), lambda: zeros.index_add(0, index, source),
        lambda: back(table.gather(0, index[:, None].expand(count, columns))), lambda: zeros.index_put((index,), source, accumulate=True),
        lambda: back(F.embedding(index, table)),
    ))  # fmt: skip


def bags(d: Draw) -> Call:
    rows, columns = d.one((1000, 10000, 30522, 50257, 100000, 400000, 1000000)), d.one((8, 16, 32, 64, 96, 128, 256, 512, 1024))
    if rows * columns > (1 << 28) * d.scale:
        rows = max(100, int((1 << 28) * d.scale) // columns)
    table, length = d.tensor(rows, columns), d.one((1, 2, 4, 8, 16, 20, 32, 50, 64, 128, 200))
    samples = max(1, min(1 << 17, d.elements(1 << 12, 1 << 27) // (columns * length)))
    index = d.integers(rows, samples, length)
    if d.rng.random() < 0.4:
        return lambda: back(F.embedding(index, table))
    mode, flat, offsets = d.one(("sum", "mean", "mean", "max")), index.reshape(-1), torch.arange(0, index.numel(), length, device=d.device)
    return lambda: back(F.embedding_bag(flat, table, offsets, mode=mode))


SCATTERED: dict[str, tuple[Callable[[Draw], Call], int]] = {
    "experts": (experts, 150), "scans": (scans, 70), "places": (places, 190), "bags": (bags, 90),
}  # fmt: skip
"""Family → (how to draw a case, cases of a full probe)."""
