"""Distilled protein backbones (Xie, Zhang, Wang, Tansey, Zhou 2025, "Distilled Protein Backbone Generation").

Kept: a flow model of C-alpha coordinates in the shape of its teacher, Proteína (Geffner et al. 2025): residue tokens, a pair
representation made once from sequence offsets and binned distances, blocks of attention with a bias from the pairs and
norms modulated by time and fold class, no triangle layers. Three such networks are trained in turn, as `phase` says:
the teacher on data (pretraining), the score network on what the generator makes, and the generator by score identity
distillation, whose gradient passes through the two others without training them. Phases `sample_teacher` (Euler steps
of the teacher's flow) and `sample` (few generator steps, each noised again with `noise_scale`) are for inference only.

Proteins of several lengths are padded to the longest, with a mask. Left out: fold class dropout and guidance, the
weighting of times, self-conditioning, weight averaging. In the generator's own training the rough sample that a later
step starts from is one step of the generator from noise. Batches are of `seq` residues.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PHASES = ("teacher", "score", "generator")
SAMPLERS = ("sample_teacher", "sample")
ALPHA = 1.2
"""Weight of the second term of score identity distillation."""


class TimeAndFold(nn.Module):
    def __init__(self, dim: int, folds: int) -> None:
        super().__init__()
        self.dim = dim
        self.fold = nn.Embedding(folds, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, times: Tensor, fold: Tensor) -> Tensor:
        half = self.dim // 2
        rates = torch.exp(torch.arange(half, device=times.device) * (-math.log(1e4) / half))
        angles = 1000.0 * times[:, None] * rates
        return self.mlp(torch.cat([angles.sin(), angles.cos()], dim=1).to(self.fold.weight.dtype) + self.fold(fold))


class Pairs(nn.Module):
    """What two residues are to each other: their offset in the chain and their distance, in bins."""

    def __init__(self, dim: int, offsets: int = 32, bins: int = 32, longest: float = 6.0) -> None:
        super().__init__()
        self.offsets = offsets
        self.offset = nn.Embedding(2 * offsets + 1, dim)
        self.distance = nn.Embedding(bins + 1, dim)
        self.norm = nn.LayerNorm(dim)
        self.register_buffer("edges", torch.linspace(0.1, longest, bins))

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], device=x.device)
        offset = (place[:, None] - place[None, :]).clamp(-self.offsets, self.offsets) + self.offsets
        with torch.no_grad():
            distance = (x[:, :, None] - x[:, None]).square().sum(-1).sqrt()
            bins = torch.bucketize(distance, self.edges)
        return self.norm(self.offset(offset) + self.distance(bins))


class PairBiasAttention(nn.Module):
    def __init__(self, dim: int, pair_dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.bias = nn.Linear(pair_dim, heads, bias=False)
        self.gate = nn.Linear(dim, dim)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, pairs: Tensor, mask: Tensor) -> Tensor:
        b, n, dim = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.bias(pairs).permute(0, 3, 1, 2).contiguous()
        bias = bias.masked_fill(~mask[:, None, None, :], -1e4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.proj(torch.sigmoid(self.gate(x)) * y.transpose(1, 2).reshape(b, n, dim))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm modulated by the condition and before a gate."""

    def __init__(self, dim: int, pair_dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False)
        self.attn = PairBiasAttention(dim, pair_dim, heads)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False)
        self.ffn = nn.Sequential(nn.Linear(dim, 4 * dim), nn.SiLU(), nn.Linear(4 * dim, dim))
        self.modulation = nn.Linear(dim, 6 * dim)

    def forward(self, x: Tensor, pairs: Tensor, condition: Tensor, mask: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition)[:, None].chunk(6, dim=-1)
        x = x + gate1 * self.attn(self.norm1(x) * (1 + scale1) + shift1, pairs, mask)
        return x + gate2 * self.ffn(self.norm2(x) * (1 + scale2) + shift2)


class Backbone(nn.Module):
    """Clean coordinates (batch, residues, 3) from noisy ones at a time from 0, noise, to 1, protein."""

    def __init__(self, layers: int, dim: int, pair_dim: int, heads: int, folds: int) -> None:
        super().__init__()
        self.embed = nn.Linear(3, dim)
        self.condition = TimeAndFold(dim, folds)
        self.pairs = Pairs(pair_dim)
        self.blocks = nn.ModuleList(Block(dim, pair_dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 3)

    def forward(self, x: Tensor, times: Tensor, fold: Tensor, mask: Tensor) -> Tensor:
        condition = self.condition(times, fold)
        pairs = self.pairs(x)
        h = self.embed(x)
        for block in self.blocks:
            h = block(h, pairs, condition, mask)
        return centred(self.head(self.norm(h)), mask)


def centred(x: Tensor, mask: Tensor) -> Tensor:
    """Without its mean over the residues that are there, and zero where there are none."""
    there = mask[..., None].to(x.dtype)
    mean = (x * there).sum(1, keepdim=True) / there.sum(1, keepdim=True)
    return (x - mean) * there


def mixed(noise: Tensor, clean: Tensor, times: Tensor) -> Tensor:
    t = times[:, None, None]
    return (1 - t) * noise + t * clean


class Distillation(nn.Module):
    def __init__(
        self, layers: int, dim: int, pair_dim: int, heads: int, folds: int, residues: int, phase: str, steps: int,
        noise_scale: float,
    ) -> None:  # fmt: skip
        super().__init__()
        if phase not in (*PHASES, *SAMPLERS):
            raise ValueError(f"no phase {phase}: there are {', '.join((*PHASES, *SAMPLERS))}")
        self.residues, self.folds, self.phase, self.steps, self.noise_scale = residues, folds, phase, steps, noise_scale
        self.teacher = Backbone(layers, dim, pair_dim, heads, folds)
        self.score = Backbone(layers, dim, pair_dim, heads, folds)
        self.generator = Backbone(layers, dim, pair_dim, heads, folds)
        for name in PHASES:
            getattr(self, name).requires_grad_(name == phase)

    def forward(
        self, coords: Tensor, noise: Tensor, times: Tensor, starts: Tensor, fold: Tensor, mask: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Two factors whose product is the loss of every coordinate; for samplers, the coordinates."""
        if self.phase == "sample_teacher":
            return self.flow(centred(noise[:, 0], mask), fold, mask)
        if self.phase == "sample":
            return self.leap(centred(noise[:, 0], mask), fold, mask)
        later = centred(noise[:, 2], mask)
        if self.phase == "teacher":
            error = self.teacher(mixed(later, centred(coords, mask), times), times, fold, mask) - centred(coords, mask)
            return error, error
        with torch.set_grad_enabled(self.phase == "generator"):
            made = self.generate(noise, starts, fold, mask)
        noisy = mixed(later, made, times)
        fake = self.score(noisy, times, fold, mask)
        if self.phase == "score":
            return fake - made, fake - made
        gap = self.teacher(noisy, times, fold, mask) - fake
        return gap, (fake - made) + (1 - ALPHA) * gap

    def generate(self, noise: Tensor, starts: Tensor, fold: Tensor, mask: Tensor) -> Tensor:
        """One step of the generator, from a rough sample of its own that was noised again to `starts`."""
        first, again = centred(noise[:, 0], mask), centred(noise[:, 1], mask)
        with torch.no_grad():
            rough = self.generator(first, torch.zeros_like(starts), fold, mask)
        return self.generator(mixed(again, rough, starts), starts, fold, mask)

    def flow(self, x: Tensor, fold: Tensor, mask: Tensor) -> Tensor:
        for step in range(self.steps):
            t = step / self.steps
            clean = self.teacher(x, torch.full((len(x),), t, device=x.device), fold, mask)
            x = x + (clean - x) / ((1 - t) * self.steps)
        return x

    def leap(self, x: Tensor, fold: Tensor, mask: Tensor) -> Tensor:
        for step in range(self.steps):
            clean = self.generator(x, torch.full((len(x),), step / self.steps, device=x.device), fold, mask)
            t = (step + 1) / self.steps
            x = t * clean + (1 - t) * self.noise_scale * centred(torch.randn_like(x), mask)
        return x


def build(
    *, layers: int = 15, dim: int = 768, pair_dim: int = 512, heads: int = 12, folds: int = 1500, residues: int = 256,
    phase: str = "teacher", steps: int = 16, noise_scale: float = 0.5,
) -> Distillation:  # fmt: skip
    return Distillation(layers, dim, pair_dim, heads, folds, residues, phase, steps, noise_scale)


def batch(model: Distillation, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """Chains of unlike lengths, padded, with noise, times and fold classes of their own."""
    n = seq or model.residues
    lengths = n - torch.arange(micro_batch) * (n // (2 * micro_batch))
    return {
        "coords": torch.randn(micro_batch, n, 3).cumsum(dim=1) / n**0.5,
        "noise": torch.randn(micro_batch, 3, n, 3),
        "times": torch.rand(micro_batch),
        "starts": torch.randint(0, model.steps, (micro_batch,)) / model.steps,
        "fold": torch.randint(model.folds, (micro_batch,)),
        "mask": torch.arange(n) < lengths[:, None],
    }


def loss(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Product of the two sides that the phase gives, a squared error where both are the same, per coordinate."""
    left, right = output
    return (left.float() * right.float()).sum() / (3 * batch["mask"].sum())
