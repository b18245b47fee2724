"""Sparse times sparse, by rows, into hash tables: the partial products are never all there at once.

Shivdikar 2021, "SMASH: Sparse Matrix Atomic Scratchpad Hashing". For some rows of the left matrix at a time, as many as have
`products` partial products, each product is put under its (row, column) into a table and added to what is there.
Memory beyond the result is about 200 bytes for each of `products`, whatever the matrices are.

For matrices in CSR format, on any device. `torch.sparse.mm` is faster where MKL or cuSPARSE has the memory it wants; this one is for where
they have not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretell.errors import UserError

PRODUCTS = 1 << 20
"""Partial products at once."""
FREE = -1
MULTIPLIER = 0x9E3779B97F4A7C1
"""Odd, and near 2⁶⁰ over the golden ratio: neighbouring keys are put far apart."""


def sparse_product(left: Tensor, right: Tensor, *, products: int = PRODUCTS) -> Tensor:
    """left @ right, in CSR with sorted columns; entries that add up to 0 stay entries."""
    if left.layout != torch.sparse_csr or right.layout != torch.sparse_csr or left.dim() != 2 or right.dim() != 2:
        raise UserError(f"layouts {left.layout} and {right.layout}", "two matrices in CSR: Tensor.to_sparse_csr()")
    if left.shape[1] != right.shape[0] or left.dtype != right.dtype:
        raise UserError(f"{tuple(left.shape)} in {left.dtype} times {tuple(right.shape)} in {right.dtype}", "sizes that meet, and one format")
    rows, columns = left.shape[0], right.shape[1]
    if rows * columns >= 2**63:
        raise UserError(f"a result of {rows} × {columns}", "fewer than 2⁶³ places")
    ends = right.crow_indices()
    of_entry = (ends[1:] - ends[:-1])[left.col_indices()]
    before = torch.cat([of_entry.new_zeros(1), of_entry.cumsum(0)])[left.crow_indices()]
    keys, values = [], []
    first = 0
    while first < rows:
        last = int(torch.searchsorted(before, before[first] + products, right=True)) - 1
        last = min(rows, max(last, first + 1))
        found = _some_rows(left, right, of_entry, first, last, products)
        keys.append(found[0])
        values.append(found[1])
        first = last
    key = torch.cat(keys) if keys else ends.new_zeros(0)
    value = torch.cat(values) if values else left.values().new_zeros(0)
    keys.clear()
    values.clear()
    row_ends = torch.searchsorted(key, torch.arange(rows + 1, device=key.device) * max(1, columns))
    return torch.sparse_csr_tensor(row_ends, key % max(1, columns), value, (rows, columns), check_invariants=False)


def _some_rows(left: Tensor, right: Tensor, of_entry: Tensor, first: int, last: int, products: int) -> tuple[Tensor, Tensor]:
    """Places of the result and what is there, sorted, of rows `first` to `last`. A row of very many products is done in pieces."""
    begin, end = int(left.crow_indices()[first]), int(left.crow_indices()[last])
    counts = of_entry[begin:end]
    ends = counts.cumsum(0)
    total = int(ends[-1]) if end > begin else 0
    table, sums = None, None
    for start in range(0, total, products):
        key, value = _expanded(left, right, begin, counts, ends, start, min(total, start + products))
        if table is not None:
            key, value = torch.cat([table, key]), torch.cat([sums, value])
        table, sums = _merged(key, value)
    if table is None or sums is None:
        return left.col_indices().new_zeros(0), left.values().new_zeros(0)
    order = table.argsort()
    return table[order], sums[order]


def _expanded(left: Tensor, right: Tensor, begin: int, counts: Tensor, ends: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Partial products `start` to `stop` of the entries from `begin` on: (row · columns + column, value)."""
    number = torch.arange(start, stop, device=ends.device)
    entry = torch.searchsorted(ends, number, right=True)
    there = right.crow_indices()[left.col_indices()[begin + entry]] + number - (ends - counts)[entry]
    row = torch.searchsorted(left.crow_indices(), begin + entry, right=True) - 1
    return row * right.shape[1] + right.col_indices()[there], left.values()[begin + entry] * right.values()[there]


def _merged(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Values of equal keys added up, by double hashing: all keys probe at once, and of those that want a free slot one gets it."""
    bits = max(1, (2 * key.numel() - 1).bit_length())
    mask = (1 << bits) - 1
    table = key.new_full((1 << bits,), FREE)
    hashed = key * MULTIPLIER
    slot, stride = (hashed >> (62 - bits)) & mask, hashed & mask | 1
    place = torch.empty_like(slot)
    open_ = torch.arange(key.numel(), device=key.device)
    while open_.numel():
        wanted, at = key[open_], slot[open_]
        free = table[at] == FREE
        table[at[free]] = wanted[free]  # any one of them
        met = table[at] == wanted
        place[open_[met]] = at[met]
        open_, at = open_[~met], at[~met]
        slot[open_] = (at + stride[open_]) & mask
    sums = value.new_zeros(table.numel()).index_add_(0, place, value)
    taken = (table != FREE).nonzero().squeeze(1)
    return table[taken], sums[taken]
