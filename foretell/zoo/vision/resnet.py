"""Residual network with bottleneck blocks (He et al., 2015, "Deep Residual Learning for Image Recognition").

Kept: the "v1.5" form: the stride of a bottleneck sits on its 3x3 convolution. A 7x7 stem and max pooling, four stages
whose width doubles while the resolution halves, global average pooling and a linear head. The defaults are
ResNet-50. Left out: the paper's own initialisation and its augmentation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """1x1 reduce, 3x3, 1x1 expand by four; the shortcut is projected where the shape changes."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = width * self.expansion
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(out_channels)
        self.act = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm1(self.conv1(x)))
        y = self.act(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        y += self.shortcut(x)
        return self.act(y)


class ResNet(nn.Module):
    image = 224

    def __init__(self, depths: tuple[int, int, int, int], width: int, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        stages = []
        channels = width
        for level, depth in enumerate(depths):
            blocks = nn.ModuleList()
            for index in range(depth):
                stride = 2 if level > 0 and index == 0 else 1
                blocks.append(Bottleneck(channels, width << level, stride))
                channels = (width << level) * Bottleneck.expansion
            stages.append(blocks)
        self.stage1, self.stage2, self.stage3, self.stage4 = stages
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for stage in (self.stage1, self.stage2, self.stage3, self.stage4):
            for block in stage:
                x = block(x)
        return self.head(x.mean(dim=(2, 3)))


def build(
    *, depth1: int = 3, depth2: int = 4, depth3: int = 6, depth4: int = 3, width: int = 64, classes: int = 1000
) -> nn.Module:
    return ResNet((depth1, depth2, depth3, depth4), width, classes)


def batch(model: nn.Module, micro_batch: int, seq: int | None, image: int | None) -> dict[str, Tensor]:
    """Random images, each with a class."""
    side = model.image if image is None else image
    return {
        "images": torch.randn(micro_batch, 3, side, side),
        "targets": torch.randint(model.classes, (micro_batch,)),
    }


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the class."""
    return F.cross_entropy(output, batch["targets"])
