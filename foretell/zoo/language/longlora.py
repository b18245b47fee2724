"""LongLoRA (Chen et al. 2023, "LongLoRA: Efficient Fine-tuning of Long-Context Large Language Models") on a Llama-2-shaped decoder.

Kept: in training, shifted sparse attention: the text is cut into groups, half of the heads see groups that are shifted by
half a group, each group attends only to itself; in inference, plain dense causal attention with the same weights. LoRA on
the four projections of attention, embedding and norms trained, all else frozen. Positions are interpolated to the longer
context, as the paper does. The shift wraps around, as in the paper's listing: in the shifted heads the last group joins
the end of the text with its start. Left out: dropout on the adapters, and the pretrained weights.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.zoo.language.llama import Rotary, SwiGLU


class LoraLinear(nn.Module):
    """A frozen linear layer and a trained one of low rank beside it; the second half of that starts at zero."""

    def __init__(self, dim_in: int, dim_out: int, rank: int, scale: float = 2.0) -> None:
        super().__init__()
        self.scale = scale
        self.base = nn.Linear(dim_in, dim_out, bias=False).requires_grad_(False)
        self.down = nn.Linear(dim_in, rank, bias=False)
        self.up = nn.Linear(rank, dim_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x)) * self.scale


class ShiftedAttention(nn.Module):
    """Dense in inference; in training over groups, half of the heads shifted by half a group."""

    def __init__(self, dim: int, heads: int, groups: int, rank: int) -> None:
        super().__init__()
        if heads % 2:
            raise ValueError(f"half of the heads are shifted: {heads} heads have no half")
        self.heads = heads
        self.groups = groups
        self.q, self.k, self.v, self.out = (LoraLinear(dim, dim, rank) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (project(x).view(b, t, self.heads, -1).transpose(1, 2) for project in (self.q, self.k, self.v))
        q, k = Rotary.rotate(q, cos, sin), Rotary.rotate(k, cos, sin)
        if not self.training:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = F.scaled_dot_product_attention(self.grouped(q), self.grouped(k), self.grouped(v), is_causal=True)
            y = self.ungrouped(y, t)
        return self.out(y.transpose(1, 2).reshape(b, t, -1))

    def grouped(self, x: Tensor) -> Tensor:
        """(batch, heads, time, size) to (batch · groups, heads, time / groups, size)."""
        b, h, t, size = x.shape
        group = self.group_of(t)
        still, shifted = x.chunk(2, dim=1)
        x = torch.cat((still, shifted.roll(-(group // 2), dims=2)), dim=1)
        return x.view(b, h, self.groups, group, size).transpose(1, 2).reshape(-1, h, group, size)

    def ungrouped(self, x: Tensor, t: int) -> Tensor:
        _, h, group, size = x.shape
        x = x.view(-1, self.groups, h, group, size).transpose(1, 2).reshape(-1, h, t, size)
        still, shifted = x.chunk(2, dim=1)
        return torch.cat((still, shifted.roll(group // 2, dims=2)), dim=1)

    def group_of(self, t: int) -> int:
        if t % (2 * self.groups):
            raise ValueError(f"{t} tokens are no whole number of half groups: {self.groups} groups")
        return t // self.groups


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, ffn: int, groups: int, rank: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(dim, eps=1e-5)
        self.attention = ShiftedAttention(dim, heads, groups, rank)
        self.norm2 = nn.RMSNorm(dim, eps=1e-5)
        self.mlp = SwiGLU(dim, ffn).requires_grad_(False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class LongLoRA(nn.Module):
    def __init__(
        self, vocab_size: int, context: int, pretrained: int, layers: int, dim: int, heads: int, ffn: int, groups: int,
        rank: int, theta: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.vocab_size = vocab_size
        self.context = context
        self.pretrained = pretrained
        self.head_dim = dim // heads
        self.theta = theta
        self.tokens = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, ffn, groups, rank) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.head = nn.Linear(dim, vocab_size, bias=False).requires_grad_(False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        residual_std = 0.02 / math.sqrt(2 * len(self.blocks))
        for name, p in self.named_parameters():
            if name.endswith("up.weight") and "attention" in name:
                nn.init.zeros_(p)
            elif p.dim() == 2:
                residual = name.endswith(("out.base.weight", "mlp.down.weight"))
                nn.init.normal_(p, std=residual_std if residual else 0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        cos, sin = self.angles(x)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))

    def angles(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Positions squeezed into the range that the base model was trained on."""
        exponent = torch.arange(0, self.head_dim, 2, device=x.device, dtype=torch.float32) / self.head_dim
        position = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
        angle = torch.outer(position * min(1.0, self.pretrained / self.context), self.theta**-exponent)
        return angle.cos(), angle.sin()


def build(
    *,
    vocab_size: int = 32000,
    context: int = 102400,
    pretrained: int = 4096,
    layers: int = 32,
    dim: int = 4096,
    heads: int = 32,
    ffn: int = 11008,
    groups: int = 4,
    rank: int = 8,
    theta: float = 10_000.0,
) -> LongLoRA:
    return LongLoRA(vocab_size, context, pretrained, layers, dim, heads, ffn, groups, rank, theta)


def batch(model: LongLoRA, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """Random tokens, each with the one after it as its target."""
    tokens = torch.randint(0, model.vocab_size, (micro_batch, (seq or model.context) + 1))
    return {"input_ids": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the next token."""
    return F.cross_entropy(output.float().flatten(0, 1), batch["targets"].flatten())
