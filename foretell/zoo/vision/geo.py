"""TorchGeo (Stewart et al., 2022, "TorchGeo: Deep Learning with Geospatial Data").

A residual network on all 13 bands of Sentinel-2, fed by a sampler of windows over rasters that do not lie alike. Bands come at
10, 20 and 60 metres, the land cover map at 30 metres on a grid of its own, turned and shifted, as another projection would be.
A window is a place on the ground: it is drawn where all rasters have data (their intersection), and each raster is warped to
the window's pixels as it is read, bilinearly for bands, by the nearest pixel for classes. What is learned is the cover that
fills most of the window.

Kept: the join of rasters by place, random windows, warping while reading, the wider first convolution. Left out: files,
indices over many scenes, true map projections (an affine map stands for them), pretrained weights. The sampler is plain torch
code and runs while the batch is made, not within the step. The defaults are ResNet-50 on windows of 224 pixels.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.zoo.vision import resnet

METRES = 10.0
"""Side of a pixel of a window, on the ground."""
BANDS = ((4, 10.0), (6, 20.0), (3, 60.0))
"""How many bands at which resolution, in metres."""
COVER_METRES, COVER_TURN = 30.0, 0.1
SPARE = 8
"""The rasters are so many windows wide."""


class Raster(NamedTuple):
    """Pixels (bands, rows, columns) and where they lie: the first corner, the side of a pixel, and how the grid is turned."""

    pixels: Tensor
    west: float
    north: float
    metres: float
    turn: float = 0.0

    def read(self, west: Tensor, north: Tensor, side: int, metres: float, mode: str = "bilinear") -> Tensor:
        """Windows with these first corners, warped to side x side pixels of so many metres: (n, bands, side, side)."""
        steps = (torch.arange(side) + 0.5) * metres
        east = (west[:, None] + steps - self.west)[:, None, :].expand(-1, side, -1)
        south = (self.north - north[:, None] + steps)[:, :, None].expand(-1, -1, side)
        cos, sin = math.cos(self.turn), math.sin(self.turn)
        column, row = (east * cos + south * sin) / self.metres, (south * cos - east * sin) / self.metres
        bands, rows, columns = self.pixels.shape
        grid = torch.stack([2.0 * column / columns - 1.0, 2.0 * row / rows - 1.0], dim=-1)
        found = F.grid_sample(
            self.pixels[None], grid.view(1, -1, side, 2), mode=mode, padding_mode="border", align_corners=False
        )
        return found.view(bands, -1, side, side).transpose(0, 1)

    def inside(self) -> tuple[float, float, float, float]:
        """West, south, east, north of an upright rectangle that the raster covers, away from its edges."""
        wide, high = (count * self.metres for count in (self.pixels.shape[2], self.pixels.shape[1]))
        cut = math.sin(abs(self.turn)) * max(wide, high) + 1.5 * self.metres
        return self.west + cut, self.north - high + cut, self.west + wide - cut, self.north - cut


def windows(rasters: list[Raster], count: int, extent: float) -> tuple[Tensor, Tensor]:
    """First corners of random windows of so many metres, where all rasters have data."""
    west, south, east, north = (
        choose(bounds) for choose, bounds in zip((max, max, min, min), zip(*(r.inside() for r in rasters), strict=True), strict=True)
    )
    if east - west < extent or north - south < extent:
        raise ValueError(f"the rasters have no {extent} metres in common")
    x, y = torch.rand(2, count).unbind(0)
    return west + x * (east - west - extent), south + extent + y * (north - south - extent)


def scene(side: int, classes: int) -> tuple[list[Raster], Raster]:
    """Synthetic rasters a few windows wide: bands by resolution, and the land cover on a grid of its own."""
    extent = SPARE * side * METRES
    bands = [
        Raster(torch.randn(count, *[max(1, round(extent / metres))] * 2), 300.0 * i, -170.0 * i, metres)
        for i, (count, metres) in enumerate(BANDS)
    ]
    cells = round(extent / COVER_METRES)
    cover = torch.randint(classes, (1, cells // 4 + 1, cells // 4 + 1)).float()
    cover = cover.repeat_interleave(4, dim=1).repeat_interleave(4, dim=2)[:, :cells, :cells]
    return bands, Raster(cover, -90.0, 45.0, COVER_METRES, COVER_TURN)


def build(
    *, depth1: int = 3, depth2: int = 4, depth3: int = 6, depth4: int = 3, width: int = 64, classes: int = 10
) -> nn.Module:
    model = resnet.ResNet((depth1, depth2, depth3, depth4), width, classes)
    model.stem[0] = nn.Conv2d(sum(count for count, _ in BANDS), width, 7, stride=2, padding=3, bias=False)
    return model


def batch(model: nn.Module, micro_batch: int, seq: int | None, image: int | None) -> dict[str, Tensor]:
    """Windows over one drawn scene: 13 bands, and the cover that fills most of each window."""
    side = model.image if image is None else image
    bands, cover = scene(side, model.classes)
    west, north = windows([*bands, cover], micro_batch, side * METRES)
    images = torch.cat([raster.read(west, north, side, METRES) for raster in bands], dim=1)
    classes = cover.read(west, north, side, METRES, mode="nearest").long().flatten(1)
    return {"images": images, "targets": F.one_hot(classes, model.classes).sum(dim=1).argmax(dim=1)}


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the class."""
    return F.cross_entropy(output, batch["targets"])
