"""ProNeRF (Bello et al. 2024, "ProNeRF: Learning Efficient Projection-Aware Ray Sampling for Fine-Grained Implicit Neural
Radiance Fields").

Kept: a small network sees a ray as Plücker points and says at which few depths to look; these points are projected into
the nearest reference pictures, and what the pictures show there, with the ray, goes to a second network that refines the
depths and says how each sample's density is shifted and how the pictures blend; a shading MLP then sees only these few
samples. Two phases train it in turn: `exploration` trains the shading network alone, on depths spread over the whole ray
among those of the sampler, which is not trained and runs without gradients; `exploitation` trains both on the sampler's
few depths, through the projection, with an auxiliary loss on the blend of reference colours.
Left out: choosing the reference views, tone mapping, the schedule that takes the phases in turn. All cameras are pinholes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PHASES = ("exploration", "exploitation")
NEAR, FAR = 1.0, 5.0


def waves(x: Tensor, octaves: int) -> Tensor:
    scaled = (x.unsqueeze(-1) * 2.0 ** torch.arange(octaves, device=x.device, dtype=x.dtype)).flatten(-2)
    return torch.cat([x, scaled.sin(), scaled.cos()], dim=-1)


def project(x: Tensor, rotations: Tensor, places: Tensor) -> Tensor:
    """Points (rays, samples, 3) as seen by each camera, in the range of grid_sample: (views, rays, samples, 2)."""
    seen = torch.einsum("vij,vrsj->vrsi", rotations, x.unsqueeze(0) - places[:, None, None])
    return seen[..., :2] / seen[..., 2:].clamp(min=0.1)


class Layer(nn.Module):
    def __init__(self, dim_in: int, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim_in, dim)

    def forward(self, x: Tensor) -> Tensor:
        return F.elu(self.linear(x))


class MLP(nn.Module):
    def __init__(self, dim_in: int, width: int, depth: int, dim_out: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(width if i else dim_in, width) for i in range(depth))
        self.out = nn.Linear(width, dim_out)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Sampler(nn.Module):
    """Depths of a ray, from the ray and from what reference pictures show on it."""

    def __init__(self, samples: int, views: int, width: int, depth: int) -> None:
        super().__init__()
        self.samples, self.views = samples, views
        self.coarse = MLP(6 * samples, width, depth, samples)
        self.refine = MLP(6 * samples + 3 * views * samples, width, depth, 2 * samples + samples * views)

    def rays(self, origins: Tensor, directions: Tensor) -> Tensor:
        """Plücker coordinates of so many points of each ray, all alike but for scale: (rays, 6 · samples)."""
        depths = torch.linspace(NEAR, FAR, self.samples, device=origins.device, dtype=origins.dtype)
        x = origins.unsqueeze(1) + depths[:, None] * directions.unsqueeze(1)
        d = directions.unsqueeze(1).expand_as(x)
        return torch.cat([x, torch.linalg.cross(x, d)], dim=-1).flatten(1)

    def forward(
        self, origins: Tensor, directions: Tensor, rotations: Tensor, places: Tensor, pictures: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Depths in order and shifts of density (rays, samples), and the colour that the references give (rays, 3)."""
        rays = self.rays(origins, directions)
        coarse = NEAR + (FAR - NEAR) * self.coarse(rays).sigmoid().sort(dim=1).values
        colours = self.look(origins, directions, coarse, rotations, places, pictures)
        refined, shift, blend = self.refine(torch.cat([rays, colours.flatten(1)], dim=1)).split(
            [self.samples, self.samples, self.samples * self.views], dim=1
        )
        depths = (coarse + (FAR - NEAR) / self.samples * refined.tanh()).clamp(NEAR, FAR).sort(dim=1).values
        weights = blend.softmax(dim=1).unsqueeze(-1)
        return depths, shift, (weights * colours.flatten(1, 2)).sum(dim=1)

    def look(
        self, origins: Tensor, directions: Tensor, depths: Tensor, rotations: Tensor, places: Tensor, pictures: Tensor
    ) -> Tensor:
        """What each picture shows at each point of the rays: (rays, samples, views, 3)."""
        x = origins.unsqueeze(1) + depths.unsqueeze(-1) * directions.unsqueeze(1)
        seen = F.grid_sample(pictures, project(x, rotations, places), padding_mode="border", align_corners=False)
        return seen.permute(2, 3, 0, 1)


class ProNeRF(nn.Module):
    def __init__(self, phase: str, rays: int, samples: int, explored: int, views: int, width: int, depth: int, sampler_depth: int) -> None:
        super().__init__()
        if phase not in PHASES:
            raise ValueError(f"phase must be one of {', '.join(PHASES)}, got {phase!r}")
        self.phase, self.rays, self.explored, self.views = phase, rays, explored, views
        self.sampler = Sampler(samples, views, width, sampler_depth).requires_grad_(phase == "exploitation")
        self.shading = MLP(63 + 27, width, depth, 4)

    def forward(
        self, origins: Tensor, directions: Tensor, rotations: Tensor, places: Tensor, pictures: Tensor, noise: Tensor
    ) -> dict[str, Tensor]:
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.phase == "exploitation"):
            depths, shift, blended = self.sampler(origins, directions, rotations, places, pictures)
        if self.phase == "exploration":
            depths, shift = self.explore(depths, noise), torch.zeros(1, device=depths.device, dtype=depths.dtype)
        x = origins.unsqueeze(1) + depths.unsqueeze(-1) * directions.unsqueeze(1)
        d = directions.unsqueeze(1).expand_as(x)
        found = self.shading(torch.cat([waves(x, 10), waves(d, 4)], dim=-1))
        gaps = torch.diff(depths, dim=1, append=torch.full_like(depths[:, :1], FAR + 0.1))
        depth = F.softplus(found[..., 3] + shift) * gaps
        weights = torch.exp(depth - depth.cumsum(dim=1)) * -torch.expm1(-depth)
        rgb = (weights.unsqueeze(-1) * found[..., :3].sigmoid()).sum(dim=1)
        return {"rgb": rgb, "blended": blended} if self.phase == "exploitation" else {"rgb": rgb}

    def explore(self, depths: Tensor, noise: Tensor) -> Tensor:
        """The sampler's depths among random ones, one in each equal part of the ray."""
        parts = torch.linspace(0, 1, self.explored + 1, device=depths.device)[:-1]
        spread = NEAR + (FAR - NEAR) * (parts + noise / self.explored)
        return torch.cat([depths, spread.to(depths.dtype)], dim=1).sort(dim=1).values


def build(
    *,
    phase: str = "exploration",
    rays: int = 4096,
    samples: int = 8,
    explored: int = 64,
    views: int = 4,
    width: int = 256,
    depth: int = 8,
    sampler_depth: int = 6,
) -> ProNeRF:
    return ProNeRF(phase, rays, samples, explored, views, width, depth, sampler_depth)


def batch(model: ProNeRF, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """Rays from the origin of the world forward, and reference pictures of cameras beside it that look the same way."""
    rays, side = micro_batch * model.rays, image or 504
    ahead = torch.tensor([0.0, 0.0, 1.0])
    return {
        "origins": 0.1 * torch.randn(rays, 3),
        "directions": F.normalize(ahead + 0.3 * torch.randn(rays, 3), dim=-1),
        "rotations": torch.eye(3).repeat(model.views, 1, 1),
        "places": 0.3 * torch.randn(model.views, 3),
        "pictures": torch.rand(model.views, 3, side, side),
        "noise": torch.rand(rays, model.explored),
        "targets": torch.rand(rays, 3),
    }


def loss(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Mean square error of the rays' colours and, in exploitation, of the blend of reference colours."""
    total = F.mse_loss(output["rgb"].float(), batch["targets"])
    return total + F.mse_loss(output["blended"].float(), batch["targets"]) if "blended" in output else total
