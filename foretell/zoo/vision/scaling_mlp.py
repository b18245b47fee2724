"""Inverted-bottleneck MLP on pixels (Bachmann et al., 2023, "Scaling MLPs: A Tale of Inductive Bias").

Kept: the image is flattened, so nothing tells the network which pixels are neighbours. A linear layer, residual blocks of
LayerNorm and a wide hidden layer, and a linear head. Left out: augmentation. The defaults are B-12/Wi-1024 on 64x64 images.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, dim: int, expansion: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, expansion * dim)
        self.act = nn.GELU()
        self.down = nn.Linear(expansion * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class ScalingMLP(nn.Module):
    def __init__(self, depth: int, dim: int, expansion: int, classes: int, image: int) -> None:
        super().__init__()
        self.image = image
        self.classes = classes
        self.embed = nn.Linear(3 * image * image, dim)
        self.blocks = nn.ModuleList(Block(dim, expansion) for _ in range(depth))
        self.head = nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(*, depth: int = 12, dim: int = 1024, expansion: int = 4, classes: int = 1000, image: int = 64) -> nn.Module:
    return ScalingMLP(depth, dim, expansion, classes, image)


def batch(model: nn.Module, micro_batch: int, seq: int | None, image: int | None) -> dict[str, Tensor]:
    """Random images, each with a class."""
    if image is not None and image != model.image:
        raise ValueError(f"image side {image} was asked for, but the model was built with image={model.image}")
    return {
        "images": torch.randn(micro_batch, 3, model.image, model.image),
        "targets": torch.randint(model.classes, (micro_batch,)),
    }


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the class."""
    return F.cross_entropy(output, batch["targets"])
