"""ConvNeXt (Liu et al., 2022, "A ConvNet for the 2020s").

Kept: a 4x4 patch stem and four stages joined by LayerNorm and 2x2 strided convolutions. Each block is a depthwise 7x7
convolution, LayerNorm, an inverted-bottleneck MLP in channels-last layout, layer scale and a residual. Left out:
stochastic depth. The defaults are ConvNeXt-B.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LayerNorm2d(nn.LayerNorm):
    """LayerNorm over the channels of an NCHW tensor."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    def __init__(self, dim: int, layer_scale: float = 1e-6) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.up = nn.Linear(dim, 4 * dim)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * dim, dim)
        self.scale = nn.Parameter(torch.full((dim,), layer_scale))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(self.act(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class Downsample(nn.Sequential):
    """LayerNorm, then a 2x2 convolution of stride 2."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__(LayerNorm2d(in_dim, eps=1e-6), nn.Conv2d(in_dim, out_dim, 2, stride=2))


class ConvNeXt(nn.Module):
    image = 224

    def __init__(self, dims: tuple[int, int, int, int], depths: tuple[int, int, int, int], classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.stem = nn.Sequential(nn.Conv2d(3, dims[0], 4, stride=4), LayerNorm2d(dims[0], eps=1e-6))
        self.stage1, self.stage2, self.stage3, self.stage4 = (
            nn.ModuleList(Block(dim) for _ in range(depth)) for dim, depth in zip(dims, depths, strict=True)
        )
        self.down1 = Downsample(dims[0], dims[1])
        self.down2 = Downsample(dims[1], dims[2])
        self.down3 = Downsample(dims[2], dims[3])
        self.norm = nn.LayerNorm(dims[3], eps=1e-6)
        self.head = nn.Linear(dims[3], classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.stage1:
            x = block(x)
        for down, stage in (self.down1, self.stage2), (self.down2, self.stage3), (self.down3, self.stage4):
            x = down(x)
            for block in stage:
                x = block(x)
        return self.head(self.norm(x.mean(dim=(2, 3))))


def build(
    *,
    d1: int = 128,
    d2: int = 256,
    d3: int = 512,
    d4: int = 1024,
    n1: int = 3,
    n2: int = 3,
    n3: int = 27,
    n4: int = 3,
    classes: int = 1000,
) -> nn.Module:
    return ConvNeXt((d1, d2, d3, d4), (n1, n2, n3, n4), classes)


def batch(model: nn.Module, micro_batch: int, seq: int | None, image: int | None) -> dict[str, Tensor]:
    """Random images, each with a class."""
    side = model.image if image is None else image
    if side < 32:
        raise ValueError(f"image side {side} is too small: the network shrinks the image by 32")
    return {
        "images": torch.randn(micro_batch, 3, side, side),
        "targets": torch.randint(model.classes, (micro_batch,)),
    }


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the class."""
    return F.cross_entropy(output, batch["targets"])
