"""Llama 3 (Grattafiori et al. 2024, "The Llama 3 Herd of Models"): a pre-norm decoder with RMSNorm, rotary positions and SwiGLU.

Kept: attention is grouped-query: several query heads share one key-value head.  Only the 1B model ties its output head to
the token embedding.  The long-context rescaling of the rotary frequencies is left out: it changes no shape.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Rotary(nn.Module):
    """Cosines and sines of the rotary angles, made in float32 at every forward so that no cast can spoil them."""

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta

    def forward(self, x: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        exponent = torch.arange(0, self.head_dim, 2, device=x.device, dtype=torch.float32) / self.head_dim
        position = torch.arange(x.shape[1], device=x.device, dtype=torch.float32) if positions is None else positions[0].float()
        angle = torch.outer(position, self.theta**-exponent)
        return angle.cos(), angle.sin()

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the pairs (i, i + head_dim/2) of x, shaped (batch, heads, time, head_dim)."""
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, dropout: float) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.dropout = dropout
        self.q = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.k = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (proj(x).view(b, t, -1, self.head_dim).transpose(1, 2) for proj in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(
            Rotary.rotate(q, cos, sin),
            Rotary.rotate(k, cos, sin),
            v,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=True,
        )
        return self.out(y.transpose(1, 2).reshape(b, t, -1))


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, ffn: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(dim, eps=1e-5)
        self.attention = Attention(dim, heads, kv_heads, dropout)
        self.norm2 = nn.RMSNorm(dim, eps=1e-5)
        self.mlp = SwiGLU(dim, ffn)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), cos, sin))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Llama(nn.Module):
    def __init__(
        self,
        vocab_size: int,
        context: int,
        layers: int,
        dim: int,
        heads: int,
        kv_heads: int,
        ffn: int,
        theta: float,
        tied: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.context = context
        self.tokens = nn.Embedding(vocab_size, dim)
        self.rotary = Rotary(dim // heads, theta)
        self.blocks = nn.ModuleList(Block(dim, heads, kv_heads, ffn, dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.head = None if tied else nn.Linear(dim, vocab_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        residual_std = 0.02 / math.sqrt(2 * len(self.blocks))
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=residual_std if name.endswith(("out.weight", "down.weight")) else 0.02)

    def forward(self, input_ids: Tensor, positions: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        """`positions`, (1, time): of tokens that are not the first ones, or of several sequences; `keep`: whose logits are wanted."""
        x = self.tokens(input_ids)
        cos, sin = self.rotary(x, positions)
        for block in self.blocks:
            x = block(x, cos, sin)
        x = self.norm(x if keep is None else x[:, keep])
        return F.linear(x, self.tokens.weight) if self.head is None else self.head(x)


def build(
    *,
    vocab_size: int = 128256,
    context: int = 8192,
    layers: int = 32,
    dim: int = 4096,
    heads: int = 32,
    kv_heads: int = 8,
    ffn: int = 14336,
    theta: float = 500_000.0,
    tied: bool = False,
    dropout: float = 0.0,
) -> Llama:
    return Llama(vocab_size, context, layers, dim, heads, kv_heads, ffn, theta, tied, dropout)


def batch(model: Llama, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """Random tokens, each with the one after it as its target."""
    tokens = torch.randint(0, model.vocab_size, (micro_batch, (seq or model.context) + 1))
    return {"input_ids": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the next token."""
    return F.cross_entropy(output.float().flatten(0, 1), batch["targets"].flatten())
