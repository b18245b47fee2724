"""Mixtral (Jiang et al. 2024, "Mixtral of Experts"): a Llama-shaped decoder.

Kept: the MLP of every block is a mixture of SwiGLU experts, top 2 of 8, with two ways to route. "capacity" (GShard,
Lepikhin et al. 2020; Switch, Fedus et al. 2021) gives every expert a fixed number of places, first choices before
second ones, and drops what overflows: all shapes are fixed. "loop" gives each expert exactly the tokens that chose
it, as Mixtral does: its shapes depend on the data and cannot be traced. Left out: the auxiliary load-balancing loss.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.zoo.language.llama import Attention, Rotary


class Experts(nn.Module):
    """SwiGLU experts with stacked weights."""

    def __init__(self, experts: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, dim, hidden))
        self.up = nn.Parameter(torch.empty(experts, dim, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Row e of x, shaped (experts, places, dim), goes through expert e."""
        return torch.bmm(F.silu(torch.bmm(x, self.gate)) * torch.bmm(x, self.up), self.down)

    def one(self, expert: int, x: Tensor) -> Tensor:
        """All of x, shaped (tokens, dim), goes through one expert."""
        return (F.silu(x @ self.gate[expert]) * (x @ self.up[expert])) @ self.down[expert]


class MoE(nn.Module):
    def __init__(self, dim: int, hidden: int, experts: int, top_k: int, routing: str, capacity_factor: float) -> None:
        super().__init__()
        if routing not in ("capacity", "loop"):
            raise ValueError(f"routing must be 'capacity' or 'loop', not {routing!r}")
        self.num_experts = experts
        self.top_k = top_k
        self.routing = routing
        self.capacity_factor = capacity_factor
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = Experts(experts, dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weight, expert = self.router(tokens).float().softmax(dim=-1).topk(self.top_k, dim=-1)
        weight = (weight / weight.sum(dim=-1, keepdim=True)).to(x.dtype)
        mix = self._by_capacity if self.routing == "capacity" else self._by_loop
        return mix(tokens, weight, expert).view_as(x)

    def _by_capacity(self, tokens: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
        n, e, k = len(tokens), self.num_experts, self.top_k
        capacity = min(n, math.ceil(self.capacity_factor * n * k / e))
        overflow = e * capacity

        choice = expert.t().flatten()
        taken = F.one_hot(choice, e).cumsum(dim=0)
        place = taken.gather(1, choice[:, None]).squeeze(1) - 1
        kept = place < capacity
        slot = torch.where(kept, choice * capacity + place, overflow)

        source = torch.arange(n, device=tokens.device).repeat(k)
        token_of_slot = source.new_zeros(overflow + 1).scatter(0, slot, source)[:overflow]
        y = self.experts(tokens.index_select(0, token_of_slot).view(e, capacity, -1)).flatten(0, 1)

        weight = weight.t() * kept.view(k, n)
        y = y.index_select(0, slot.clamp(max=overflow - 1)).view(k, n, -1)
        return (weight[..., None] * y).sum(dim=0)

    def _by_loop(self, tokens: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for e in range(self.num_experts):
            token, choice = torch.where(expert == e)
            y = self.experts.one(e, tokens[token]) * weight[token, choice, None]
            out.index_add_(0, token, y.to(out.dtype))
        return out


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, moe: MoE, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(dim, eps=1e-5)
        self.attention = Attention(dim, heads, kv_heads, dropout)
        self.norm2 = nn.RMSNorm(dim, eps=1e-5)
        self.moe = moe
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), cos, sin))
        return x + self.dropout(self.moe(self.norm2(x)))


class Mixtral(nn.Module):
    def __init__(
        self,
        vocab_size: int,
        context: int,
        layers: int,
        dim: int,
        heads: int,
        kv_heads: int,
        ffn: int,
        experts: int,
        top_k: int,
        routing: str,
        capacity_factor: float,
        theta: float,
        dropout: float,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.context = context
        self.tokens = nn.Embedding(vocab_size, dim)
        self.rotary = Rotary(dim // heads, theta)
        self.blocks = nn.ModuleList(
            Block(dim, heads, kv_heads, MoE(dim, ffn, experts, top_k, routing, capacity_factor), dropout)
            for _ in range(layers)
        )
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        residual_std = 0.02 / math.sqrt(2 * len(self.blocks))
        for name, p in self.named_parameters():
            if p.dim() >= 2:
                nn.init.normal_(p, std=residual_std if name.endswith(("out.weight", "experts.down")) else 0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        cos, sin = self.rotary(x)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def build(
    *,
    vocab_size: int = 32000,
    context: int = 4096,
    layers: int = 32,
    dim: int = 4096,
    heads: int = 32,
    kv_heads: int = 8,
    ffn: int = 14336,
    experts: int = 8,
    top_k: int = 2,
    routing: str = "capacity",
    capacity_factor: float = 1.25,
    theta: float = 1_000_000.0,
    dropout: float = 0.0,
) -> Mixtral:
    return Mixtral(
        vocab_size,
        context,
        layers,
        dim,
        heads,
        kv_heads,
        ffn,
        experts,
        top_k,
        routing,
        capacity_factor,
        theta,
        dropout,
    )


def batch(model: Mixtral, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """Random tokens, each with the one after it as its target."""
    tokens = torch.randint(0, model.vocab_size, (micro_batch, (seq or model.context) + 1))
    return {"input_ids": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the next token."""
    return F.cross_entropy(output.float().flatten(0, 1), batch["targets"].flatten())
