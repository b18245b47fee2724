"""Attention over a KV cache in pages, on a GPU.

    keys, values │ slot 0 │ slot 1 │ ...        slot = page · tokens of a page + place in it; of each: heads, elements
    table        │ pages of sequence 0 │ pages of sequence 1 │ ...

Three kernels: `write` puts new keys and values into their slots; `decode` is for one query a sequence, whose keys are read by
several programs and put together after; `chunk` is for pieces of prompts, by tiles of queries. How the keys of a query are
divided depends on its own sequence alone, so that nobody's neighbours change its bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLITS = 16
"""Programs at most that share the keys of a sequence."""
LEAST = 256
"""Keys of one of them, at least."""
LOG2E = 1.4426950408889634


@triton.jit
def _write(keys, values, key, value, slots, kv_heads, key_row, key_head, value_row, value_head,
           KEY: tl.constexpr, VALUE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        at = tl.arange(0, KEYS)
        found = tl.load(key + row * key_row + head * key_head + at, mask=at < KEY)
        tl.store(keys + (slot * kv_heads + head) * KEY + at, found.to(keys.dtype.element_ty), mask=at < KEY)
        at = tl.arange(0, VALUES)
        found = tl.load(value + row * value_row + head * value_head + at, mask=at < VALUE)
        tl.store(values + (slot * kv_heads + head) * VALUE + at, found.to(values.dtype.element_ty), mask=at < VALUE)


@triton.jit
def _attend(q, keys, values, pages, places, place, head, kv_heads, scale, cap, most, total, maximum, summed,
            KEY: tl.constexpr, VALUE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, PAGE: tl.constexpr,
            WINDOW: tl.constexpr, CAP: tl.constexpr, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """A tile of queries and a tile of keys; `place` is where each query is in its sequence."""
    there = places < most
    slot = tl.load(pages + places // PAGE, mask=there, other=0).to(tl.int64) * PAGE + places % PAGE
    at = tl.arange(0, KEYS)
    k = tl.load(keys + (slot[None, :] * kv_heads + head) * KEY + at[:, None], mask=there[None, :] & (at[:, None] < KEY), other=0.0)
    scores = tl.dot(q, k.to(q.dtype), input_precision="ieee" if EXACT else "tf32") * scale
    if CAP:
        scores = (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0) * cap
    seen = (places[None, :] <= place[:, None]) & there[None, :]
    if WINDOW > 0:
        seen = seen & (places[None, :] > place[:, None] - WINDOW)
    scores = tl.where(seen, scores * 1.4426950408889634, float("-inf"))
    higher = tl.maximum(maximum, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    shares = tl.exp2(scores - base[:, None])
    kept = tl.exp2(maximum - base)
    at = tl.arange(0, VALUES)
    v = tl.load(values + (slot[:, None] * kv_heads + head) * VALUE + at[None, :], mask=there[:, None] & (at[None, :] < VALUE), other=0.0)
    total = total * kept[:, None] + tl.dot(shares.to(q.dtype), v.to(q.dtype), input_precision="ieee" if EXACT else "tf32")
    return total, higher, summed * kept + tl.sum(shares, 1)


@triton.jit
def _decode(query, keys, values, table, lengths, parts, stats, kv_heads, scale, cap, query_row, query_head, table_row,
            GROUP: tl.constexpr, ROWS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
            PAGE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
            EXACT: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(0, length - WINDOW)
    each = tl.maximum(tl.cdiv(tl.cdiv(length - first, SPLITS), TILE) * TILE, LEAST)
    begin = first + split * each
    if begin < length:
        most = tl.minimum(begin + each, length)
        of = tl.arange(0, ROWS)
        at = tl.arange(0, KEYS)
        q = tl.load(query + row * query_row + (head * GROUP + of[:, None]) * query_head + at[None, :],
                    mask=(of[:, None] < GROUP) & (at[None, :] < KEY), other=0.0)  # fmt: skip
        place = tl.zeros([ROWS], tl.int32) + length - 1
        total = tl.zeros([ROWS, VALUES], tl.float32)
        maximum = tl.full([ROWS], float("-inf"), tl.float32)
        summed = tl.zeros([ROWS], tl.float32)
        for start in range(begin, most, TILE):
            total, maximum, summed = _attend(
                q, keys, values, table + row * table_row, start + tl.arange(0, TILE), place, head, kv_heads, scale, cap, most, total, maximum,
                summed, KEY, VALUE, KEYS, VALUES, PAGE, WINDOW, CAP, EXACT,
            )  # fmt: skip
        at = tl.arange(0, VALUES)
        part = (row * kv_heads + head) * SPLITS + split
        tl.store(parts + (part * GROUP + of[:, None]) * VALUE + at[None, :], total, mask=(of[:, None] < GROUP) & (at[None, :] < VALUE))
        tl.store(stats + (part * GROUP + of) * 2, maximum, mask=of < GROUP)
        tl.store(stats + (part * GROUP + of) * 2 + 1, summed, mask=of < GROUP)


@triton.jit
def _join(parts, stats, lengths, out, kv_heads, out_row, GROUP: tl.constexpr, VALUE: tl.constexpr, VALUES: tl.constexpr, TILE: tl.constexpr,
          SPLITS: tl.constexpr, LEAST: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row)
    span = length
    if WINDOW > 0:
        span = tl.minimum(length, WINDOW)
    each = tl.maximum(tl.cdiv(tl.cdiv(span, SPLITS), TILE) * TILE, LEAST)
    split = tl.arange(0, SPLITS)
    there = split * each < span
    part = ((row * kv_heads + head // GROUP) * SPLITS + split) * GROUP + head % GROUP
    maximum = tl.load(stats + part * 2, mask=there, other=float("-inf"))
    weight = tl.exp2(maximum - tl.max(maximum, 0))
    weight = tl.where(there, weight, 0.0)
    summed = tl.sum(tl.load(stats + part * 2 + 1, mask=there, other=0.0) * weight, 0)
    at = tl.arange(0, VALUES)
    found = tl.load(parts + part[:, None] * VALUE + at[None, :], mask=there[:, None] & (at[None, :] < VALUE), other=0.0)
    value = tl.sum(found * weight[:, None], 0) / tl.where(length > 0, summed, 1.0)
    value = tl.where(length > 0, value, 0.0)
    tl.store(out + row * out_row + head * VALUE + at, value.to(out.dtype.element_ty), mask=at < VALUE)


@triton.jit
def _chunk(query, keys, values, table, tiles, out, kv_heads, scale, cap, query_row, query_head, table_row, out_row,
           GROUP: tl.constexpr, ROWS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
           PAGE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence, first = tl.load(tiles + tile * 4), tl.load(tiles + tile * 4 + 1)
    begins, count = tl.load(tiles + tile * 4 + 2), tl.load(tiles + tile * 4 + 3)
    of = tl.arange(0, ROWS)
    at = tl.arange(0, KEYS)
    mine = of < count
    q = tl.load(query + (first + of[:, None]) * query_row + head * query_head + at[None, :], mask=mine[:, None] & (at[None, :] < KEY), other=0.0)
    place = begins + of
    total = tl.zeros([ROWS, VALUES], tl.float32)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    summed = tl.zeros([ROWS], tl.float32)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(0, begins + 1 - WINDOW) // TILE * TILE
    most = begins + count
    for start in range(lowest, most, TILE):
        total, maximum, summed = _attend(
            q, keys, values, table + sequence * table_row, start + tl.arange(0, TILE), place, head // GROUP, kv_heads, scale, cap, most, total,
            maximum, summed, KEY, VALUE, KEYS, VALUES, PAGE, WINDOW, CAP, EXACT,
        )  # fmt: skip
    at = tl.arange(0, VALUES)
    value = total / tl.where(summed > 0, summed, 1.0)[:, None]
    tl.store(out + (first + of[:, None]) * out_row + head * VALUE + at[None, :], value.to(out.dtype.element_ty),
             mask=mine[:, None] & (at[None, :] < VALUE))  # fmt: skip


def _power(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def write(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Put keys and values, (tokens, heads, size), into the slots of their tokens; a slot below 0 is nobody's."""
    tokens, heads, size = key.shape
    _write[(tokens, heads)](
        keys, values, key, value, slots, heads, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        KEY=size, VALUE=value.shape[2], KEYS=_power(size), VALUES=_power(value.shape[2]), num_warps=1,
    )  # fmt: skip


def decode(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, out: Tensor, *, page: int, scale: float,
    window: int = 0, cap: float = 0.0,
) -> None:  # fmt: skip
    """Of each sequence the last token's attention to all of its `lengths` tokens; none for a length of 0.

    `query` and `out` are (sequences, heads, size), `keys` and `values` (slots, heads, size), `table` (sequences, pages).
    """
    rows, heads, size = query.shape
    kv_heads, wide = keys.shape[1], values.shape[2]
    group = heads // kv_heads
    tile = 64 if max(size, wide) <= 128 else 32
    parts = torch.empty(rows, kv_heads, SPLITS, group, wide, dtype=torch.float32, device=query.device)
    stats = torch.empty(rows, kv_heads, SPLITS, group, 2, dtype=torch.float32, device=query.device)
    shape = {"GROUP": group, "VALUE": wide, "VALUES": _power(wide), "TILE": tile, "SPLITS": SPLITS, "LEAST": LEAST, "WINDOW": window}
    _decode[(rows, kv_heads, SPLITS)](
        query, keys, values, table, lengths, parts, stats, kv_heads, scale, cap, query.stride(0), query.stride(1), table.stride(0),
        ROWS=_power(group), KEY=size, KEYS=_power(size), PAGE=page, CAP=cap > 0, EXACT=query.dtype == torch.float32,
        num_warps=4, num_stages=3, **shape,
    )  # fmt: skip
    _join[(rows, heads)](parts, stats, lengths, out, kv_heads, out.stride(0), num_warps=4, **shape)


TALL = 128
"""Queries of a tile."""


def chunk(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, tiles: Tensor, out: Tensor, *, page: int, scale: float,
    window: int = 0, cap: float = 0.0,
) -> None:  # fmt: skip
    """Attention of pieces of prompts, by tiles of at most `TALL` queries.

    Of each tile: its sequence's row of `table`, the row of its first query, that query's place in the sequence, how many.
    """
    _, heads, size = query.shape
    kv_heads, wide = keys.shape[1], values.shape[2]
    large = max(size, wide) > 128 or query.dtype == torch.float32
    _chunk[(tiles.shape[0], heads)](
        query, keys, values, table, tiles, out, kv_heads, scale, cap, query.stride(0), query.stride(1), table.stride(0), out.stride(0),
        GROUP=heads // kv_heads, ROWS=TALL, KEY=size, VALUE=wide, KEYS=_power(size), VALUES=_power(wide), PAGE=page,
        TILE=32 if large else 64, WINDOW=window, CAP=cap > 0, EXACT=query.dtype == torch.float32, num_warps=8, num_stages=1 if large else 2,
    )  # fmt: skip
