"""The kernels of `kernels/paged_attention.py` in plain PyTorch, by the same names: generated rows read their sequence in shares, those of
prompts in blocks from its beginning, as there, so that both have other bits."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

TALL, SHARES, BLOCK = 8, 3, 8


def write(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    there = slots >= 0
    keys[slots[there].long()], values[slots[there].long()] = key[there], value[there]


def decode(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, out: Tensor, *, page: int, scale: float, window: int = 0,
    cap: float = 0.0,
) -> None:  # fmt: skip
    for row, length in enumerate(lengths.tolist()):
        out[row] = 0
        if length:
            first = max(0, length - window) if window else 0
            each = -(-(length - first) // SHARES)
            spans = ((one, min(length, one + each)) for one in range(first, length, each))
            out[row] = _attended(query[row], keys, values, table[row], length, spans, page, scale, window, cap)


def chunk(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, tiles: Tensor, out: Tensor, *, page: int, scale: float, window: int = 0,
    cap: float = 0.0,
) -> None:  # fmt: skip
    for sequence, first, begins, count in tiles.tolist():
        for at in range(count):
            length = begins + at + 1
            spans = ((one, min(length, one + BLOCK)) for one in range(0, length, BLOCK))
            out[first + at] = _attended(query[first + at], keys, values, table[sequence], length, spans, page, scale, window, cap)


def _attended(
    query: Tensor, keys: Tensor, values: Tensor, pages: Tensor, length: int, spans: Iterable[tuple[int, int]], page: int, scale: float,
    window: int, cap: float,
) -> Tensor:  # fmt: skip
    """One row over spans of its sequence, added up one after the other."""
    place = torch.arange(length)
    slots = pages[place // page].long() * page + place % page
    k, v = (one[slots].repeat_interleave(query.shape[0] // keys.shape[1], 1) for one in (keys, values))
    scores = torch.einsum("hd,khd->hk", query, k) * scale
    if cap:
        scores = torch.tanh(scores / cap) * cap
    if window:
        scores[:, : max(0, length - window)] = -math.inf
    most = scores.amax(-1, keepdim=True)
    total, summed = query.new_zeros(query.shape[0], v.shape[2]), torch.zeros_like(most)
    for begin, end in spans:
        share = (scores[:, begin:end] - most).exp()
        total, summed = total + torch.einsum("hk,khd->hd", share, v[begin:end]), summed + share.sum(-1, keepdim=True)
    return total / summed
