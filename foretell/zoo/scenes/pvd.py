"""PVD (Fang et al. 2023, "One is All: Bridging the Gap Between Neural Radiance Fields Architectures with Progressive
Volume Distillation") and PVD-AL (Fang et al. 2023, "PVD-AL: Progressive Volume Distillation with Active Learning").

Kept: four radiance fields cut in two halves, one from a point to features, one from features and direction to density
and colour: an MLP, a dense grid of spherical harmonics (which has no features), planes and lines of low rank, and hashed
tables at many resolutions (`KINDS`). A frozen `teacher` of one kind teaches a `student` of another in stages: `features`
alone (only the first half of the student is trained), then densities and colours at points (`volume`), then rendered rays
(`render`). With the dense grid on either side the first stage has nothing to compare and is the second. Densities are
limited before they are exponentiated, on both sides, which keeps the stages stable. `active` adds the three levels of PVD-AL: of all poses,
then rays, then points on them, those are taken where student and teacher disagree most; disagreement by pose is a buffer.
Phase `scratch` trains the student on pictures alone, as a teacher comes to be.
Left out: pruning of empty space, the regularisers of each field, growing resolutions. Poses look at the unit box.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PHASES = ("features", "volume", "render", "scratch")
KINDS = ("mlp", "dense", "lowrank", "hash")
LOG_DENSITY = (-2.0, 7.0)
PRIMES = (1, 2_654_435_761, 805_459_861)


def waves(x: Tensor, octaves: int) -> Tensor:
    """The position and its sines and cosines at so many octaves."""
    scaled = (x.unsqueeze(-1) * 2.0 ** torch.arange(octaves, device=x.device, dtype=x.dtype)).flatten(-2)
    return torch.cat([x, scaled.sin(), scaled.cos()], dim=-1)


def harmonics(d: Tensor) -> Tensor:
    """Real spherical harmonics up to the second degree, without their constants: (..., 9)."""
    x, y, z = d.unbind(-1)
    return torch.stack([torch.ones_like(x), x, y, z, x * y, y * z, z * x, x * x - y * y, 3 * z * z - 1], dim=-1)


class Layer(nn.Module):
    def __init__(self, dim_in: int, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim_in, dim)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x))


class MLPField(nn.Module):
    def __init__(self, features: int, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(width if i else 3 + 6 * 10, width) for i in range(depth))
        self.out = nn.Linear(width, features)

    def forward(self, x: Tensor) -> Tensor:
        x = waves(x, 10)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class LowRankField(nn.Module):
    """Sums of planes times lines, one pair for each axis."""

    def __init__(self, features: int, side: int, rank: int) -> None:
        super().__init__()
        self.planes = nn.Parameter(0.1 * torch.randn(3, rank, side, side))
        self.lines = nn.Parameter(0.1 * torch.randn(3, rank, side, 1))
        self.out = nn.Linear(3 * rank, features)

    def forward(self, x: Tensor) -> Tensor:
        on_planes = torch.stack([x[:, [0, 1]], x[:, [0, 2]], x[:, [1, 2]]]).unsqueeze(2)
        along = torch.stack([x[:, 2], x[:, 1], x[:, 0]])
        on_lines = torch.stack([torch.zeros_like(along), along], dim=-1).unsqueeze(2)
        planes = F.grid_sample(self.planes, on_planes, align_corners=True)
        lines = F.grid_sample(self.lines, on_lines, align_corners=True)
        return self.out((planes * lines).squeeze(-1).flatten(0, 1).t())


class HashField(nn.Module):
    """Tables at growing resolutions, looked up at the eight corners of a point's cell through a hash."""

    def __init__(self, features: int, levels: int, entries: int, finest: int) -> None:
        super().__init__()
        self.entries = entries
        growth = (finest / 16) ** (1 / max(1, levels - 1))
        self.sides = [round(16 * growth**level) for level in range(levels)]
        self.table = nn.Parameter(0.1 * torch.randn(levels * entries, 2))
        self.out = nn.Sequential(nn.Linear(2 * levels, 64), nn.ReLU(), nn.Linear(64, features))

    def forward(self, x: Tensor) -> Tensor:
        sides = torch.tensor(self.sides, dtype=x.dtype, device=x.device)[:, None, None]
        at = (0.5 + 0.5 * x) * sides
        cell = at.detach().floor()
        part = (at - cell).unsqueeze(2)
        bits = torch.arange(8, device=x.device).unsqueeze(-1) >> torch.arange(3, device=x.device) & 1
        corners = cell.long().unsqueeze(2) + bits
        a, b, c = (corners[..., i] * PRIMES[i] for i in range(3))
        first = torch.arange(len(self.sides), device=x.device)[:, None, None] * self.entries
        found = F.embedding((a ^ b ^ c) % self.entries + first, self.table)
        weight = torch.where(bits.bool(), part, 1 - part).prod(dim=-1, keepdim=True)
        return self.out((weight * found).sum(dim=2).transpose(0, 1).flatten(1))


class Field(nn.Module):
    """Log density and colour of points seen from a direction, and the features between the halves (None in a dense grid)."""

    def __init__(self, kind: str, features: int, sizes: dict[str, int]) -> None:
        super().__init__()
        self.kind = kind
        if kind == "dense":
            side = sizes["side"]
            self.grid = nn.Parameter(0.1 * torch.randn(1, 28, side, side, side))
            return
        if kind == "mlp":
            self.first: nn.Module = MLPField(features, sizes["width"], sizes["depth"])
        elif kind == "lowrank":
            self.first = LowRankField(features, sizes["side"], sizes["rank"])
        elif kind == "hash":
            self.first = HashField(features, sizes["levels"], sizes["entries"], sizes["finest"])
        else:
            raise ValueError(f"field must be one of {', '.join(KINDS)}, got {kind!r}")
        self.density = nn.Linear(features, 1)
        self.colour = nn.Sequential(nn.Linear(features + 9, 64), nn.ReLU(), nn.Linear(64, 3))

    def forward(self, x: Tensor, d: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        if self.kind == "dense":
            found = F.grid_sample(self.grid, x.view(1, -1, 1, 1, 3), align_corners=True).view(28, -1).t()
            colour = (found[:, 1:].unflatten(1, (3, 9)) * harmonics(d).unsqueeze(1)).sum(-1)
            return None, found[:, 0].clamp(*LOG_DENSITY), colour.sigmoid()
        features = self.first(x)
        colour = self.colour(torch.cat([features, harmonics(d)], dim=-1)).sigmoid()
        return features, self.density(features).squeeze(-1).clamp(*LOG_DENSITY), colour


def render(log_density: Tensor, colour: Tensor, step: float) -> Tensor:
    """Colour of rays from densities (rays, samples) and colours (rays, samples, 3) along them."""
    depth = log_density.exp() * step
    through = torch.exp(depth - depth.cumsum(dim=1))
    return ((through * -torch.expm1(-depth)).unsqueeze(-1) * colour).sum(dim=1)


class PVD(nn.Module):
    def __init__(self, teacher: str, student: str, phase: str, active: bool, counts: dict[str, int], sizes: dict[str, int]) -> None:
        super().__init__()
        if phase not in PHASES:
            raise ValueError(f"phase must be one of {', '.join(PHASES)}, got {phase!r}")
        self.counts, self.active = counts, active
        self.phase = "volume" if phase == "features" and "dense" in (teacher, student) else phase
        self.teacher = Field(teacher, sizes["features"], sizes).requires_grad_(False)
        self.student = Field(student, sizes["features"], sizes)
        if self.phase == "features":
            self.student.density.requires_grad_(False)
            self.student.colour.requires_grad_(False)
        self.register_buffer("gap", torch.ones(counts["poses"]))

    def points(self, origins: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Points on rays from 1 to 3 away from their origin, and the direction of each, flat."""
        depths = torch.linspace(1.0, 3.0, self.counts["samples"], device=origins.device, dtype=origins.dtype)
        x = origins.unsqueeze(1) + depths[:, None] * directions.unsqueeze(1)
        return x.clamp(-1, 1).flatten(0, 1), directions.unsqueeze(1).expand_as(x).reshape(-1, 3)

    def colours(self, field: Field, origins: Tensor, directions: Tensor) -> Tensor:
        _, density, colour = field(*self.points(origins, directions))
        rays = origins.shape[0]
        return render(density.view(rays, -1), colour.view(rays, -1, 3), 2 / self.counts["samples"])

    @torch.no_grad()
    def hardest_rays(self, origins: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Rays of the poses and then those rays on which the two disagree most; the poses' disagreement is noted."""
        poses, rays = self.gap.topk(min(self.counts["poses"], 2)).indices, origins.shape[1]
        origins, directions = origins[poses].flatten(0, 1), directions[poses].flatten(0, 1)
        apart = (self.colours(self.student, origins, directions) - self.colours(self.teacher, origins, directions)).abs().sum(-1)
        self.gap.mul_(1.01).index_copy_(0, poses, apart.view(-1, rays).mean(dim=1).to(self.gap.dtype))
        best = apart.topk(rays).indices
        return origins[best], directions[best]

    def forward(self, origins: Tensor, directions: Tensor) -> dict[str, Tensor]:
        """Rays of each pose, (poses, rays, 3): differences of student and teacher, or the student's colours."""
        if self.active and self.phase != "scratch":
            origins, directions = self.hardest_rays(origins, directions)
        else:
            origins, directions = origins.flatten(0, 1), directions.flatten(0, 1)
        if self.phase == "scratch":
            return {"rgb": self.colours(self.student, origins, directions)}
        if self.phase == "render":
            with torch.no_grad():
                wanted = self.colours(self.teacher, origins, directions)
            return {"gap": (self.colours(self.student, origins, directions) - wanted).square().mean(dim=-1)}
        x, d = self.points(origins, directions)
        if self.phase == "features":
            with torch.no_grad():
                known = self.teacher.first(x)
            gap = (self.student.first(x) - known).square().mean(dim=-1)
        else:
            with torch.no_grad():
                _, density, colour = self.teacher(x, d)
            _, own_density, own_colour = self.student(x, d)
            gap = 0.01 * (own_density - density).square() + (own_colour - colour).square().mean(dim=-1)
        return {"gap": gap.topk(gap.numel() // 2).values if self.active else gap}


def build(
    *,
    teacher: str = "hash",
    student: str = "mlp",
    phase: str = "features",
    active: bool = False,
    poses: int = 8,
    rays: int = 512,
    samples: int = 128,
    features: int = 16,
    width: int = 256,
    depth: int = 8,
    side: int = 128,
    rank: int = 48,
    levels: int = 16,
    entries: int = 2**19,
    finest: int = 2048,
) -> PVD:
    counts = {"poses": poses, "rays": rays, "samples": samples}
    sizes = {
        "features": features, "width": width, "depth": depth, "side": side, "rank": rank, "levels": levels,
        "entries": entries, "finest": finest,
    }  # fmt: skip
    return PVD(teacher, student, phase, active, counts, sizes)


def batch(model: PVD, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """`micro_batch` times the rays of every pose, from the sphere of radius 2 towards the middle, and their colours."""
    shape = (model.counts["poses"], micro_batch * model.counts["rays"], 3)
    origins = 2 * F.normalize(torch.randn(shape), dim=-1)
    directions = F.normalize(0.3 * torch.randn(shape) - origins, dim=-1)
    return {"origins": origins, "directions": directions, "targets": torch.rand(shape)}


def loss(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Mean square error of the rays' colours, or the gap between student and teacher."""
    if "rgb" in output:
        return F.mse_loss(output["rgb"].float(), batch["targets"].flatten(0, 1))
    return output["gap"].float().mean()
