"""iControl3D (Li et al. 2024, "iControl3D: An Interactive System for Controllable 3D Scene Generation").

Kept: a scene grows picture by picture. For a new camera the mesh so far is drawn with a depth buffer; an inpainter fills
what is not seen; a depth of the whole picture is estimated and fitted to the known one, by least squares in which pixels
beside the hole weigh most; pixels that were not seen become vertices, and squares of them triangles, joined to the mesh.
What no ray meets is an environment map. A radiance field learns online from rays of all pictures up to the new one.
Stubbed: the diffusion inpainter and the depth estimator are small frozen networks behind `Inpainter` and `Depth`, of which
only forward is asked. Left out: the user's strokes and prompts, splitting of triangles, erosion of masks. Every pixel of a
new picture takes a place in the buffers, used or not: a bound where the paper adds as many as there are unseen pixels.
`views` is the number of pictures after this step; buffers hold all but the last, which the step adds; `grow` keeps it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FAR = 8.0
BESIDE = 10.0
"""Weight of pixels beside the hole, against 1 of other known pixels."""


class Inpainter(nn.Module):
    """Fills a picture (1, 3, h, w) where the mask (1, 1, h, w) is not set; stands in for a diffusion model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(4, width, 3, 2, 1), nn.SiLU(), nn.Conv2d(width, width, 3, 1, 1), nn.SiLU(),
            nn.ConvTranspose2d(width, 3, 2, 2), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, picture: Tensor, known: Tensor) -> Tensor:
        return torch.where(known, picture, self.layers(torch.cat([picture, known.to(picture.dtype)], dim=1)))


class Depth(nn.Module):
    """Depth (1, 1, h, w) of a picture up to scale and shift; stands in for a monocular estimator."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1), nn.SiLU(), nn.Conv2d(width, 1, 3, 1, 1), nn.Softplus())

    def forward(self, picture: Tensor) -> Tensor:
        return 1 + self.layers(picture)


class Layer(nn.Module):
    def __init__(self, dim_in: int, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim_in, dim)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x))


class RadianceField(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(width if i else 63, width) for i in range(depth))
        self.out = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        scaled = (x.unsqueeze(-1) * 2.0 ** torch.arange(10, device=x.device, dtype=x.dtype)).flatten(-2)
        x = torch.cat([x, scaled.sin(), scaled.cos()], dim=-1)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def align(estimate: Tensor, known: Tensor, seen: Tensor) -> Tensor:
    """The estimate scaled and shifted to the known depth, pixels beside what is not seen weighing most; as it is if nothing is."""
    beside = seen & (F.max_pool2d((~seen).to(estimate.dtype), 5, 1, 2) > 0)
    weight = seen.to(estimate.dtype) * (1 + (BESIDE - 1) * beside.to(estimate.dtype))
    total = weight.sum()
    weight = weight / total.clamp(min=1)
    mean, mean_known = (weight * estimate).sum(), (weight * known).sum()
    spread = (weight * (estimate - mean).square()).sum()
    scale = (weight * (estimate - mean) * (known - mean_known)).sum() / spread.clamp(min=1e-6)
    aligned = torch.where(total > 0, scale * (estimate - mean) + mean_known, estimate)
    return torch.where(seen, known, aligned).clamp(0.1, FAR)


class IControl3D(nn.Module):
    vertices: Tensor
    colours: Tensor
    faces: Tensor
    pictures: Tensor
    cameras: Tensor

    def __init__(self, views: int, side: int, rays: int, samples: int, width: int, depth: int, stub: int) -> None:
        super().__init__()
        if views < 2:
            raise ValueError(f"views must be 2 or more, the one that is added and those before it, got {views}")
        self.side, self.rays, self.samples = side, rays, samples
        self.inpainter = Inpainter(stub).requires_grad_(False)
        self.depth = Depth(stub).requires_grad_(False)
        self.field = RadianceField(width, depth)
        self.sky = nn.Parameter(torch.zeros(1, 3, side, 2 * side))
        before, squares = views - 1, (side - 1) ** 2
        self.register_buffer("vertices", torch.randn(before * side * side, 3) + torch.tensor([0.0, 0.0, 4.0]))
        self.register_buffer("colours", torch.rand(before * side * side, 3))
        self.register_buffer("faces", torch.randint(0, before * side * side, (before * 2 * squares, 3)))
        self.register_buffer("pictures", torch.rand(before, 3, side, side))
        self.register_buffer("cameras", 0.2 * torch.randn(before, 3))

    def rays_of(self, pixels: Tensor) -> Tensor:
        """Directions of numbered pixels of a camera that looks along the third axis."""
        x, y = pixels % self.side, pixels // self.side
        at = ((torch.stack([x, y], dim=-1) + 0.5) * 2 / self.side - 1).to(self.cameras.dtype)
        return torch.cat([at, torch.ones_like(at[..., :1])], dim=-1)

    def draw(self, camera: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Picture, depth and which pixels are seen, of the corners and middles of the mesh's triangles: (1, c, h, w)."""
        corners, paint = self.vertices[self.faces], self.colours[self.faces]
        x = torch.cat([self.vertices, corners.mean(dim=1)]) - camera
        paint = torch.cat([self.colours, paint.mean(dim=1)])
        at = (x[:, :2] / x[:, 2:].clamp(min=0.1) + 1) * self.side / 2
        inside = ((at >= 0) & (at < self.side)).all(dim=1) & (x[:, 2] > 0.1)
        at = at.long().clamp(0, self.side - 1)
        pixel = torch.where(inside, at[:, 1] * self.side + at[:, 0], self.side**2)
        depth = x.new_full((self.side**2 + 1,), FAR).scatter_reduce(0, pixel, x[:, 2], "amin")
        front = (x[:, 2] <= depth[pixel] * 1.01).to(x.dtype).unsqueeze(-1)
        total = x.new_zeros(self.side**2 + 1, 4).index_add(0, pixel, torch.cat([paint * front, front], dim=1))[:-1]
        picture = (total[:, :3] / total[:, 3:].clamp(min=1)).t().reshape(1, 3, self.side, self.side)
        return picture, depth[:-1].view(1, 1, self.side, self.side), (total[:, 3] > 0).view(1, 1, self.side, self.side)

    @torch.no_grad()
    def add(self, camera: Tensor) -> dict[str, Tensor]:
        """The scene's buffers with what this camera adds to them."""
        picture, known, seen = self.draw(camera)
        picture = self.inpainter(picture, seen)
        depth = align(self.depth(picture), known, seen)
        pixels = torch.arange(self.side**2, device=camera.device)
        vertices = camera + self.rays_of(pixels) * depth.view(-1, 1)
        grid = pixels.view(self.side, self.side) + len(self.vertices)
        a, b, c, d = (grid[i : i + self.side - 1, j : j + self.side - 1].reshape(-1) for i in (0, 1) for j in (0, 1))
        faces = torch.cat([torch.stack([a, b, c], dim=1), torch.stack([b, d, c], dim=1)])
        z = F.pad(depth, (0, 1, 0, 1), mode="replicate").view(self.side + 1, self.side + 1)
        torn = (F.max_pool2d(z[None, None], 2, 1) + F.max_pool2d(-z[None, None], 2, 1) > 0.5).view(self.side, self.side)
        new = (~(seen.view(self.side, self.side) | torn))[:-1, :-1].reshape(-1).repeat(2).unsqueeze(-1)
        return {
            "vertices": torch.cat([self.vertices, vertices]),
            "colours": torch.cat([self.colours, picture.flatten(2)[0].t()]),
            "faces": torch.cat([self.faces, torch.where(new, faces, faces[:, :1])]),
            "pictures": torch.cat([self.pictures, picture]),
            "cameras": torch.cat([self.cameras, camera.unsqueeze(0)]),
        }

    def grow(self, camera: Tensor) -> None:
        """Keep what a camera adds: the buffers become larger."""
        for name, value in self.add(camera).items():
            setattr(self, name, value)

    def forward(self, camera: Tensor, views: Tensor, pixels: Tensor, depths: Tensor) -> dict[str, Tensor]:
        scene = self.add(camera)
        origins, d = scene["cameras"][views], self.rays_of(pixels)
        x = origins.unsqueeze(1) + depths.unsqueeze(-1) * d.unsqueeze(1)
        found = self.field(x / FAR)
        gaps = torch.diff(depths, dim=1, append=depths[:, -1:] + FAR / self.samples)
        thick = F.softplus(found[..., 3]) * gaps
        weights = torch.exp(thick - thick.cumsum(dim=1)) * -torch.expm1(-thick)
        rgb = (weights.unsqueeze(-1) * found[..., :3].sigmoid()).sum(dim=1)
        x, y, z = F.normalize(d, dim=-1).unbind(-1)
        around = torch.stack([torch.atan2(x, z) / torch.pi, y], dim=-1).view(1, 1, -1, 2)
        sky = F.grid_sample(self.sky, around, padding_mode="border", align_corners=False).view(3, -1).t().sigmoid()
        rgb = rgb + (1 - weights.sum(dim=1, keepdim=True)) * sky
        return {"rgb": rgb, "wanted": scene["pictures"].flatten(2)[views, :, pixels]}


def build(
    *, views: int = 10, side: int = 512, rays: int = 4096, samples: int = 64, width: int = 256, depth: int = 8, stub: int = 32
) -> IControl3D:
    return IControl3D(views, side, rays, samples, width, depth, stub)


def batch(model: IControl3D, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """The new camera and `micro_batch` times `rays` rays of any picture, the new one included."""
    rays = micro_batch * model.rays
    return {
        "camera": 0.2 * torch.randn(3),
        "views": torch.randint(0, len(model.cameras) + 1, (rays,)),
        "pixels": torch.randint(0, model.side**2, (rays,)),
        "depths": (torch.rand(rays, model.samples) * FAR).sort(dim=1).values,
    }


def loss(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Mean square error of the rays' colours."""
    return F.mse_loss(output["rgb"].float(), output["wanted"].float())
