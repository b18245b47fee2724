"""Mamba (Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces").

Kept: a decoder of gated selective state-space blocks, with no attention. The recurrence h[t] = a[t] h[t-1] + b[t]
runs in plain PyTorch as a doubling scan (Hillis and Steele 1986): log2(time) steps, each over the whole sequence. Its
gradient is the same scan run backwards in time, so that autograd keeps only the coefficients and the states. The head
shares the token embedding. Left out: the paper's fused kernel, which keeps no states.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LinearScan(torch.autograd.Function):
    """States h of h[t] = a[t] h[t-1] + b[t] with h[-1] = 0, where time is dimension 1."""

    @staticmethod
    def scan(a: Tensor, b: Tensor) -> Tensor:
        a, h = a.clone(), b.clone()
        step = 1
        while step < a.shape[1]:
            h[:, step:] += a[:, step:] * h[:, :-step]
            a[:, step:] *= a[:, :-step].clone()
            step *= 2
        return h

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return LinearScan.scan(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, h = ctx.saved_tensors
        grad_b = LinearScan.scan(a.flip(1).roll(1, dims=1), grad.flip(1)).flip(1)
        grad_a = torch.zeros_like(a)
        torch.mul(grad_b[:, 1:], h[:, :-1], out=grad_a[:, 1:])
        return grad_a, grad_b


class Mixer(nn.Module):
    """Causal depthwise convolution, then a state-space recurrence whose step and matrices depend on the input."""

    def __init__(self, dim: int, state: int, expand: int, kernel: int) -> None:
        super().__init__()
        self.inner = expand * dim
        self.state = state
        self.rank = math.ceil(dim / 16)
        self.in_proj = nn.Linear(dim, 2 * self.inner, bias=False)
        self.conv = nn.Conv1d(self.inner, self.inner, kernel, groups=self.inner, padding=kernel - 1)
        self.x_proj = nn.Linear(self.inner, self.rank + 2 * state, bias=False)
        self.dt_proj = nn.Linear(self.rank, self.inner)
        self.a_log = nn.Parameter(torch.empty(self.inner, state))
        self.skip = nn.Parameter(torch.empty(self.inner))
        self.out_proj = nn.Linear(self.inner, dim, bias=False)

    @torch.no_grad()
    def reset_parameters(self, residual_std: float) -> None:
        """Step sizes start log-uniform between 0.001 and 0.1, decay rates at 1, 2, ... along the state."""
        nn.init.normal_(self.in_proj.weight, std=0.02)
        nn.init.normal_(self.x_proj.weight, std=0.02)
        nn.init.normal_(self.out_proj.weight, std=residual_std)
        nn.init.normal_(self.dt_proj.weight, std=self.rank**-0.5)
        nn.init.uniform_(self.dt_proj.bias, math.log(1e-3), math.log(1e-1))
        dt = self.dt_proj.bias.exp()
        self.dt_proj.bias.copy_(dt + torch.log(-torch.expm1(-dt)))
        self.a_log.copy_(torch.arange(1, self.state + 1, device=self.a_log.device).log().expand_as(self.a_log))
        nn.init.ones_(self.skip)

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.in_proj(x).chunk(2, dim=-1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
        dt, b, c = self.x_proj(x).split((self.rank, self.state, self.state), dim=-1)
        y = self.recur(x, F.softplus(self.dt_proj(dt)), b, c)
        return self.out_proj(y * F.silu(gate))

    def recur(self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """x and dt are (batch, time, inner), b and c are (batch, time, state); the states are kept in float32."""
        decay = torch.exp(dt.float()[..., None] * -self.a_log.float().exp())
        drive = (dt.float() * x.float())[..., None] * b.float()[:, :, None, :]
        states = LinearScan.apply(decay, drive)
        y = (states * c.float()[:, :, None, :]).sum(dim=-1)
        return (y + self.skip.float() * x.float()).to(x.dtype)


class Block(nn.Module):
    def __init__(self, dim: int, state: int, expand: int, kernel: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.mixer = Mixer(dim, state, expand, kernel)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.mixer(self.norm(x)))


class Mamba(nn.Module):
    def __init__(
        self,
        vocab_size: int,
        context: int,
        layers: int,
        dim: int,
        state: int,
        expand: int,
        kernel: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.context = context
        self.tokens = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(Block(dim, state, expand, kernel, dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        nn.init.normal_(self.tokens.weight, std=0.02)
        for block in self.blocks:
            block.mixer.reset_parameters(residual_std=0.02 / math.sqrt(layers))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def build(
    *,
    vocab_size: int = 50280,
    context: int = 1024,
    layers: int = 24,
    dim: int = 768,
    state: int = 16,
    expand: int = 2,
    kernel: int = 4,
    dropout: float = 0.0,
) -> Mamba:
    return Mamba(vocab_size, context, layers, dim, state, expand, kernel, dropout)


def batch(model: Mamba, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """Random tokens, each with the one after it as its target."""
    tokens = torch.randint(0, model.vocab_size, (micro_batch, (seq or model.context) + 1))
    return {"input_ids": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the next token."""
    return F.cross_entropy(output.float().flatten(0, 1), batch["targets"].flatten())
