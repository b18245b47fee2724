"""A GPT for models that hardly fit: no biases, a head of its own, and a loss in chunks of samples that is computed again.

What `benchmarks/offload.py` trains, in every way; blocks are recomputed by whoever trains it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 128 or 1
        self.before, self.between = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, size = x.shape
        q, k, v = (a.view(batch, tokens, self.heads, -1).transpose(1, 2) for a in self.qkv(self.before(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, size))
        return x + self.down(F.gelu(self.up(self.between(x))))


class ChunkedGpt(nn.Module):
    def __init__(self, layers: int, width: int, words: int, tokens: int) -> None:
        super().__init__()
        self.count, self.length = words, tokens
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, words, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        losses = [checkpoint(self._loss, *pair, use_reentrant=False) for pair in zip(x.split(1), labels.split(1), strict=True)]
        return sum(losses[1:], losses[0]) / len(losses)

    def _loss(self, part: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.head(part).float().view(-1, self.count), label.reshape(-1))


def model(layers: int = 24, width: int = 4096, words: int = 50304, tokens: int = 2048) -> ChunkedGpt:
    return ChunkedGpt(layers, width, words, tokens)


def batch(model: ChunkedGpt, micro_batch: int, seq: int | None) -> dict[str, Tensor]:
    ids = torch.randint(model.count, (micro_batch, seq or model.length))
    return {"input_ids": ids, "labels": ids}
