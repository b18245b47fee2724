"""Mono-Forward (Gong, Li and Abdulla, 2025, "Mono-Forward: Backpropagation-Free Algorithm for Efficient Neural Network
Training Harnessing Local Errors"), as compared in Spyra, 2025, "Beyond Backpropagation".

Kept: an MLP whose every layer has a projection matrix from its activities to the classes; the goodness of a class is its
score there, and the layer's own loss is cross-entropy over these scores. A layer's graph ends at its input, which is
detached; layer and projection train together. Prediction takes the last layer's scores. `losses` yields one scalar a
layer; each is run backward before the next layer is computed, so that the activations of one layer are kept at a
time. `loss` is their sum.

`twin=True` is the same MLP with one head at the end and one backward through everything. Left out: updates between
layers; all gradients wait for one update, as in any step here. The default sizes are the paper's MLP for CIFAR-10,
three layers of 2000, as near as known. An image is small: `group` of them are one sample of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layer(nn.Module):
    """Linear and ReLU, and what of the classes its activities say."""

    def __init__(self, dim_in: int, dim_out: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim_in, dim_out)
        self.projection = nn.Linear(dim_out, classes, bias=False) if classes else None

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x))

    def goodness(self, activities: Tensor) -> Tensor:
        assert self.projection is not None
        return self.projection(activities)


class MonoForward(nn.Module):
    def __init__(self, pixels: int, dim: int, layers: int, classes: int, group: int, twin: bool) -> None:
        super().__init__()
        self.pixels, self.classes, self.group, self.twin = pixels, classes, group, twin
        widths = [pixels, *[dim] * layers]
        projected = [0 if twin and i < layers - 1 else classes for i in range(layers)]
        self.blocks = nn.ModuleList(
            Layer(d_in, d_out, own) for (d_in, d_out), own in zip(pairwise(widths), projected, strict=True)
        )

    def local(self, images: Tensor) -> Iterator[Tensor]:
        """Scores of one layer after another; each layer is cut off from the one before."""
        x = images
        for block in self.blocks:
            y = block(x)
            yield block.goodness(y)
            x = y.detach()

    def forward(self, images: Tensor) -> Tensor:
        """Scores of every layer (layers, rows, classes); of the last alone in the twin."""
        if not self.twin:
            return torch.stack(list(self.local(images)))
        x = images
        for block in self.blocks:
            x = block(x)
        return self.blocks[-1].goodness(x)[None]


def build(
    *, pixels: int = 3072, dim: int = 2000, layers: int = 3, classes: int = 10, group: int = 1, twin: bool = False
) -> nn.Module:
    return MonoForward(pixels, dim, layers, classes, group, twin)


def batch(model: nn.Module, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """`group` flat images a sample, each with its class."""
    rows = micro_batch * model.group
    return {"images": torch.rand(rows, model.pixels), "targets": torch.randint(0, model.classes, (rows,))}


def losses(model: nn.Module, batch: dict[str, Tensor]) -> Iterator[Tensor]:
    """Scalars to run backward one after another."""
    if model.twin:
        yield loss(model(batch["images"]), batch)
        return
    for scores in model.local(batch["images"]):
        yield F.cross_entropy(scores.float(), batch["targets"])


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """All of them at once: the same gradients, more kept."""
    layers, rows, classes = output.shape
    targets = batch["targets"].repeat(layers)
    return layers * F.cross_entropy(output.float().reshape(layers * rows, classes), targets)
