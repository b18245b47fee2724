"""U-Net (Ronneberger et al., 2015, "U-Net: Convolutional Networks for Biomedical Image Segmentation").

Kept: `levels` halvings of the resolution, each doubling the channels, a mirrored decoder of 2x2 transposed
convolutions, and skip connections by concatenation. Left out: the cropping of the skips, since convolutions are
padded and the output keeps the input's side. BatchNorm follows each convolution, as is usual today.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DoubleConv(nn.Module):
    """Two 3x3 convolutions, each with BatchNorm and ReLU."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm1(self.conv1(x)))
        return self.act(self.norm2(self.conv2(x)))


class Up(nn.Module):
    """Doubles the resolution, joins the skip connection and convolves."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.upsample = nn.ConvTranspose2d(in_channels, out_channels, 2, stride=2)
        self.conv = DoubleConv(2 * out_channels, out_channels)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.conv(torch.cat([skip, self.upsample(x)], dim=1))


class UNet(nn.Module):
    image = 256

    def __init__(self, channels: int, levels: int, classes: int, in_channels: int) -> None:
        super().__init__()
        if levels < 1:
            raise ValueError(f"a U-Net needs at least one level, not {levels}")
        self.levels = levels
        self.classes = classes
        self.in_channels = in_channels
        widths = [channels << level for level in range(levels + 1)]
        self.encoder = nn.ModuleList(
            DoubleConv(before, after) for before, after in pairwise([in_channels, *widths[:-1]])
        )
        self.pool = nn.MaxPool2d(2)
        self.bottom = DoubleConv(widths[-2], widths[-1])
        self.decoder = nn.ModuleList(Up(2 * width, width) for width in reversed(widths[:-1]))
        self.head = nn.Conv2d(channels, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        skips = []
        for block in self.encoder:
            x = block(x)
            skips.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for block in self.decoder:
            x = block(x, skips.pop())
        return self.head(x)


def build(*, channels: int = 64, levels: int = 4, classes: int = 2, in_channels: int = 3) -> nn.Module:
    return UNet(channels, levels, classes, in_channels)


def batch(model: nn.Module, micro_batch: int, seq: int | None, image: int | None) -> dict[str, Tensor]:
    """Random images with a class for every pixel."""
    side = model.image if image is None else image
    if side % (1 << model.levels):
        raise ValueError(f"image side {side} is not divisible by {1 << model.levels}, as {model.levels} levels need")
    return {
        "images": torch.randn(micro_batch, model.in_channels, side, side),
        "targets": torch.randint(model.classes, (micro_batch, side, side)),
    }


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of every pixel's class."""
    return F.cross_entropy(output, batch["targets"])
