"""SG-Reg (Liu et al., 2025, "SG-Reg: Generalizable and Efficient Scene Graph Registration").

Two robots each have a graph of the objects they saw; the network says which object is which, and from that how one map
lies in the other. In order:

    encoder    a node's label feature, box and points, fused with triplets of neighbours: distances and the angle between
               them, taken in the order of turning, so that moving or turning the scene about the vertical changes nothing
    coarse     scores of all pairs of nodes, with a dustbin on both sides, made a transport plan by Sinkhorn sweeps
    fine       the best pairs of nodes, whose points are matched by the same sweeps
    pose       each pair proposes a rigid motion (weighted SVD); the one that most points agree with is solved again

Kept: three modalities of a node, triplets, two optimal transports with learned dustbins, a pose solve that withstands
outliers and is not trained through. Graphs are ragged: padded, with masks. Left out: the language model that makes label
features (drawn), the mapping that makes graphs (drawn), KPConv (a PointNet here), and the paper's own robust estimator.
How many pairs go on to the fine stage is the setting `pairs`, a bound; the paper's number depends on the data.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

NEVER = -1e4
"""Log of what cannot be matched."""


def take(rows: Tensor, index: Tensor) -> Tensor:
    """rows (batch, n, ...) at index (batch, ...)."""
    which = torch.arange(rows.shape[0], device=rows.device).view(-1, *[1] * (index.dim() - 1))
    return rows[which, index]


class TripletLayer(nn.Module):
    """A node learns from pairs of its neighbours."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.shape = nn.Sequential(nn.Linear(4, dim), nn.GELU(), nn.Linear(dim, dim))
        self.message = nn.Sequential(nn.Linear(3 * dim, dim), nn.GELU(), nn.Linear(dim, dim))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor, centre: Tensor, triplets: Tensor) -> Tensor:
        """Features (batch, nodes, dim), centres (batch, nodes, 3), neighbours (batch, nodes, triplets, 2)."""
        arms = take(centre, triplets) - centre[:, :, None, None]
        first, second = arms.unbind(dim=3)
        turning = first[..., 0] * second[..., 1] - first[..., 1] * second[..., 0]
        triplets = torch.where(turning[..., None] >= 0, triplets, triplets.flip(-1))
        arms = torch.where(turning[..., None, None] >= 0, arms, arms.flip(-2))
        first, second = arms.unbind(dim=3)
        near, far, apart = (part.norm(dim=-1) for part in (first, second, first - second))
        cosine = (first * second).sum(dim=-1) / (near * far).clamp_min(1e-6)
        seen = self.shape(torch.stack([near, far, apart, cosine], dim=-1))
        return x + self.norm(self.message(torch.cat([take(x, triplets).flatten(3), seen], dim=-1)).mean(dim=2))


class NodeEncoder(nn.Module):
    def __init__(self, semantic: int, dim: int, layers: int) -> None:
        super().__init__()
        self.semantic, self.box = nn.Linear(semantic, dim), nn.Sequential(nn.Linear(3, dim), nn.GELU())
        self.join = nn.Linear(2 * dim, dim)
        self.blocks = nn.ModuleList(TripletLayer(dim) for _ in range(layers))
        self.points = nn.Sequential(nn.Linear(3, dim), nn.GELU(), nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))
        self.fuse = nn.Linear(2 * dim, dim)

    def forward(self, label: Tensor, box: Tensor, points: Tensor, triplets: Tensor) -> tuple[Tensor, Tensor]:
        """One robot's graph to features of nodes, (batch, nodes, dim), and of points, (batch, nodes, points, dim)."""
        centre = points.mean(dim=2)
        x = self.join(torch.cat([self.semantic(label), self.box(box)], dim=-1))
        for block in self.blocks:
            x = block(x, centre, triplets)
        away = points - centre[:, :, None]
        level = away[..., :2].norm(dim=-1)
        each = self.points(torch.stack([level, away[..., 2], away.norm(dim=-1)], dim=-1))
        return self.fuse(torch.cat([x, each.amax(dim=2)], dim=-1)), each


class Transport(nn.Module):
    """Log of a transport plan between two sets, each with a dustbin, by alternating normalisation."""

    def __init__(self, sweeps: int) -> None:
        super().__init__()
        self.sweeps = sweeps
        self.dustbin = nn.Parameter(torch.ones(1))

    def forward(self, left: Tensor, right: Tensor, left_mask: Tensor, right_mask: Tensor) -> Tensor:
        """(..., n, dim), (..., m, dim) and who is there to (..., n + 1, m + 1)."""
        scores = (left @ right.transpose(-1, -2)).float() / left.shape[-1] ** 0.5
        column = self.dustbin.expand(*scores.shape[:-1], 1)
        row = self.dustbin.expand(*scores.shape[:-2], 1, scores.shape[-1] + 1)
        scores = torch.cat([torch.cat([scores, column], dim=-1), row], dim=-2)
        here, there = left_mask.sum(-1, keepdim=True), right_mask.sum(-1, keepdim=True)
        rows, columns = (torch.where(mask, 0.0, NEVER) for mask in (left_mask, right_mask))
        rows, columns = torch.cat([rows, there.log()], dim=-1), torch.cat([columns, here.log()], dim=-1)
        allowed = torch.minimum(rows[..., :, None].clamp(max=0), columns[..., None, :].clamp(max=0))
        scores = scores + allowed
        u, v = torch.zeros_like(rows), torch.zeros_like(columns)
        for _ in range(self.sweeps):
            u = rows - torch.logsumexp(scores + v[..., None, :], dim=-1)
            v = columns - torch.logsumexp(scores + u[..., :, None], dim=-2)
        return scores + u[..., :, None] + v[..., None, :]


def rigid(left: Tensor, right: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rotations (..., 3, 3) and shifts (..., 3) that best carry points (..., n, 3) to others, by weight (..., n)."""
    share = weight / weight.sum(dim=-1, keepdim=True).clamp_min(1e-9)
    middle_left, middle_right = ((share[..., None] * points).sum(dim=-2) for points in (left, right))
    spread = ((left - middle_left[..., None, :]) * share[..., None]).transpose(-1, -2) @ (right - middle_right[..., None, :])
    u, _, vh = torch.linalg.svd(spread)
    flip = torch.ones_like(spread[..., 0])
    flip[..., 2] = torch.linalg.det(u @ vh).sign()
    rotation = (vh.transpose(-1, -2) * flip[..., None, :]) @ u.transpose(-1, -2)
    return rotation, middle_right - (rotation @ middle_left[..., None]).squeeze(-1)


@torch.no_grad()
def agreed(left: Tensor, right: Tensor, weight: Tensor, radius: float) -> tuple[Tensor, Tensor]:
    """Of motions proposed by each pair of nodes, (batch, pairs, points, ...), the one most points agree with, refined."""
    rotations, shifts = rigid(left, right, weight)
    all_left, all_right, all_weight = left.flatten(1, 2), right.flatten(1, 2), weight.flatten(1)
    moved = all_left[:, None] @ rotations.transpose(-1, -2) + shifts[:, :, None]
    near = (moved - all_right[:, None]).norm(dim=-1) < radius
    votes = (near * all_weight[:, None]).sum(dim=-1)
    best = votes.argmax(dim=1)
    return rigid(all_left, all_right, all_weight * take(near, best))


class Registration(nn.Module):
    def __init__(self, sizes: dict[str, int], dim: int, layers: int, pairs: int, sweeps: int, radius: float) -> None:
        super().__init__()
        self.sizes, self.pairs, self.radius = sizes, pairs, radius
        self.encoder = NodeEncoder(sizes["semantic"], dim, layers)
        self.coarse, self.fine = Transport(sweeps), Transport(sweeps)

    def forward(self, label: Tensor, box: Tensor, points: Tensor, triplets: Tensor, there: Tensor) -> dict[str, Tensor]:
        """Both robots' graphs, (2, batch, nodes, ...): transport plans, the pairs chosen, and the motion."""
        (nodes, others), (each, other_each) = (
            found.unflatten(0, label.shape[:2])
            for found in self.encoder(*(value.flatten(0, 1) for value in (label, box, points, triplets)))
        )
        coarse = self.coarse(nodes, others, *there)
        chosen = coarse[:, :-1, :-1].flatten(1).topk(self.pairs, dim=1).indices
        left, right = chosen // there.shape[-1], chosen % there.shape[-1]
        everyone = torch.ones(*left.shape, points.shape[3], dtype=torch.bool, device=points.device)
        fine = self.fine(take(each, left), take(other_each, right), everyone, everyone)
        plan = fine[..., :-1, :-1].detach().exp()
        weight = plan.sum(dim=-1)
        partner = plan @ take(points[1], right) / weight[..., None].clamp_min(1e-9)
        rotation, shift = agreed(take(points[0], left), partner, weight, self.radius)
        return {"coarse": coarse, "fine": fine, "left": left, "right": right, "rotation": rotation, "shift": shift}


def build(
    *, nodes: int = 64, points: int = 256, triplets: int = 20, semantic: int = 768, dim: int = 64, layers: int = 2,
    pairs: int = 16, sweeps: int = 100, radius: float = 0.1,
) -> nn.Module:  # fmt: skip
    sizes = {"nodes": nodes, "points": points, "triplets": triplets, "semantic": semantic}
    return Registration(sizes, dim, layers, pairs, sweeps, radius)


def batch(model: nn.Module, micro_batch: int, seq: int | None, image: int | None) -> dict[str, Tensor]:
    """The second robot sees the same objects from elsewhere, in another order, and a quarter of them not at all."""
    nodes, count, triplets, semantic = (model.sizes[key] for key in ("nodes", "points", "triplets", "semantic"))
    order = torch.rand(micro_batch, nodes).argsort(dim=1)
    angle = torch.rand(micro_batch) * 6.28
    zero, one = torch.zeros(micro_batch), torch.ones(micro_batch)
    rows = [angle.cos(), -angle.sin(), zero, angle.sin(), angle.cos(), zero, zero, zero, one]
    rotation, shift = torch.stack(rows, dim=1).view(-1, 3, 3), torch.randn(micro_batch, 3)
    points = torch.randn(micro_batch, nodes, 1, 3) * 4 + torch.randn(micro_batch, nodes, count, 3)
    moved = take(points @ rotation[:, None].transpose(-1, -2) + shift[:, None, None], order)
    label, box = torch.randn(micro_batch, nodes, semantic), torch.rand(micro_batch, nodes, 3)
    neighbours = torch.randint(nodes, (micro_batch, nodes, triplets, 2))
    seen = nodes - nodes // 4
    theirs, back = torch.randint(seen, neighbours.shape), order.argsort(dim=1)
    there = torch.stack([torch.ones(micro_batch, nodes), (torch.arange(nodes) < seen).expand(micro_batch, -1)]).bool()
    return {
        "label": torch.stack([label, take(label, order)]), "box": torch.stack([box, take(box, order)]),
        "points": torch.stack([points, moved]), "triplets": torch.stack([neighbours, theirs]), "there": there,
        "partner": torch.where(take(there[1], back), back, nodes), "rotation": rotation, "shift": shift,
    }  # fmt: skip


def loss(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Log of the plan at the true partners, or at the dustbin; of points, only where a chosen pair is a true one."""
    partner, last = batch["partner"], output["fine"].shape[-1] - 1
    coarse = output["coarse"][:, :-1].gather(2, partner[..., None]).mean()
    true = take(partner, output["left"]) == output["right"]
    own = torch.where(true[..., None], torch.arange(last, device=partner.device), last)
    fine = output["fine"][:, :, :-1].gather(3, own[..., None]).mean()
    return -coarse - fine


def bytes_sent(model: nn.Module) -> int:
    """What one robot tells the other of a frame: feature and centre of every node, then the points of the pairs chosen."""
    nodes = model.sizes["nodes"] * (model.encoder.fuse.out_features + 3)
    return 4 * (nodes + model.pairs * model.sizes["points"] * 3)
