"""AllShowers (Buss, Day-Hall, Gaede, Kasieczka, Krüger 2026, "AllShowers: One model for all calorimeter showers").

Kept: flow matching on clouds of energy deposits, with one transformer for all particle types: a point is (x, y, energy) in a
layer of the detector, its layer is an embedding, the incident particle (type, energy, direction) and the time modulate
every block. Attention is masked by layers: a point sees the points of its own layer and of `reach` layers around it.
Before noise and data are mixed, the noise of each layer is matched to the layer's points (optimal transport along the
energy, which is a sort). Phase `sample` integrates the flow with midpoint steps, for inference only.

Clouds are ragged: how many points a layer has is data, so each layer is padded to as many slots as the longest may
need (`seq` over `layers`, the bound that a trace needs) with a mask. `attention` is "masked", as in the paper (dense
attention under a mask), or "banded", which computes the same on windows of layers, hence only at about the mask's
density. Left out: the network that generates the number of points per layer (here they are given), the calibration of
energies; transport in all coordinates is replaced by that along one. Width and depth of the large entry are assumed.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PHASES = ("train",)
SAMPLERS = ("sample",)
ATTENTIONS = ("masked", "banded")
FEATURES = 3
TYPES = 5
"""Electrons, photons, charged and neutral hadrons, muons."""


def near(layers: int, slots: int, reach: int, mask: Tensor) -> Tensor:
    """Who sees whom (batch, 1, points, points): points of near layers that are there; and always oneself."""
    layer = torch.arange(layers, device=mask.device).repeat_interleave(slots)
    close = (layer[:, None] - layer[None, :]).abs() <= reach
    own = torch.eye(layers * slots, dtype=torch.bool, device=mask.device)
    return ((close & mask.flatten(1)[:, None, :]) | own)[:, None]


def windows(x: Tensor, reach: int) -> Tensor:
    """(batch, layers, slots, ...) → (batch, layers, (2 reach + 1) slots, ...): each layer with those around it."""
    layers = x.shape[1]
    empty = x.new_zeros(x.shape[0], reach, *x.shape[2:])
    padded = torch.cat([empty, x, empty], dim=1)
    return torch.cat([padded[:, first : first + layers] for first in range(2 * reach + 1)], dim=2)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, reach: int, form: str) -> None:
        super().__init__()
        self.heads, self.reach, self.form = heads, reach, form
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        """x is (batch, layers, slots, dim)."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.form == "masked":
            q, k, v = (part.flatten(1, 2) for part in (q, k, v))
        else:
            q, k, v = (part.flatten(0, 1) for part in (q, windows(k, self.reach), windows(v, self.reach)))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.proj(y.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, reach: int, form: str) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False)
        self.attn = Attention(dim, heads, reach, form)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False)
        self.ffn = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.modulation = nn.Linear(dim, 6 * dim)

    def forward(self, x: Tensor, condition: Tensor, allowed: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition)[:, None, None].chunk(6, dim=-1)
        x = x + gate1 * self.attn(self.norm1(x) * (1 + scale1) + shift1, allowed)
        return x + gate2 * self.ffn(self.norm2(x) * (1 + scale2) + shift2)


class Showers(nn.Module):
    def __init__(
        self, depth: int, dim: int, heads: int, layers: int, slots: int, reach: int, attention: str, phase: str, steps: int
    ) -> None:
        super().__init__()
        if phase not in (*PHASES, *SAMPLERS) or attention not in ATTENTIONS:
            raise ValueError(f"phase is one of {(*PHASES, *SAMPLERS)} and attention one of {ATTENTIONS}, not {phase}, {attention}")
        self.dim, self.layers, self.slots, self.reach = dim, layers, slots, reach
        self.attention, self.phase, self.steps = attention, phase, steps
        self.points = nn.Linear(FEATURES, dim)
        self.layer = nn.Embedding(layers, dim)
        self.kind = nn.Embedding(TYPES, dim)
        self.incident = nn.Linear(4, dim)
        self.condition = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(Block(dim, heads, reach, attention) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, FEATURES)

    def allowed(self, mask: Tensor) -> Tensor:
        if self.attention == "masked":
            return near(self.layers, mask.shape[2], self.reach, mask)
        there = windows(mask[..., None], self.reach)[..., 0].flatten(0, 1)[:, None, :]
        slots = mask.shape[2]
        own = torch.eye(slots, dtype=torch.bool, device=mask.device)
        own = F.pad(own, (self.reach * slots, self.reach * slots))
        return (there | own)[:, None]

    def velocity(self, x: Tensor, times: Tensor, kind: Tensor, incident: Tensor, mask: Tensor, allowed: Tensor) -> Tensor:
        rates = torch.exp(torch.arange(self.dim // 2, device=x.device) * (-2 * math.log(1e4) / self.dim))
        angles = 1000.0 * times[:, None] * rates
        time = torch.cat([angles.cos(), angles.sin()], dim=1).to(x.dtype)
        condition = self.condition(time + self.kind(kind) + self.incident(incident))
        h = self.points(x) + self.layer.weight[:, None]
        for block in self.blocks:
            h = block(h, condition, allowed)
        return self.head(self.norm(h)) * mask[..., None]

    def forward(self, points: Tensor, noise: Tensor, times: Tensor, kind: Tensor, incident: Tensor, mask: Tensor) -> Tensor:
        """Error of the velocity at every slot; for the sampler, points (batch, layers, slots, 3)."""
        allowed = self.allowed(mask)
        if self.phase == "train":
            noise = matched(noise, points, mask)
            t = times[:, None, None, None]
            found = self.velocity((1 - t) * noise + t * points, times, kind, incident, mask, allowed)
            return found - (points - noise) * mask[..., None]
        x = noise * mask[..., None]
        for step in range(self.steps):
            now = torch.full_like(times, step / self.steps)
            half = x + self.velocity(x, now, kind, incident, mask, allowed) / (2 * self.steps)
            now = torch.full_like(times, (step + 0.5) / self.steps)
            x = x + self.velocity(half, now, kind, incident, mask, allowed) / self.steps
        return x


@torch.no_grad()
def matched(noise: Tensor, points: Tensor, mask: Tensor) -> Tensor:
    """The noise of each layer in the order of the layer's points by energy; what is not there stays at the end."""
    absent = torch.finfo(points.dtype).max
    rank = torch.where(mask, points[..., -1], absent).argsort(dim=2).argsort(dim=2)
    order = torch.where(mask, noise[..., -1], absent).argsort(dim=2)
    return noise.gather(2, order.gather(2, rank)[..., None].expand_as(noise))


def build(
    *, depth: int = 8, dim: int = 256, heads: int = 8, layers: int = 78, slots: int = 80, reach: int = 1,
    attention: str = "masked", phase: str = "train", steps: int = 32,
) -> Showers:  # fmt: skip
    return Showers(depth, dim, heads, layers, slots, reach, attention, phase, steps)


def batch(model: Showers, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """Showers that are longest in the middle of the detector; `seq` slots over all layers."""
    if seq and seq % model.layers:
        raise ValueError(f"{seq} points cannot be shared out evenly among {model.layers} layers")
    layers, slots = model.layers, seq // model.layers if seq else model.slots
    profile = torch.sin(torch.linspace(0.2, math.pi - 0.2, layers))
    counts = (slots * profile * torch.linspace(1.0, 0.5, micro_batch)[:, None]).ceil()
    mask = torch.arange(slots) < counts[:, :, None]
    points, noise = torch.randn(2, micro_batch, layers, slots, FEATURES)
    return {
        "points": points * mask[..., None],
        "noise": noise,
        "times": torch.rand(micro_batch),
        "kind": torch.randint(TYPES, (micro_batch,)),
        "incident": torch.randn(micro_batch, 4),
        "mask": mask,
    }


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean square error of the velocity, over the points that are there."""
    return output.float().square().sum() / (FEATURES * batch["mask"].sum())
