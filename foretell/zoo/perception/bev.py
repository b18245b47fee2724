"""Bird's-eye-view instance prediction (Antunes-García, Bergasa, Montiel-Marín, Barea, Sánchez-García, Llamazares 2024,
"Fast and Efficient Transformer-based Method for Bird's Eye View Instance Prediction").

Kept: the images of all cameras and frames go through one encoder as one batch; every feature pixel is lifted along its
ray with a distribution over depths, placed by the cameras' matrices in the frame of the present, and added into a grid
seen from above (a scatter-add; points outside the grid fall into a cell that is thrown away).  The frames are stacked as
channels and read by a pyramid of efficient-attention blocks, whose keys and values are shortened by a strided convolution
and whose MLP holds a depthwise one; two decoders say segmentation and backward flow of the present and the frames to come.

Left out or stubbed: EfficientNet-B4 is a short stack of its inverted-residual blocks down to an eighth of the image;
the warp of past frames is part of the cameras' matrices, which the batch makes up; instances are not put together from
flow, which happens after the network.  The segmentation loss is over the hardest quarter of the cells.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STRIDE = 8
"""Pixels of the image to one of the features."""
HARDEST = 0.25


class Inverted(nn.Module):
    """Inverted residual with squeeze and excitation."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        wide = 4 * inner
        self.up = nn.Sequential(nn.Conv2d(inner, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU())
        depthwise = nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False)
        self.mix = nn.Sequential(depthwise, nn.BatchNorm2d(wide), nn.SiLU())
        self.gate = nn.Sequential(nn.Conv2d(wide, max(4, inner // 4), 1), nn.SiLU(), nn.Conv2d(max(4, inner // 4), wide, 1))
        self.down = nn.Sequential(nn.Conv2d(wide, outer, 1, bias=False), nn.BatchNorm2d(outer))
        self.same = stride == 1 and inner == outer

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(self.up(x))
        y = self.down(y * self.gate(y.mean(dim=(2, 3), keepdim=True)).sigmoid())
        return x + y if self.same else y


class Encoder(nn.Module):
    """(images, 3, height, width) → depth logits (images, depths, h, w) and features (images, channels, h, w)."""

    def __init__(self, width: int, depth: int, channels: int, depths: int) -> None:
        super().__init__()
        self.depths = depths
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.SiLU())
        self.blocks = nn.ModuleList(
            Inverted(width << n // depth, width << (n + 1) // depth, 2 if n % depth == depth - 1 else 1)
            for n in range(2 * depth)
        )
        self.head = nn.Conv2d(4 * width, depths + channels, 1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        logits, features = self.head(x).split((self.depths, self.head.out_channels - self.depths), dim=1)
        return logits, features


class Splat(nn.Module):
    """Lifts features along their rays and adds them into the cells of a grid seen from above."""

    frustum: Tensor

    def __init__(self, height: int, width: int, depths: int, grid: int, cell: float, nearest: float, farthest: float) -> None:
        super().__init__()
        self.grid, self.cell = grid, cell
        d = torch.linspace(nearest, farthest, depths).view(-1, 1, 1).expand(-1, height, width)
        v = (torch.arange(height, dtype=torch.float32) * STRIDE).view(1, -1, 1).expand(depths, -1, width)
        u = (torch.arange(width, dtype=torch.float32) * STRIDE).view(1, 1, -1).expand(depths, height, -1)
        self.register_buffer("frustum", torch.stack((u * d, v * d, d), dim=-1), persistent=False)

    def cells(self, unproject: Tensor, shift: Tensor) -> Tensor:
        """Cell of every point in its own map, (maps, cameras, depths, h, w); `grid**2` for points outside."""
        points = torch.einsum("mcij,dhwj->mcdhwi", unproject, self.frustum) + shift[:, :, None, None, None]
        place = ((points[..., :2] + self.grid * self.cell / 2) / self.cell).floor()
        inside = ((place >= 0) & (place < self.grid)).all(dim=-1)
        return torch.where(inside, place[..., 0] * self.grid + place[..., 1], self.grid**2).long()

    def forward(self, logits: Tensor, features: Tensor, unproject: Tensor, shift: Tensor) -> Tensor:
        """Features of (maps × cameras) images → (maps, channels, grid, grid)."""
        maps, channels, room = unproject.shape[0], features.shape[1], self.grid**2 + 1
        lifted = logits.softmax(dim=1).unsqueeze(-1) * features.permute(0, 2, 3, 1).unsqueeze(1)
        first = torch.arange(maps, device=logits.device).view(-1, 1, 1, 1, 1) * room
        index = (self.cells(unproject, shift) + first).flatten()
        pooled = lifted.new_zeros(maps * room, channels).index_add(0, index, lifted.flatten(0, 3))
        return pooled.view(maps, room, channels)[:, :-1].transpose(1, 2).reshape(maps, channels, self.grid, self.grid)


class Attention(nn.Module):
    """Queries at every cell, keys and values at every `reduce` squared-th."""

    def __init__(self, dim: int, heads: int, reduce: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim)
        self.shorten = nn.Conv2d(dim, dim, reduce, reduce) if reduce > 1 else nn.Identity()
        self.norm = nn.LayerNorm(dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, side: int) -> Tensor:
        b, _, c = x.shape
        short = self.norm(self.shorten(x.transpose(1, 2).reshape(b, c, side, side)).flatten(2).transpose(1, 2))
        q, k, v = (y.view(b, -1, self.heads, c // self.heads).transpose(1, 2) for y in (self.q(x), *self.kv(short).split(c, -1)))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, reduce: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, reduce)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.mix = nn.Conv2d(4 * dim, 4 * dim, 3, padding=1, groups=4 * dim)

    def forward(self, x: Tensor, side: int) -> Tensor:
        x = x + self.attention(self.norm1(x), side)
        y = self.up(self.norm2(x)).transpose(1, 2).unflatten(2, (side, side))
        return x + self.down(F.gelu(self.mix(y)).flatten(2).transpose(1, 2))


class Stage(nn.Module):
    """Halves the side (the first quarters it), then attends."""

    def __init__(self, inner: int, dim: int, depth: int, heads: int, reduce: int, stride: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(inner, dim, 2 * stride - 1, stride, stride - 1)
        self.blocks = nn.ModuleList(Block(dim, heads, reduce) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        side = x.shape[-1]
        y = x.flatten(2).transpose(1, 2)
        for block in self.blocks:
            y = block(y, side)
        return self.norm(y).transpose(1, 2).unflatten(2, (side, side))


class Decoder(nn.Module):
    """All levels of the pyramid at the side of the first, put together; then up to the grid."""

    def __init__(self, dims: list[int], dim: int, out: int, grid: int) -> None:
        super().__init__()
        self.grid = grid
        self.inner = nn.ModuleList(nn.Conv2d(width, dim, 1) for width in dims)
        self.fuse = nn.Sequential(nn.Conv2d(len(dims) * dim, dim, 1, bias=False), nn.BatchNorm2d(dim), nn.ReLU())
        self.head = nn.Conv2d(dim, out, 1)

    def forward(self, levels: list[Tensor]) -> Tensor:
        size = levels[0].shape[-2:]
        parts = [F.interpolate(inner(x), size=size, mode="bilinear") for inner, x in zip(self.inner, levels, strict=True)]
        return F.interpolate(self.head(self.fuse(torch.cat(parts, dim=1))), size=(self.grid, self.grid), mode="bilinear")


class BEV(nn.Module):
    def __init__(
        self, encoder: Encoder, splat: Splat, dim: int, levels: int, depth: int, frames: int, future: int, cameras: int
    ) -> None:
        super().__init__()
        self.cameras, self.frames, self.future, self.grid = cameras, frames, future, splat.grid
        self.encoder, self.splat = encoder, splat
        channels = frames * (encoder.head.out_channels - encoder.depths)
        dims = [dim << level for level in range(levels)]
        self.stages = nn.ModuleList(
            Stage(before, after, depth, 1 << level, max(1, 1 << (levels - 1 - level)), 4 if level == 0 else 2)
            for level, (before, after) in enumerate(zip([channels, *dims], dims, strict=False))
        )
        self.segmentation = Decoder(dims, 2 * dim, 2 * future, splat.grid)
        self.flow = Decoder(dims, 2 * dim, 2 * future, splat.grid)
        self.log_variance = nn.Parameter(torch.zeros(2))

    def forward(self, images: Tensor, unproject: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(batch, frames, cameras, ...) of images, of 3x3 matrices and of shifts → (batch, future, 2, grid, grid) twice."""
        logits, features = self.encoder(images.flatten(0, 2))
        x = self.splat(logits, features, unproject.flatten(0, 1), shift.flatten(0, 1))
        x = x.unflatten(0, (-1, self.frames)).flatten(1, 2)
        pyramid = []
        for stage in self.stages:
            x = stage(x)
            pyramid.append(x)
        out = (decoder(pyramid).unflatten(1, (self.future, 2)) for decoder in (self.segmentation, self.flow))
        return *out, self.log_variance  # type: ignore[return-value]


def build(
    *, cameras: int = 6, frames: int = 3, future: int = 5, image: int = 224, width: int = 480, encoder_width: int = 40,
    encoder_depth: int = 4, channels: int = 64, depths: int = 48, grid: int = 200, cell: float = 0.5, dim: int = 64,
    levels: int = 4, depth: int = 2,
) -> BEV:  # fmt: skip
    if image % STRIDE or width % STRIDE:
        raise ValueError(f"an image of {image} x {width} is not divisible by {STRIDE}")
    encoder = Encoder(encoder_width, encoder_depth, channels, depths)
    splat = Splat(image // STRIDE, width // STRIDE, depths, grid, cell, 2.0, 2.0 + depths)
    return BEV(encoder, splat, dim, levels, depth, frames, future, cameras)


def batch(model: BEV, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """Cameras in a ring, each looking outwards; the car drives one metre a frame."""
    height, width = (STRIDE * side for side in model.splat.frustum.shape[1:3])
    turn = torch.arange(model.cameras, dtype=torch.float32) * (2 * math.pi / model.cameras)
    ahead = torch.stack((turn.cos(), turn.sin(), torch.zeros_like(turn)), dim=-1)
    right = torch.stack((turn.sin(), -turn.cos(), torch.zeros_like(turn)), dim=-1)
    down = torch.tensor([0.0, 0.0, -1.0]).expand(model.cameras, 3)
    unproject = torch.stack((right / width, down / height, ahead - 0.5 * right - 0.5 * down), dim=-1)
    drive = torch.arange(model.frames, dtype=torch.float32) - (model.frames - 1)
    shift = 0.5 * ahead + drive.view(-1, 1, 1) * torch.tensor([1.0, 0.0, 0.0])
    cells = (micro_batch, model.future, model.grid, model.grid)
    return {
        "images": torch.randn(micro_batch, model.frames, model.cameras, 3, height, width),
        "unproject": unproject.expand(micro_batch, model.frames, -1, -1, -1).contiguous(),
        "shift": shift.expand(micro_batch, -1, -1, -1).contiguous(),
        "instances": torch.randint(2, cells),
        "motion": torch.randn(micro_batch, model.future, 2, model.grid, model.grid),
    }


def loss(output: tuple[Tensor, Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the hardest cells and smooth L1 of flow where there are instances, weighted by learned variances."""
    segmentation, flow, log_variance = output
    each = F.cross_entropy(segmentation.float().flatten(0, 1), batch["instances"].flatten(0, 1), reduction="none").flatten(1)
    hard = each.topk(max(1, int(HARDEST * each.shape[1])), dim=1).values.mean()
    there = batch["instances"].unsqueeze(2).to(flow.dtype)
    off = (F.smooth_l1_loss(flow, batch["motion"], reduction="none") * there).sum() / there.sum().clamp(min=1)
    return (torch.stack((hard, off)) * (-log_variance).exp() + log_variance).sum()
