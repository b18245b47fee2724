"""E2-LLM (Liu et al. 2024, "E2-LLM: Efficient and Extreme Length Extension of Large Language Models") on a Llama-2-shaped decoder.

Kept: trained once at a short length; every sample of every step draws a scale and a position offset, so that token i sits
at rotary position (i + offset) / scale, and the first tokens keep their places as attention sinks. Each sample has its own
table of angles, made of tensors, so that no draw changes a shape. In inference the scale is what the length asks for, and
`forward` returns the logits of the last token with the keys and values of all: one set of weights serves every length.
Left out: the pretrained weights. Scales are whole numbers up to `max_scale`, drawn evenly.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.zoo.language.llama import Rotary, SwiGLU

SINKS = 4
"""Tokens at the start that no offset moves."""

Cache = list[tuple[Tensor, Tensor]]


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, -1, self.head_dim).transpose(1, 2) for y in self.qkv(x).split(c, dim=-1))
        q, k = Rotary.rotate(q, cos, sin), Rotary.rotate(k, cos, sin)
        if cache is not None:
            v = v.contiguous()
            cache.append((k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(dim, eps=1e-5)
        self.attention = Attention(dim, heads)
        self.norm2 = nn.RMSNorm(dim, eps=1e-5)
        self.mlp = SwiGLU(dim, ffn)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin, cache)
        return x + self.mlp(self.norm2(x))


class E2LLM(nn.Module):
    def __init__(
        self, vocab_size: int, context: int, layers: int, dim: int, heads: int, ffn: int, max_scale: int, theta: float
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.context = context
        self.max_scale = max_scale
        self.head_dim = dim // heads
        self.theta = theta
        self.tokens = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, ffn) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        residual_std = 0.02 / math.sqrt(2 * len(self.blocks))
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=residual_std if name.endswith(("out.weight", "down.weight")) else 0.02)

    def forward(self, input_ids: Tensor) -> Tensor | tuple[Tensor, Cache]:
        b, t = input_ids.shape
        scale, offset = self.draw(b, t, input_ids.device) if self.training else self.served(b, t, input_ids.device)
        cos, sin = self.angles(self.places(t, scale, offset))
        x = self.tokens(input_ids)
        cache: Cache | None = None if self.training else []
        for block in self.blocks:
            x = block(x, cos, sin, cache)
        if cache is None:
            return self.head(self.norm(x))
        return self.head(self.norm(x[:, -1:])), cache

    def draw(self, b: int, t: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """A scale for every sample, and an offset with which its last token still lies inside scale · context."""
        scale = torch.randint(1, self.max_scale + 1, (b, 1), device=device)
        room = (scale * self.context - t).clamp(min=0)
        return scale, (torch.rand((b, 1), device=device) * (room + 1)).long().minimum(room)

    def served(self, b: int, t: int, device: torch.device) -> tuple[Tensor, Tensor]:
        scale = max(1, math.ceil(t / self.context))
        return torch.full((b, 1), scale, device=device), torch.zeros((b, 1), dtype=torch.long, device=device)

    @staticmethod
    def places(t: int, scale: Tensor, offset: Tensor) -> Tensor:
        """Rotary positions, (batch, time)."""
        index = torch.arange(t, device=scale.device)
        return (index + offset * (index >= SINKS)) / scale

    def angles(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, (batch, 1, time, head_dim / 2), the same for every head."""
        exponent = torch.arange(0, self.head_dim, 2, device=places.device, dtype=torch.float32) / self.head_dim
        angle = (places[..., None] * self.theta**-exponent)[:, None]
        return angle.cos(), angle.sin()


def build(
    *,
    vocab_size: int = 32000,
    context: int = 4096,
    layers: int = 32,
    dim: int = 4096,
    heads: int = 32,
    ffn: int = 11008,
    max_scale: int = 20,
    theta: float = 10_000.0,
) -> E2LLM:
    return E2LLM(vocab_size, context, layers, dim, heads, ffn, max_scale, theta)


def batch(model: E2LLM, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """Random tokens, each with the one after it as its target."""
    tokens = torch.randint(0, model.vocab_size, (micro_batch, (seq or model.context) + 1))
    return {"input_ids": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the next token."""
    return F.cross_entropy(output.float().flatten(0, 1), batch["targets"].flatten())
