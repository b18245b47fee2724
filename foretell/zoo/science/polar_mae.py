"""PoLAr-MAE (Young et al. 2025, "Particle Trajectory Representation Learning with Masked Point Modeling").

Kept: events of a liquid-argon detector are clouds of points with an energy, of unlike lengths, padded to the longest and
masked. Farthest-point sampling picks the centres, the nearest points of each centre make a token by a small PointNet, a
transformer sees the tokens that are not masked, a shallower one fills in the others, and two heads say where the points
of a masked token were (Chamfer distance) and how much energy each had. An event has tokens in proportion to its points.
Left out: thinning of the centres by overlap and balls of fixed radius (the nearest points are taken), augmentations, and
the segmentation that follows pretraining. `seq` is the points of the longest event, the bound that a trace needs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def farthest_points(xyz: Tensor, valid: Tensor, count: int) -> Tensor:
    """Indices (batch, count) of points each as far as can be from those before it; padding only when nothing is left."""
    batch = torch.arange(xyz.shape[0], device=xyz.device)
    nearest = torch.where(valid, torch.inf, -1.0)
    chosen = [torch.zeros_like(batch)]
    for _ in range(count - 1):
        offset = xyz - xyz[batch, chosen[-1]].unsqueeze(1)
        nearest = torch.minimum(nearest, offset.square().sum(-1))
        chosen.append(nearest.argmax(dim=1))
    return torch.stack(chosen, dim=1)


def nearest_points(centres: Tensor, xyz: Tensor, valid: Tensor, count: int) -> Tensor:
    """Indices (batch, centres, count) of the valid points nearest to each centre."""
    squares = xyz.square().sum(-1).unsqueeze(1) - 2 * centres @ xyz.transpose(1, 2)
    return squares.masked_fill(~valid.unsqueeze(1), torch.inf).topk(count, dim=-1, largest=False).indices


def take(x: Tensor, index: Tensor) -> Tensor:
    """Rows of (batch, rows, width) by an index of (batch, ...)."""
    rows = index.flatten(1).unsqueeze(-1).expand(-1, -1, x.shape[-1])
    return x.gather(1, rows).view(*index.shape, x.shape[-1])


class PointNet(nn.Module):
    """One token from the points around a centre, in whatever order they come."""

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 2 * width))
        self.second = nn.Sequential(nn.Linear(4 * width, 4 * width), nn.LayerNorm(4 * width), nn.ReLU(), nn.Linear(4 * width, dim))

    def forward(self, points: Tensor) -> Tensor:
        x = self.first(points)
        whole = x.amax(dim=2, keepdim=True).expand_as(x)
        return self.second(torch.cat([whole, x], dim=-1)).amax(dim=2)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).split(c, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=there[:, None, None, :].expand(b, 1, t, t))
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class PolarMAE(nn.Module):
    def __init__(self, groups: int, points: int, layers: int, decoder_layers: int, dim: int, heads: int, width: int, masked: float) -> None:
        super().__init__()
        self.groups, self.points, self.masked = groups, points, masked
        self.tokens = PointNet(width, dim)
        self.places = nn.Sequential(nn.Linear(3, dim), nn.GELU(), nn.Linear(dim, dim))
        self.encoder = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.unseen = nn.Parameter(torch.zeros(dim))
        self.decoder_places = nn.Sequential(nn.Linear(3, dim), nn.GELU(), nn.Linear(dim, dim))
        self.decoder = nn.ModuleList(Block(dim, heads) for _ in range(decoder_layers))
        self.decoder_norm = nn.LayerNorm(dim)
        self.shape = nn.Linear(dim, 3 * points)
        self.energy = nn.Sequential(nn.Linear(dim + 3, dim), nn.GELU(), nn.Linear(dim, 1))

    @torch.no_grad()
    def tokenise(self, points: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Centres (batch, groups, 3), points around them (batch, groups, points, 4), and which groups there are."""
        xyz = points[..., :3]
        valid = torch.arange(points.shape[1], device=points.device) < lengths.unsqueeze(1)
        centres = take(xyz, farthest_points(xyz, valid, self.groups))
        around = take(points, nearest_points(centres, xyz, valid, self.points))
        around = torch.cat([around[..., :3] - centres.unsqueeze(2), around[..., 3:]], dim=-1)
        tokens = (lengths * self.groups + points.shape[1] - 1) // points.shape[1]
        return centres, around, torch.arange(self.groups, device=points.device) < tokens.unsqueeze(1)

    def split(self, there: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Indices of the visible and of the masked groups of each event, and which of these slots are filled."""
        order = noise.masked_fill(~there, torch.inf).argsort(dim=1)
        count = there.sum(dim=1, keepdim=True)
        seen = (count * (1 - self.masked)).long().clamp(min=1)
        slots = torch.arange(self.groups, device=noise.device).unsqueeze(0)
        room = max(1, int(self.groups * (1 - self.masked)))
        hidden = seen + slots[:, : self.groups - room + 1]
        return order[:, :room], slots[:, :room] < seen, order.gather(1, hidden.clamp(max=self.groups - 1)), hidden < count

    def forward(self, points: Tensor, lengths: Tensor, noise: Tensor) -> dict[str, Tensor]:
        centres, around, there = self.tokenise(points, lengths)
        visible, visible_there, hidden, hidden_there = self.split(there, noise)
        seen_at, hidden_at = take(centres, visible), take(centres, hidden)
        truth = take(around.flatten(2), hidden).unflatten(-1, (self.points, 4))
        x = self.tokens(take(around.flatten(2), visible).unflatten(-1, (self.points, 4))) + self.places(seen_at)
        for block in self.encoder:
            x = block(x, visible_there)
        x = torch.cat([self.norm(x), self.unseen.to(x.dtype).expand(*hidden.shape, -1)], dim=1)
        x = x + self.decoder_places(torch.cat([seen_at, hidden_at], dim=1))
        everywhere = torch.cat([visible_there, hidden_there], dim=1)
        for block in self.decoder:
            x = block(x, everywhere)
        x = self.decoder_norm(x[:, visible.shape[1] :])
        per_point = torch.cat([x.unsqueeze(2).expand(-1, -1, self.points, -1), truth[..., :3]], dim=-1)
        return {
            "positions": self.shape(x).unflatten(-1, (self.points, 3)), "energies": self.energy(per_point).squeeze(-1),
            "truth": truth, "there": hidden_there,
        }  # fmt: skip


def chamfer(a: Tensor, b: Tensor) -> Tensor:
    """Squared distance from each point to the nearest of the other set, both ways, for every pair of sets."""
    squares = (a.unsqueeze(-2) - b.unsqueeze(-3)).square().sum(-1)
    return squares.amin(dim=-1).mean(dim=-1) + squares.amin(dim=-2).mean(dim=-1)


def build(
    *,
    groups: int = 512,
    points: int = 32,
    layers: int = 12,
    decoder_layers: int = 4,
    dim: int = 384,
    heads: int = 6,
    width: int = 128,
    masked: float = 0.6,
) -> PolarMAE:
    return PolarMAE(groups, points, layers, decoder_layers, dim, heads, width, masked)


def batch(model: PolarMAE, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """Events with between half and all of `seq` points; the first has them all."""
    length = seq or 4096
    if length < 2 * max(model.groups, model.points):
        raise ValueError(f"seq {length} is below two points for each of {model.groups} groups, or two groups of {model.points} points")
    lengths = length - torch.arange(micro_batch) * (length // 2) // max(1, micro_batch - 1)
    steps = torch.randn(micro_batch, length, 3) * 0.05
    energies = torch.rand(micro_batch, length, 1)
    return {
        "points": torch.cat([steps.cumsum(dim=1), energies], dim=-1),
        "lengths": lengths,
        "noise": torch.rand(micro_batch, model.groups),
    }


def loss(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Chamfer distance and squared error of the energies, over the masked tokens that are there."""
    there = output["there"]
    shape = chamfer(output["positions"].float(), output["truth"][..., :3].float())
    energy = (output["energies"].float() - output["truth"][..., 3].float()).square().mean(dim=-1)
    return ((shape + energy) * there).sum() / there.sum().clamp(min=1)
