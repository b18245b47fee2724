"""Cascaded-Forward (Zhao et al., 2023, "The Cascaded Forward Algorithm for Neural Network Training"), as compared in
Spyra, 2025, "Beyond Backpropagation".

Kept: a stack of convolutional blocks (convolution, ReLU, max pooling, batch norm), each with a predictor of its own that maps
its whole output to the classes. The blocks stay as they were drawn; only the predictors are trained, each by
cross-entropy on its block's output, so that nothing is kept for the blocks and one predictor's input at a time for the
predictors. Prediction adds up the predictors. `losses` yields one scalar a predictor; each is run backward before the
next block is computed. `loss` is their sum.

`twin=True` is the same stack trained by backpropagation from the last predictor alone. Left out: the variant that first
trains the blocks by direct feedback alignment, the closed form for squared errors, and updates between blocks. The
default sizes are the paper's three blocks of 32, 128 and 512 channels on CIFAR-10, as near as known.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Half the side, more channels."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.max_pool2d(F.relu(self.convolution(x)), 2))


class Cascade(nn.Module):
    def __init__(self, widths: list[int], classes: int, image: int, twin: bool) -> None:
        super().__init__()
        if image % (1 << (len(widths) - 1)):
            raise ValueError(f"image side {image} cannot be halved {len(widths) - 1} times")
        self.image, self.channels, self.classes, self.twin = image, widths[0], classes, twin
        self.blocks = nn.ModuleList(Block(c_in, c_out) for c_in, c_out in pairwise(widths))
        sides = [image >> (i + 1) for i in range(len(self.blocks))]
        features = [width * side * side for width, side in zip(widths[1:], sides, strict=True)]
        self.predictors = nn.ModuleList(nn.Linear(size, classes) for size in (features[-1:] if twin else features))
        self.blocks.requires_grad_(twin)

    def local(self, images: Tensor) -> Iterator[Tensor]:
        """Scores of one predictor after another."""
        x = images
        for block, predictor in zip(self.blocks, self.predictors, strict=True):
            x = block(x)
            yield predictor(x.flatten(1))

    def forward(self, images: Tensor) -> Tensor:
        """Scores of every predictor (predictors, rows, classes)."""
        if not self.twin:
            return torch.stack(list(self.local(images)))
        x = images
        for block in self.blocks:
            x = block(x)
        return self.predictors[0](x.flatten(1))[None]


def build(
    *, channels: int = 3, width1: int = 32, factor: int = 4, layers: int = 3, classes: int = 10, image: int = 32,
    twin: bool = False,
) -> nn.Module:  # fmt: skip
    return Cascade([channels, *(width1 * factor**i for i in range(layers))], classes, image, twin)


def batch(model: nn.Module, micro_batch: int, seq: int | None, image: int | None) -> dict[str, Tensor]:
    """Random images, each with a class."""
    if image is not None and image != model.image:
        raise ValueError(f"image side {image} was asked for, but the model was built with image={model.image}")
    return {
        "images": torch.randn(micro_batch, model.channels, model.image, model.image),
        "targets": torch.randint(0, model.classes, (micro_batch,)),
    }


def losses(model: nn.Module, batch: dict[str, Tensor]) -> Iterator[Tensor]:
    """Scalars to run backward one after another."""
    if model.twin:
        yield loss(model(batch["images"]), batch)
        return
    for scores in model.local(batch["images"]):
        yield F.cross_entropy(scores.float(), batch["targets"])


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """All of them at once: the same gradients, more kept."""
    predictors, rows, classes = output.shape
    targets = batch["targets"].repeat(predictors)
    return predictors * F.cross_entropy(output.float().reshape(predictors * rows, classes), targets)
