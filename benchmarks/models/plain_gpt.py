"""A plain GPT that returns its own loss: what `benchmarks/run.py` trains with foretell and with a loop written by hand.

Layer norms and linear layers without biases, GELU, learned positions, the head shares the token embedding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim, bias=False), nn.LayerNorm(dim, bias=False)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PlainGPT(nn.Module):
    def __init__(self, layers: int, dim: int, heads: int, vocab_size: int, context: int) -> None:
        super().__init__()
        self.vocab_size, self.context = vocab_size, context
        self.tokens, self.positions = nn.Embedding(vocab_size, dim), nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.float().view(-1, self.vocab_size), labels.view(-1))


def model(layers: int = 12, dim: int = 768, heads: int = 12, vocab_size: int = 50304, context: int = 1024) -> PlainGPT:
    return PlainGPT(layers, dim, heads, vocab_size, context)


def batch(model: PlainGPT, micro_batch: int, seq: int | None) -> dict[str, Tensor]:
    ids = torch.randint(model.vocab_size, (micro_batch, (seq or model.context) + 1))
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
