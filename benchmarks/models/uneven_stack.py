"""Three hundred blocks of many kinds: attention in two of three, twelve widths in between. What a search has to cut up."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, width: int, attends: bool) -> None:
        super().__init__()
        self.heads, self.attends = heads, attends
        self.norm = nn.LayerNorm(dim, bias=False)
        if attends:
            self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, width, bias=False), nn.Linear(width, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.attends:
            b, t, c = x.shape
            q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class UnevenStack(nn.Module):
    def __init__(self, layers: int, dim: int, heads: int, vocab_size: int, context: int) -> None:
        super().__init__()
        self.vocab_size, self.context = vocab_size, context
        self.tokens = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(
            Block(dim, heads, dim + dim // 2 * (place * 7 % 12), place % 3 != 0) for place in range(layers)
        )
        self.head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float().view(-1, self.vocab_size), labels.view(-1))


def model(layers: int = 300, dim: int = 2048, heads: int = 16, vocab_size: int = 50304, context: int = 4096) -> UnevenStack:
    return UnevenStack(layers, dim, heads, vocab_size, context)


def batch(model: UnevenStack, micro_batch: int, seq: int | None) -> dict[str, Tensor]:
    ids = torch.randint(model.vocab_size, (micro_batch, (seq or model.context) + 1))
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
