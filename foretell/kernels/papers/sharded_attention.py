"""Attention in which each head has a shard of the context: near blocks, and far ones that the heads divide among themselves.

Lin et al. 2024, "S2-Attention: Hardware-Aware Context Sharding Among Attention Heads". Causal, by blocks of tokens:

    block j is seen from block i by head h   when  i - near < j <= i,  or  j < i and j ≡ h (mod shards)

With at least `shards` heads their union covers the whole context. The result equals masked dense attention; work and kept bytes are those of
the blocks that are seen. On a CUDA device flex_attention runs it where it is compiled; elsewhere blocks are gathered, a few rows of them
at a time.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Who sees what."""

    block: int
    """Tokens."""
    near: int
    """Blocks that all heads see, the query's own among them."""
    shards: int
    """Into which the heads divide what is far."""

    def __post_init__(self) -> None:
        if min(self.block, self.near, self.shards) < 1:
            raise UserError(f"a sharding of {self.block}, {self.near}, {self.shards}", "1 and more")

    def seen(self, blocks: int, heads: int, device: Any = None) -> Tensor:
        """(heads, blocks, blocks): whether a head sees a block from a block."""
        head, i, j = (torch.arange(n, device=device) for n in (heads, blocks, blocks))
        i, j = i[:, None], j[None]
        return (j <= i) & ((j > i - self.near) | (j % self.shards == head[:, None, None] % self.shards))

    def density(self, tokens: int, heads: int) -> float:
        """Share of causal pairs of blocks that are computed."""
        blocks = -(-tokens // self.block)
        return self.seen(blocks, heads).sum().item() / (heads * blocks * (blocks + 1) / 2)

    def mask(self, tokens: int, heads: int, device: Any = None) -> Tensor:
        """(heads, tokens, tokens), for a dense kernel."""
        of = torch.arange(tokens, device=device)
        seen = self.seen(-(-tokens // self.block), heads, device)
        return seen[:, of // self.block][:, :, of // self.block] & (of[:, None] >= of)

    def pages(self, tokens: int, head: int) -> tuple[int, ...]:
        """Blocks of the cache that a head reads for the token after `tokens`, and later ones; others can be freed."""
        last = tokens // self.block
        return tuple(j for j in range(last + 1) if j > last - self.near or j % self.shards == head % self.shards)


def sharded_attention(query: Tensor, key: Tensor, value: Tensor, sharding: Sharding, *, scale: float | None = None) -> Tensor:
    """(batch, heads, tokens, size), causal; fewer heads of keys and values are shared by groups of queries' heads."""
    heads, kv_heads, tokens = query.shape[1], key.shape[1], query.shape[2]
    if query.dim() != 4 or heads % kv_heads or key.shape[2] != tokens or value.shape[:3] != key.shape[:3]:
        raise UserError(
            f"queries {tuple(query.shape)}, keys {tuple(key.shape)}, values {tuple(value.shape)}", "(batch, heads, tokens, size) with equal tokens"
        )
    if query.is_cuda and tokens % sharding.block == 0 and sharding.block % 128 == 0:
        mask = _block_mask(sharding, tokens, heads, query.device)
        return _flexible()(query, key, value, block_mask=mask, scale=scale, enable_gqa=heads != kv_heads)
    return _gathered(query, key, value, sharding, scale)


def _gathered(query: Tensor, key: Tensor, value: Tensor, sharding: Sharding, scale: float | None) -> Tensor:
    _, heads, tokens, _ = query.shape
    group, block = heads // key.shape[1], sharding.block
    blocks = -(-tokens // block)
    seen = sharding.seen(blocks, heads, query.device)
    of = torch.arange(heads, device=query.device)[:, None] // group
    within = torch.arange(block, device=query.device)
    outs = []
    for i in range(blocks):
        rows = slice(i * block, min(tokens, (i + 1) * block))
        most = int(seen[:, i].sum(-1).amax())
        chosen = seen[:, i].to(torch.int8).argsort(dim=-1, descending=True, stable=True)[:, :most]  # (heads, most), those seen first
        there = seen[:, i].gather(-1, chosen)
        places = (chosen[..., None] * block + within).flatten(1)
        place = torch.arange(rows.start, rows.stop, device=query.device)
        mask = there.repeat_interleave(block, -1)[:, None] & (places[:, None] <= place[None, :, None]) & (places[:, None] < tokens)
        places = places.clamp(max=tokens - 1)
        outs.append(F.scaled_dot_product_attention(query[:, :, rows], key[:, of, places], value[:, of, places], mask, scale=scale))
    return torch.cat(outs, 2) if outs else torch.empty_like(query)


@functools.cache
def _flexible() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@functools.cache
def _block_mask(sharding: Sharding, tokens: int, heads: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        i, j = query // sharding.block, key // sharding.block
        return (key <= query) & ((j > i - sharding.near) | (j % sharding.shards == head % sharding.shards))

    return create_block_mask(sees, None, heads, tokens, tokens, device=str(device), _compile=True)
