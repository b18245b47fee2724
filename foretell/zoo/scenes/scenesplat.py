"""SceneSplat (Li et al. 2025, "SceneSplat: Gaussian Splatting-based Scene Understanding with Vision-Language Pretraining").

Kept: a scene is a set of Gaussians (centre, scale, rotation, opacity, colour), scenes of a batch are packed one after
another. They are put on a space-filling curve by the interleaved bits of their cells, cut into patches that attend within
themselves, along two curves in turn, pooled by cells twice as large and brought back with skips, as in a serialised
point transformer. Phase `language` learns a feature of a vision-language model for each Gaussian (distance, cosine, and
contrast of the means of classes); phase `masked` hides Gaussians and learns to restore them.
Left out: self-distillation with a moving teacher, Hilbert curves (the second order is the same curve with axes swapped),
and the sparse convolution that tells positions, for which neighbours on the curve stand in. Patches may hold two scenes,
masked from one another. How many cells a pooling leaves depends on the data: `keep` is its bound as a share of the
points; slots beyond the cells are empty, cells beyond the bound fall into the last slot. `seq` is Gaussians per scene,
`depths` the blocks of each level, finest first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PHASES = ("language", "masked")
GAUSSIAN = 14
"""Centre 3, scale 3, rotation 4, opacity 1, colour 3."""
EMPTY = -1
_BITS = ((16, 0x30000FF), (8, 0x300F00F), (4, 0x30C30C3), (2, 0x9249249))


def curve(grid: Tensor, scene: Tensor) -> Tensor:
    """Place of cells (n, 3), of ten bits an axis, on a curve that visits one scene after another; empty ones come last."""
    x = grid
    for shift, mask in _BITS:
        x = (x | (x << shift)) & mask
    code = x[:, 0] << 2 | x[:, 1] << 1 | x[:, 2]
    return torch.where(scene == EMPTY, 2**40 - 1, scene << 30 | code)


class Level(NamedTuple):
    """Points at one resolution."""

    grid: Tensor
    scene: Tensor
    orders: list[Tensor]
    """Two curves through them, each as an order of the points, padded to whole patches."""
    places: list[Tensor]
    """Where each point stands in the order."""
    masks: list[Tensor]
    """(patches, 1, patch, patch): who may attend to whom."""


def level(grid: Tensor, scene: Tensor, patch: int) -> Level:
    orders, places, masks = [], [], []
    for axes in (grid, grid.flip(1)):
        order = curve(axes, scene).argsort(stable=True)
        places.append(torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device)))
        spare = -len(order) % patch
        orders.append(F.pad(order, (0, spare), value=0))
        inside = F.pad(scene[order], (0, spare), value=-2).view(-1, patch)
        masks.append((inside.unsqueeze(1) == inside.unsqueeze(2)).unsqueeze(1))
    return Level(grid, scene, orders, places, masks)


class Block(nn.Module):
    """Neighbours on the curve, attention within patches of it, and an MLP."""

    def __init__(self, dim: int, heads: int, patch: int) -> None:
        super().__init__()
        self.heads, self.patch = heads, patch
        self.near = nn.Parameter(torch.zeros(3, dim))
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, order: Tensor, place: Tensor, mask: Tensor, scene: Tensor) -> Tensor:
        line = order[: x.shape[0]]
        y, inside = x[line], scene[line]
        together = (inside[1:] == inside[:-1]).unsqueeze(-1)
        before, after = F.pad(y[:-1] * together, (0, 0, 1, 0)), F.pad(y[1:] * together, (0, 0, 0, 1))
        x = x + (self.near[0] * y + self.near[1] * before + self.near[2] * after)[place]
        y = self.norm1(x)[order].view(-1, self.patch, x.shape[-1])
        q, k, v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in self.qkv(y).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).reshape(-1, x.shape[-1])[place])
        return x + self.mlp(self.norm2(x))


class Pool(nn.Module):
    """The largest features of each cell twice the size."""

    def __init__(self, dim_in: int, dim: int, keep: float) -> None:
        super().__init__()
        self.keep = keep
        self.linear = nn.Linear(dim_in, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor, at: Level, patch: int) -> tuple[Tensor, Level, Tensor]:
        """Features and points that remain, and the slot that each point went to."""
        count, order = math.ceil(self.keep * x.shape[0]), at.orders[0][: x.shape[0]]
        code = curve(at.grid >> 1, at.scene)[order]
        new = F.pad(code[1:] != code[:-1], (1, 0), value=False)
        slot = torch.empty_like(order).scatter_(0, order, new.cumsum(0).clamp(max=count - 1))
        y = self.linear(x)
        pooled = y.new_zeros(count, y.shape[1]).scatter_reduce(0, slot.unsqueeze(-1).expand_as(y), y, "amax", include_self=False)
        scene = torch.full_like(at.scene[:1], EMPTY).repeat(count).scatter(0, slot, at.scene)
        grid = torch.zeros_like(at.grid[:1]).repeat(count, 1).scatter(0, slot.unsqueeze(-1).expand_as(at.grid), at.grid >> 1)
        return F.gelu(self.norm(pooled)), level(grid, scene, patch), slot


class Unpool(nn.Module):
    def __init__(self, dim_in: int, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim_in, dim)
        self.skip = nn.Linear(dim, dim)

    def forward(self, x: Tensor, skip: Tensor, slot: Tensor) -> Tensor:
        return F.gelu(self.linear(x)[slot] + self.skip(skip))


def through(blocks: Iterable[nn.Module], x: Tensor, at: Level) -> Tensor:
    """All blocks of a level, along its two curves in turn."""
    for i, block in enumerate(blocks):
        x = block(x, at.orders[i % 2], at.places[i % 2], at.masks[i % 2], at.scene)
    return x


class SceneSplat(nn.Module):
    def __init__(self, phase: str, dim: int, depths: list[int], up_depth: int, head_dim: int, patch: int, keep: float, language: int) -> None:
        super().__init__()
        if phase not in PHASES:
            raise ValueError(f"phase must be one of {', '.join(PHASES)}, got {phase!r}")
        self.phase, self.patch, self.language = phase, patch, language
        dims = [dim * 2**i for i in range(len(depths))]
        self.stem = nn.Linear(GAUSSIAN, dim)
        self.hidden = nn.Parameter(torch.zeros(dim), requires_grad=phase == "masked")
        for i, (width, depth) in enumerate(zip(dims, depths, strict=True)):
            self.add_module(f"down{i}", nn.ModuleList(Block(width, max(1, width // head_dim), patch) for _ in range(depth)))
        self.pools = nn.ModuleList(Pool(a, b, keep) for a, b in pairwise(dims))
        self.unpools = nn.ModuleList(Unpool(b, a) for a, b in pairwise(dims))
        for i, width in enumerate(dims[:-1]):
            self.add_module(f"up{i}", nn.ModuleList(Block(width, max(1, width // head_dim), patch) for _ in range(up_depth)))
        self.norm = nn.LayerNorm(dim)
        self.words = nn.Linear(dim, language).requires_grad_(phase == "language")
        self.restore = nn.Linear(dim, GAUSSIAN).requires_grad_(phase == "masked")

    def forward(self, gaussians: Tensor, grid: Tensor, scene: Tensor, hide: Tensor) -> Tensor:
        x = self.stem(gaussians)
        if self.phase == "masked":
            x = torch.where(hide.unsqueeze(-1), self.hidden, x)
        at = level(grid, scene, self.patch)
        kept: list[tuple[Tensor, Level, Tensor]] = []
        x = through(self.get_submodule("down0").children(), x, at)
        for i, pool in enumerate(self.pools):
            before, above = x, at
            x, at, slot = pool(x, at, self.patch)
            kept.append((before, above, slot))
            x = through(self.get_submodule(f"down{i + 1}").children(), x, at)
        for i in reversed(range(len(kept))):
            before, at, slot = kept[i]
            x = through(self.get_submodule(f"up{i}").children(), self.unpools[i](x, before, slot), at)
        x = self.norm(x)
        return self.words(x) if self.phase == "language" else self.restore(x)


def build(
    *,
    phase: str = "language",
    dim: int = 32,
    depths: str = "2,2,2,6,2",
    up_depth: int = 2,
    head_dim: int = 16,
    patch: int = 1024,
    keep: float = 0.5,
    language: int = 768,
) -> SceneSplat:
    return SceneSplat(phase, dim, [int(depth) for depth in depths.split(",")], up_depth, head_dim, patch, keep, language)


def batch(model: SceneSplat, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """Scenes of `seq` Gaussians on a slope, about one to a cell, so that pooling leaves a quarter or so of them."""
    each = seq or 100_000
    count, side = micro_batch * each, math.ceil(math.sqrt(each))
    if side > 1024:
        raise ValueError(f"seq {each} is more than the {1024**2} Gaussians that cells of ten bits an axis tell apart")
    across = torch.randint(0, side, (count, 2))
    grid = torch.cat([across, across[:, :1] // 4], dim=1)
    gaussians = torch.cat([grid / side, torch.randn(count, GAUSSIAN - 3)], dim=1)
    found = {
        "gaussians": gaussians,
        "grid": grid,
        "scene": torch.arange(micro_batch).repeat_interleave(each),
        "hide": torch.rand(count) < 0.6,
    }
    if model.phase == "language":
        found["targets"] = torch.randn(count, model.language)
        found["classes"] = torch.randint(0, 20, (count,))
    return found


def means(x: Tensor, classes: Tensor) -> Tensor:
    """Mean row of each of 20 classes, of length one."""
    return F.normalize(torch.zeros(20, x.shape[1], device=x.device, dtype=x.dtype).index_add(0, classes, x), dim=-1)


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Distance, cosine and contrast of the language features; or mean square error of what was hidden."""
    output = output.float()
    if "targets" not in batch:
        wrong = (output - batch["gaussians"]).square().mean(dim=-1)
        return (wrong * batch["hide"]).sum() / batch["hide"].sum().clamp(min=1)
    wanted = F.normalize(batch["targets"].float(), dim=-1)
    said = F.normalize(output, dim=-1)
    alike = means(said, batch["classes"]) @ means(wanted, batch["classes"]).t()
    contrast = F.cross_entropy(alike / 0.07, torch.arange(20, device=output.device))
    return (output - wanted).square().mean() + (1 - (said * wanted).sum(-1)).mean() + 0.1 * contrast
