"""Splat the Net (Zhou et al. 2025, "Splat the Net: Radiance Fields with Splattable Neural Primitives").

Kept: a scene is a set of primitives, each an ellipsoid with a density inside that a network of one hidden layer says. A
ray is a line, so the hidden units are waves along it whose integral is known: from where the ray enters the ellipsoid to
where it leaves, the integral is exact and needs no samples. Primitives are sorted by depth once a picture, every tile of
pixels takes the first of those that touch it, and the pixels blend them front to back, as splatting does; gradients are
scattered back to the primitives. Colours depend on direction by spherical harmonics of the first degree.
Left out: density control, population statistics, and the custom rasteriser: how many primitives touch a tile depends on
the data, so a tile takes up to `capacity` of them, the bound that a trace needs, and the rest are empty slots.
The hidden activation is a cosine; the paper's own choice of activation is not known here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def integral(frequency: Tensor, phase: Tensor, weight: Tensor, bias: Tensor, enter: Tensor, leave: Tensor) -> Tensor:
    """Integral over t from `enter` to `leave` of sum(weight · cos(frequency · t + phase)) + bias; hidden units are last."""
    length, middle = leave - enter, 0.5 * (leave + enter)
    half = 0.5 * frequency * length.unsqueeze(-1)
    waves = torch.cos(frequency * middle.unsqueeze(-1) + phase) * torch.sinc(half / torch.pi)
    return length * ((weight * waves).sum(-1) + bias)


def rotation(q: Tensor) -> Tensor:
    """Matrices (..., 3, 3) of quaternions (..., 4) of any length."""
    w, x, y, z = F.normalize(q, dim=-1).unbind(-1)
    rows = [
        1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y),
        2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x),
        2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y),
    ]  # fmt: skip
    return torch.stack(rows, dim=-1).unflatten(-1, (3, 3))


def crossing(o: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """Where lines o + t d enter and leave the unit ball; equal where they miss it."""
    a, b = d.square().sum(-1), (o * d).sum(-1)
    inside = b.square() - a * (o.square().sum(-1) - 1)
    half = torch.where(inside > 1e-6, inside.clamp(min=1e-6).sqrt(), torch.zeros_like(inside)) / a
    return (-b / a - half).clamp(min=0.0), (-b / a + half).clamp(min=0.0)


class Primitives(nn.Module):
    def __init__(self, count: int, hidden: int) -> None:
        super().__init__()
        self.centre = nn.Parameter(torch.randn(count, 3))
        self.log_scale = nn.Parameter(-1.5 + 0.2 * torch.randn(count, 3))
        self.turn = nn.Parameter(torch.randn(count, 4))
        self.wave = nn.Parameter(2 * torch.randn(count, hidden, 3))
        self.phase = nn.Parameter(torch.randn(count, hidden))
        self.weight = nn.Parameter(torch.randn(count, hidden) / hidden)
        self.bias = nn.Parameter(torch.ones(count))
        self.colour = nn.Parameter(0.3 * torch.randn(count, 3, 4))

    def along(self, index: Tensor, origin: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Optical depth (tiles, pixels, slots) and colour of primitives (tiles, slots) on rays (tiles, pixels, 3)."""
        axes = rotation(self.turn[index]).transpose(-1, -2) * torch.exp(-self.log_scale[index]).unsqueeze(-1)
        o = torch.einsum("tsij,tsj->tsi", axes, origin - self.centre[index]).unsqueeze(1)
        d = torch.einsum("tsij,tpj->tpsi", axes, directions)
        enter, leave = crossing(o, d)
        wave = self.wave[index]
        frequency = torch.einsum("tskj,tpsj->tpsk", wave, d)
        phase = torch.einsum("tskj,tsj->tsk", wave, o.squeeze(1)) + self.phase[index]
        inside = integral(frequency, phase.unsqueeze(1), self.weight[index].unsqueeze(1), self.bias[index].unsqueeze(1), enter, leave)
        basis = torch.cat([torch.ones_like(directions[..., :1]), directions], dim=-1)
        return F.relu(inside), torch.einsum("tscj,tpj->tpsc", self.colour[index], basis).sigmoid()


class SplatNet(nn.Module):
    def __init__(self, primitives: int, hidden: int, tile: int, capacity: int) -> None:
        super().__init__()
        self.tile, self.capacity = tile, min(capacity, primitives)
        self.primitives = Primitives(primitives, hidden)
        self.background = nn.Parameter(torch.zeros(3))

    @torch.no_grad()
    def touched(self, position: Tensor, side: int) -> tuple[Tensor, Tensor]:
        """Up to `capacity` primitives that each tile of a picture meets, nearest first, and which slots are filled."""
        offset = self.primitives.centre - position
        order = offset[:, 2].sort().indices
        offset, radius = offset[order], self.primitives.log_scale[order].amax(dim=-1).exp()
        depth = offset[:, 2].clamp(min=0.1)
        at, reach = offset[:, :2] / depth.unsqueeze(-1), radius / depth + self.tile / side * 1.5
        tiles = side // self.tile
        middle = (torch.arange(tiles, device=at.device) + 0.5) * 2 / tiles - 1
        grid = torch.stack([middle.repeat(tiles), middle.repeat_interleave(tiles)], dim=-1)
        apart = (grid.unsqueeze(1) - at.unsqueeze(0)).square().sum(-1)
        touches = (apart < reach.square()) & (offset[:, 2] > 0.1)
        ranks = torch.where(touches, torch.arange(len(order), device=at.device), len(order))
        first = ranks.topk(self.capacity, dim=1, largest=False, sorted=True).values
        return order[first.clamp(max=len(order) - 1)], first < len(order)

    def rays(self, side: int, like: Tensor) -> Tensor:
        """Directions of a pinhole's pixels, tile by tile: (tiles, pixels, 3)."""
        at = (torch.arange(side, device=like.device, dtype=like.dtype) + 0.5) * 2 / side - 1
        x, y = at.expand(side, side), at.unsqueeze(-1).expand(side, side)
        d = F.normalize(torch.stack([x, y, torch.ones_like(x)], dim=-1), dim=-1)
        n, t = side // self.tile, self.tile
        return d.view(n, t, n, t, 3).transpose(1, 2).reshape(n * n, t * t, 3)

    def picture(self, position: Tensor, side: int) -> Tensor:
        """(tiles, pixels, 3) as a camera there sees the scene along the third axis."""
        index, there = self.touched(position, side)
        depth, colour = self.primitives.along(index, position, self.rays(side, position))
        depth = depth * there.unsqueeze(1)
        through = torch.exp(-depth.cumsum(dim=-1))
        front = torch.cat([torch.ones_like(through[..., :1]), through[..., :-1]], dim=-1)
        seen = ((front * -torch.expm1(-depth)).unsqueeze(-1) * colour).sum(dim=-2)
        return seen + through[..., -1:] * self.background.sigmoid()

    def forward(self, positions: Tensor, targets: Tensor) -> Tensor:
        return torch.stack([self.picture(position, targets.shape[-1]) for position in positions])


def build(*, primitives: int = 30_000, hidden: int = 8, tile: int = 16, capacity: int = 128) -> SplatNet:
    return SplatNet(primitives, hidden, tile, capacity)


def batch(model: SplatNet, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """Cameras near one place, and the picture that each should see."""
    side = image or 512
    if side % model.tile:
        raise ValueError(f"image {side} is not a multiple of the tile's {model.tile} pixels")
    away = torch.tensor([0.0, 0.0, -4.0])
    return {"positions": away + 0.2 * torch.randn(micro_batch, 3), "targets": torch.rand(micro_batch, 3, side, side)}


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean absolute error of the pixels, tile by tile."""
    targets = batch["targets"]
    tile = round(output.shape[2] ** 0.5)
    tiled = targets.unfold(2, tile, tile).unfold(3, tile, tile).permute(0, 2, 3, 4, 5, 1)
    return F.l1_loss(output.float(), tiled.reshape(output.shape))
