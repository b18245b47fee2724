"""DNMP (Lu et al. 2023, "Urban Radiance Field Representation with Deformable Neural Mesh Primitives").

Kept: the scene is a set of small meshes, one in each occupied voxel. A decoder, trained before on meshes and frozen here,
turns a code of each primitive into its vertices; every vertex has a feature. A small rasteriser finds the first few
triangles that each pixel's ray meets and gives integers, which have no gradient; the place within the triangle is then
computed again with gradients, features are interpolated there, and an MLP that knows the direction says colour and
opacity, blended front to back. Codes, features and MLP are learned. `rays` pixels of one picture are a sample.
Left out: several voxel sizes, the sky, the normals' regulariser, training of the decoder. Rays try the faces of the `near`
primitives they pass first, a bound on what depends on the data. The template is an octahedron subdivided `level` times;
the paper's own vertex count is not known here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Corner = tuple[float, float, float]


def template(level: int) -> tuple[list[Corner], list[tuple[int, int, int]]]:
    """Vertices on the unit sphere and triangles between them."""
    points: list[Corner] = [(1, 0, 0), (-1, 0, 0), (0, 1, 0), (0, -1, 0), (0, 0, 1), (0, 0, -1)]
    faces = [(0, 2, 4), (2, 1, 4), (1, 3, 4), (3, 0, 4), (2, 0, 5), (1, 2, 5), (3, 1, 5), (0, 3, 5)]
    for _ in range(level):
        middles: dict[tuple[int, int], int] = {}
        smaller: list[tuple[int, int, int]] = []
        for a, b, c in faces:
            ab, bc, ca = (_middle(points, middles, i, j) for i, j in ((a, b), (b, c), (c, a)))
            smaller += [(a, ab, ca), (ab, b, bc), (ca, bc, c), (ab, bc, ca)]
        faces = smaller
    return points, faces


def _middle(points: list[Corner], known: dict[tuple[int, int], int], i: int, j: int) -> int:
    key = (min(i, j), max(i, j))
    if key not in known:
        x, y, z = (a + b for a, b in zip(points[i], points[j], strict=True))
        length = (x * x + y * y + z * z) ** 0.5
        points.append((x / length, y / length, z / length))
        known[key] = len(points) - 1
    return known[key]


def meet(origins: Tensor, directions: Tensor, corners: Tensor) -> tuple[Tensor, Tensor]:
    """Where lines meet the planes of triangles (..., 3 corners, 3): depth, and weights of the three corners."""
    a, ab, ac = corners[..., 0, :], corners[..., 1, :] - corners[..., 0, :], corners[..., 2, :] - corners[..., 0, :]
    normal = torch.linalg.cross(ab, ac)
    facing = -(normal * directions).sum(-1)
    facing = torch.where(facing.abs() < 1e-9, 1e-9, facing)
    offset = origins - a
    moment = torch.linalg.cross(offset, directions)
    depth = (normal * offset).sum(-1) / facing
    v, w = (ac * moment).sum(-1) / facing, -(ab * moment).sum(-1) / facing
    return depth, torch.stack([1 - v - w, v, w], dim=-1)


class Layer(nn.Module):
    def __init__(self, dim_in: int, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim_in, dim)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x))


class DNMP(nn.Module):
    faces: Tensor
    sphere: Tensor
    centres: Tensor

    def __init__(
        self, primitives: int, level: int, latent: int, features: int, width: int, depth: int, rays: int, near: int, layers: int
    ) -> None:
        super().__init__()
        self.rays, self.near, self.layers = rays, near, layers
        points, faces = template(level)
        self.radius = primitives ** (-1 / 3)
        self.register_buffer("sphere", torch.tensor(points, dtype=torch.float32))
        self.register_buffer("faces", torch.tensor(faces))
        self.register_buffer("centres", torch.rand(primitives, 3) * 2 - 1)
        self.codes = nn.Parameter(torch.randn(primitives, latent))
        self.features = nn.Parameter(0.1 * torch.randn(primitives * len(points), features))
        self.decoder = nn.Sequential(nn.Linear(latent, 128), nn.ReLU(), nn.Linear(128, 3 * len(points))).requires_grad_(False)
        self.blocks = nn.ModuleList(Layer(width if i else features + 9, width) for i in range(depth))
        self.out = nn.Linear(width, 4)

    def vertices(self) -> Tensor:
        """All vertices in the world, (primitives · vertices, 3)."""
        shift = 0.3 * self.decoder(self.codes).unflatten(1, (-1, 3)).tanh()
        return (self.centres.unsqueeze(1) + self.radius * (self.sphere + shift)).flatten(0, 1)

    @torch.no_grad()
    def rasterise(self, vertices: Tensor, origins: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Vertex numbers of the triangles that rays meet first, nearest first, (rays, layers, 3), and which there are."""
        toward = self.centres - origins.unsqueeze(1)
        along = (toward * directions.unsqueeze(1)).sum(-1)
        off = toward.square().sum(-1) - along.square()
        passes = (off < (1.3 * self.radius) ** 2) & (along > 0)
        first = along.masked_fill(~passes, torch.inf).topk(self.near, dim=1, largest=False)
        numbers = (first.indices[:, :, None, None] * len(self.sphere) + self.faces).flatten(1, 2)
        depth, weights = meet(origins.unsqueeze(1), directions.unsqueeze(1), vertices[numbers])
        passed = first.values.isfinite().repeat_interleave(len(self.faces), dim=1)
        hit = (weights.amin(-1) >= 0) & (depth > 0) & passed
        nearest = depth.masked_fill(~hit, torch.inf).topk(self.layers, dim=1, largest=False)
        return numbers.gather(1, nearest.indices.unsqueeze(-1).expand(-1, -1, 3)), nearest.values.isfinite()

    def forward(self, origins: Tensor, directions: Tensor) -> Tensor:
        vertices = self.vertices()
        numbers, there = self.rasterise(vertices, origins, directions)
        corners = vertices[numbers]
        depth, weights = meet(origins.unsqueeze(1), directions.unsqueeze(1), corners)
        x = (weights.unsqueeze(-1) * self.features[numbers]).sum(dim=2)
        seen = directions.unsqueeze(1).expand(-1, self.layers, -1)
        normal = F.normalize(torch.linalg.cross(corners[..., 1, :] - corners[..., 0, :], corners[..., 2, :] - corners[..., 0, :]), dim=-1)
        away = (normal * seen).sum(-1, keepdim=True)
        x = torch.cat([x, seen, normal, away, depth.unsqueeze(-1), there.unsqueeze(-1).to(x.dtype)], dim=-1)
        x = torch.where(there.unsqueeze(-1), x, torch.zeros_like(x))
        for block in self.blocks:
            x = block(x)
        x = self.out(x)
        thick = F.softplus(x[..., 3]) * there
        through = torch.exp(thick - thick.cumsum(dim=1)) * -torch.expm1(-thick)
        return (through.unsqueeze(-1) * x[..., :3].sigmoid()).sum(dim=1)


def build(
    *,
    primitives: int = 20_000,
    level: int = 2,
    latent: int = 8,
    features: int = 8,
    width: int = 64,
    depth: int = 4,
    rays: int = 1024,
    near: int = 8,
    layers: int = 4,
) -> DNMP:
    return DNMP(primitives, level, latent, features, width, depth, rays, min(near, primitives), layers)


def batch(model: DNMP, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """`micro_batch` times `rays` pixels of a camera that looks at the box of primitives."""
    rays = micro_batch * model.rays
    ahead = torch.tensor([0.0, 0.0, 1.0])
    return {
        "origins": torch.tensor([0.0, 0.0, -3.0]).repeat(rays, 1),
        "directions": F.normalize(ahead + 0.15 * torch.randn(rays, 3), dim=-1),
        "targets": torch.rand(rays, 3),
    }


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean square error of the pixels' colours."""
    return F.mse_loss(output.float(), batch["targets"])
