"""Hyperspectral pansharpening (the methods compared by Vivone et al., 2023, "Hyperspectral Pansharpening: Critical Review,
Tools, and Future Perspectives", a toolbox).

A cube of many bands at low resolution and one sharp panchromatic image give a sharp cube. Kept: one of each
kind, config `method`:

- `svd`: component substitution. The pixels of the low-resolution cube, bands weighted, are factored by a singular value
  decomposition; of the enlarged cube's principal components the first is replaced by the panchromatic image, matched in mean
  and deviation, and the cube is put together again. Trained are the weights of the bands, through the decomposition, and the
  gain of the detail in every band.
- `cnn`: residual blocks over the enlarged cube and the panchromatic image add detail to the enlarged cube.
- `unfold`: an iteration written out. Each stage takes a gradient step on how far the blurred, downsampled cube is from the
  one given and its panchromatic image from the one given (blur and spectral response are learned), then a learned denoiser.

All are fully convolutional but for `svd`, whose basis is of the whole frame: `prepare` finds what needs the whole frame,
`fuse` the rest, so that `tiled` can go piece by piece. Left out: the other methods of the toolbox, its quality indices, and
the sensors' measured blur. The defaults are a 102-band cube of 160 pixels, four times the resolution, widths of the usual size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

METHODS = ("svd", "cnn", "unfold")


class Method(nn.Module):
    """What the methods share: sizes, and a forward in two steps."""

    def __init__(self, bands: int, ratio: int) -> None:
        super().__init__()
        self.bands, self.ratio = bands, ratio

    def prepare(self, cube: Tensor, pan: Tensor) -> tuple[Tensor, ...]:
        """What is to be known of the whole frame."""
        return ()

    def fuse(self, cube: Tensor, pan: Tensor, *known: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, cube: Tensor, pan: Tensor) -> Tensor:
        return self.fuse(cube, pan, *self.prepare(cube, pan))

    def enlarge(self, cube: Tensor) -> Tensor:
        return F.interpolate(cube, scale_factor=float(self.ratio), mode="bilinear")


class Substitution(Method):
    def __init__(self, bands: int, ratio: int) -> None:
        super().__init__(bands, ratio)
        self.log_weight = nn.Parameter(torch.zeros(bands))
        self.gain = nn.Parameter(torch.ones(bands))

    def prepare(self, cube: Tensor, pan: Tensor) -> tuple[Tensor, ...]:
        """Mean of the bands, basis of the components (b, bands, bands), scale and shift of the panchromatic image."""
        pixels = cube.flatten(2)
        mean = pixels.mean(dim=2, keepdim=True)
        weighted = (pixels - mean) * self.log_weight.exp()[:, None]
        basis = torch.linalg.svd(weighted.float(), full_matrices=False).U.to(pixels.dtype)
        first = (basis[:, :, :1].transpose(1, 2) @ (pixels - mean)).squeeze(1)
        sign = torch.sign((first * F.avg_pool2d(pan, self.ratio).flatten(1)).sum(dim=1, keepdim=True))
        scale = sign * first.std(dim=1, keepdim=True) / pan.flatten(1).std(dim=1, keepdim=True)
        return mean[..., None], basis, scale[..., None, None], pan.mean(dim=(2, 3), keepdim=True)

    def fuse(self, cube: Tensor, pan: Tensor, *known: Tensor) -> Tensor:
        mean, basis, scale, level = known
        large = self.enlarge(cube)
        parts = torch.einsum("bck,bchw->bkhw", basis, large - mean)
        sharp = torch.cat([(pan - level) * scale, parts[:, 1:]], dim=1)
        detail = torch.einsum("bck,bkhw->bchw", basis, sharp - parts)
        return large + self.gain[:, None, None] * detail


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.conv1(x)))


class Convolutional(Method):
    def __init__(self, bands: int, ratio: int, width: int, depth: int) -> None:
        super().__init__(bands, ratio)
        self.stem = nn.Conv2d(bands + 1, width, 3, padding=1)
        self.blocks = nn.ModuleList(ResidualBlock(width) for _ in range(depth))
        self.head = nn.Conv2d(width, bands, 3, padding=1)

    def fuse(self, cube: Tensor, pan: Tensor, *known: Tensor) -> Tensor:
        large = self.enlarge(cube)
        x = F.relu(self.stem(torch.cat([large, pan], dim=1)))
        for block in self.blocks:
            x = block(x)
        return large + self.head(x)


class Stage(nn.Module):
    """One step of the iteration: towards both images, then a denoiser."""

    def __init__(self, bands: int, ratio: int, width: int) -> None:
        super().__init__()
        self.bands, self.ratio = bands, ratio
        self.blur = nn.Parameter(torch.full((bands, 1, ratio, ratio), 1.0 / ratio**2))
        self.response = nn.Parameter(torch.full((1, bands, 1, 1), 1.0 / bands))
        self.step = nn.Parameter(torch.full((2,), 0.1))
        self.denoise1 = nn.Conv2d(bands, width, 3, padding=1)
        self.denoise2 = nn.Conv2d(width, bands, 3, padding=1)

    def forward(self, x: Tensor, cube: Tensor, pan: Tensor) -> Tensor:
        coarse = F.conv2d(x, self.blur, stride=self.ratio, groups=self.bands) - cube
        bright = F.conv2d(x, self.response) - pan
        x = x - self.step[0] * F.conv_transpose2d(coarse, self.blur, stride=self.ratio, groups=self.bands)
        x = x - self.step[1] * F.conv_transpose2d(bright, self.response)
        return x + self.denoise2(F.relu(self.denoise1(x)))


class Unfolded(Method):
    def __init__(self, bands: int, ratio: int, width: int, depth: int) -> None:
        super().__init__(bands, ratio)
        self.stages = nn.ModuleList(Stage(bands, ratio, width) for _ in range(depth))

    def fuse(self, cube: Tensor, pan: Tensor, *known: Tensor) -> Tensor:
        x = self.enlarge(cube)
        for stage in self.stages:
            x = stage(x, cube, pan)
        return x


def tiled(model: nn.Module, cube: Tensor, pan: Tensor, tile: int, margin: int) -> Tensor:
    """The sharp cube in tiles of so many low-resolution pixels, each computed with a margin that is cut off again."""
    known = model.prepare(cube, pan)
    ratio, (rows, columns) = model.ratio, cube.shape[-2:]
    whole = []
    for top in range(0, rows, tile):
        row = []
        for left in range(0, columns, tile):
            y0, x0 = max(0, top - margin), max(0, left - margin)
            y1, x1 = min(rows, top + tile + margin), min(columns, left + tile + margin)
            piece = model.fuse(cube[..., y0:y1, x0:x1], pan[..., y0 * ratio : y1 * ratio, x0 * ratio : x1 * ratio], *known)
            high, wide = min(tile, rows - top) * ratio, min(tile, columns - left) * ratio
            row.append(piece[..., (top - y0) * ratio :, (left - x0) * ratio :][..., :high, :wide])
        whole.append(torch.cat(row, dim=-1))
    return torch.cat(whole, dim=-2)


def build(
    *, method: str = "svd", bands: int = 102, ratio: int = 4, width: int = 128, depth: int = 8, image: int = 160
) -> nn.Module:
    if image % ratio:
        raise ValueError(f"image side {image} is not divisible by the ratio {ratio}")
    if method == "svd":
        return Substitution(bands, ratio)
    if method not in METHODS:
        raise ValueError(f"no method '{method}': {', '.join(METHODS)}")
    return (Convolutional if method == "cnn" else Unfolded)(bands, ratio, width, depth)


def batch(model: nn.Module, micro_batch: int, seq: int | None, image: int | None) -> dict[str, Tensor]:
    """Random cubes at low resolution, a sharp panchromatic image of each, and the sharp cube that is wanted."""
    side = image or 160
    low = side // model.ratio
    return {
        "cube": torch.rand(micro_batch, model.bands, low, low),
        "pan": torch.rand(micro_batch, 1, side, side),
        "targets": torch.rand(micro_batch, model.bands, side, side),
    }


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean absolute error of the sharp cube."""
    return F.l1_loss(output, batch["targets"])
