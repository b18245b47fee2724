"""GPT-2 and GPT-3 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; Brown et al. 2020, "Language
Models are Few-Shot Learners"): a pre-norm decoder with learned positions.

Kept: each block is causal self-attention and a four-times-wider GELU MLP; the output head shares the token embedding.
Left out: the alternating sparse attention of GPT-3, for which dense attention stands in every layer.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float, fused: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.fused = fused
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).split(c, dim=-1))
        mix = F.scaled_dot_product_attention if self.fused else self._spelled_out
        y = mix(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, c))

    @staticmethod
    def _spelled_out(q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float, is_causal: bool) -> Tensor:
        """Attention as two products with a softmax between them, as models wrote it before fused kernels; it keeps all scores."""
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(q.shape[-1]))
        if is_causal:
            mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
            scores = scores.masked_fill(~mask, -math.inf)
        return F.dropout(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), dropout_p) @ v


class MLP(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.act = nn.GELU(approximate="tanh")
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float, fused: bool = True) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, dropout, fused)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = MLP(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    def __init__(
        self, vocab_size: int, context: int, layers: int, dim: int, heads: int, dropout: float, fused: bool
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.context = context
        self.tokens = nn.Embedding(vocab_size, dim)
        self.positions = nn.Embedding(context, dim)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout, fused) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        residual_std = 0.02 / math.sqrt(2 * len(self.blocks))
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=residual_std if name.endswith(("out.weight", "down.weight")) else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, input_ids: Tensor, positions: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        """`positions`, (1, time): of tokens that are not the first ones, or of several sequences; `keep`: whose logits are wanted."""
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.dropout(self.tokens(input_ids) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x if keep is None else x[:, keep]), self.tokens.weight)


def build(
    *,
    vocab_size: int = 50257,
    context: int = 1024,
    layers: int = 12,
    dim: int = 768,
    heads: int = 12,
    dropout: float = 0.0,
    fused_attention: bool = True,
) -> GPT:
    return GPT(vocab_size, context, layers, dim, heads, dropout, fused_attention)


def batch(model: GPT, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """Random tokens, each with the one after it as its target."""
    length = seq or model.context
    if length > model.context:
        raise ValueError(f"seq {length} is longer than the {model.context} learned positions of the model")
    tokens = torch.randint(0, model.vocab_size, (micro_batch, length + 1))
    return {"input_ids": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the next token."""
    return F.cross_entropy(output.float().flatten(0, 1), batch["targets"].flatten())
