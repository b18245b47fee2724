"""Common ops at sizes where torch or a library takes another kernel, or where data decides how long one lasts.

    masked      attention with a mask that every head reads
    choosing    the largest numbers of long rows, many rows: several blocks for each
    short_rows  sums of a few numbers each, and what is put together from them
    crowds      many gradients added at one place, one after another
    few_lanes   statistics of few channels of large pictures, taken or known already

They belong to the cases of `rare`, and are measured with them.
"""

# mypy: no-warn-return-any

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from foretell.hardware.probe.cases.families import Call, Draw
from foretell.hardware.probe.cases.families import back as back

BROKEN = 64
"""Rows left over from whole tiles of 128 with which the backward of masked attention fails on some GPUs (torch 2.11)."""


def masked(d: Draw) -> Call:
    dtype = d.one(d.dtypes_low)
    heads, size = d.one((1, 2, 8, 16)), d.one((16, 64, 64, 128))
    t = d.size(64, 4096, d.one((128, 128, 1)))
    s = t if d.rng.random() < 0.7 else d.size(64, 4096, 128)
    t, s = (length + 1 if length % 128 == BROKEN else length for length in (t, s))
    n = max(1, min(32, int((1 << 28) * d.scale / (heads * t * s))))
    q, k, v = (d.tensor(n, heads, length, size, dtype=dtype) for length in (t, s, s))
    seen = torch.rand(d.one((1, n)), 1, t, s, device=d.device) < 0.9
    mask = seen if d.rng.random() < 0.7 else torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -1e4)
    return lambda: back(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def choosing(d: Draw) -> Call:
    columns = d.size(400, 65536, 1)
    rows = max(1, min(d.size(1, 32768, 1), int((1 << 26) * d.scale) // columns))
    x = d.integers(1 << 20, rows, columns) if d.rng.random() < 0.15 else d.tensor(rows, columns, dtype=d.one(d.dtypes), grad=False)
    k = d.one((1, 8, 32, min(columns, 128)))
    return lambda: torch.topk(x, k, -1)


def short_rows(d: Draw) -> Call:
    columns = d.one((2, 3, 3, 4, 6, 8, 12, 16, 24, 32, d.size(33, 512, 1)))
    rows = max(1, d.elements(1 << 10, 1 << 27) // columns)
    x = d.tensor(rows, columns, dtype=d.one(d.dtypes), grad=False)
    wide = x[: max(1, rows // 16 * 16)].reshape(-1, min(rows, 16), columns) if rows >= 16 else x[None]
    return d.one((
        lambda: x.sum(-1), lambda: x.sum(-1), lambda: x.mean(-1), lambda: x.amax(-1), lambda: x.argmax(-1), lambda: x.argmin(0),
        lambda: torch.logsumexp(x, -1), lambda: torch.logsumexp(x, 0), lambda: torch.logsumexp(wide, 1), lambda: wide.sum(1),
        lambda: torch.linalg.vector_norm(x, dim=-1), lambda: x.prod(-1),
    ))  # fmt: skip


def crowds(d: Draw) -> Call:
    """One place gets a share of all, so that how long the longest queue takes is seen."""
    dtype, columns = d.one(d.dtypes), d.one((1, 4, 16, 32, 33, 64, 256))
    rows, count = d.size(64, 65536, 1), max(64, min(1 << 18, d.elements(1 << 10, 1 << 22) // columns))
    crowd = max(1, min(count, int(count * d.one((0.01, 0.1, 0.5, 1.0))), int(20000 * max(0.02, d.scale))))
    index = d.integers(rows, count)
    index[torch.randperm(count, device=d.device)[:crowd]] = 0
    base, source = d.tensor(rows, columns, dtype=dtype, grad=False), d.tensor(count, columns, dtype=dtype, grad=False)
    table = d.tensor(rows, columns, dtype=dtype)
    return d.one((
        lambda: base.index_put((index,), source, accumulate=True), lambda: base.index_put((index,), source, accumulate=True),
        lambda: base.index_add(0, index, source), lambda: back(F.embedding(index, table)), lambda: back(table[index]),
    ))  # fmt: skip


def few_lanes(d: Draw) -> Call:
    c, side = d.one((1, 3, 16, 32, 64, d.size(64, 512, 8))), d.one((32, 64, 128, 256))
    n = max(1, min(512, d.elements(1 << 14, 1 << 27) // (c * side * side)))
    x = d.tensor(n, c, side, side, dtype=d.one(d.dtypes))
    if d.rng.random() < 0.2:
        x = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    weight, bias = d.tensor(c), d.tensor(c)
    mean, var, training = torch.zeros(c, device=d.device), torch.ones(c, device=d.device), d.rng.random() < 0.7
    return lambda: back(F.batch_norm(x, mean, var, weight, bias, training))


CORNERS: dict[str, tuple[Callable[[Draw], Call], int]] = {
    "masked": (masked, 40), "choosing": (choosing, 32), "short_rows": (short_rows, 72), "crowds": (crowds, 48), "few_lanes": (few_lanes, 48),
}  # fmt: skip
"""Family → (how to draw a case, cases of a full probe)."""
TIMED: dict[str, tuple[str, ...]] = {"tiny": ("bmm",), "short_rows": ("sum", "mean")}
"""Family → common ops that it is there for."""
