"""Forward-Forward (Hinton, 2022, "The Forward-Forward Algorithm"), as compared in Spyra, 2025, "Beyond Backpropagation".

Kept: an MLP whose layers are trained one by one: a layer sees images with the right label written over their first pixels
and images with a wrong one, and its own loss wants a high goodness (mean square of its activities) for the first and
a low one for the second. A layer's graph ends at its input, which is detached and scaled to unit length so that the
goodness of the layer before cannot be read from it. `losses` yields one scalar a layer; each is run backward before
the next layer is computed, so that the activations of one layer are kept at a time. `loss` is their sum.

`twin=True` is the same MLP with a linear head, cross-entropy and one backward through everything: half the rows,
all layers kept. Left out: the paper's search over wrong labels by what the network believes (wrong labels are random),
and updates between layers: all gradients wait for one update, as in any step here. The sizes are Hinton's four layers
of 2000 for MNIST. An image is small: `group` of them are one sample of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layer(nn.Module):
    """Linear and ReLU on an input of unit length; `goodness` is what its own loss is about."""

    def __init__(self, dim_in: int, dim_out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim_in, dim_out)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x / (x.norm(dim=1, keepdim=True) + 1e-4)))

    def local_loss(self, activities: Tensor, threshold: float) -> Tensor:
        """The first half of the rows are right, the second wrong."""
        right, wrong = activities.pow(2).mean(dim=1).chunk(2)
        return F.softplus(threshold - right).mean() + F.softplus(wrong - threshold).mean()


class ForwardForward(nn.Module):
    def __init__(self, pixels: int, dim: int, layers: int, classes: int, threshold: float, group: int) -> None:
        super().__init__()
        self.pixels, self.classes, self.threshold, self.group = pixels, classes, threshold, group
        self.blocks = nn.ModuleList(Layer(d_in, d_out) for d_in, d_out in pairwise([pixels, *[dim] * layers]))

    def labelled(self, images: Tensor, labels: Tensor) -> Tensor:
        """The first pixels say the label."""
        return torch.cat([F.one_hot(labels, self.classes).to(images.dtype), images[:, self.classes :]], dim=1)

    def losses(self, images: Tensor, targets: Tensor, wrong: Tensor) -> Iterator[Tensor]:
        x = torch.cat([self.labelled(images, targets), self.labelled(images, wrong)])
        for block in self.blocks:
            y = block(x)
            yield block.local_loss(y, self.threshold)
            x = y.detach()

    def forward(self, images: Tensor, targets: Tensor, wrong: Tensor) -> Tensor:
        """The local losses, one after another."""
        return torch.stack(list(self.losses(images, targets, wrong)))


class Twin(nn.Module):
    """The same layers under backpropagation."""

    def __init__(self, pixels: int, dim: int, layers: int, classes: int, group: int) -> None:
        super().__init__()
        self.pixels, self.classes, self.group = pixels, classes, group
        self.blocks = nn.ModuleList(Layer(d_in, d_out) for d_in, d_out in pairwise([pixels, *[dim] * layers]))
        self.head = nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(
    *, pixels: int = 784, dim: int = 2000, layers: int = 4, classes: int = 10, threshold: float = 2.0, group: int = 1,
    twin: bool = False,
) -> nn.Module:  # fmt: skip
    if twin:
        return Twin(pixels, dim, layers, classes, group)
    return ForwardForward(pixels, dim, layers, classes, threshold, group)


def batch(model: nn.Module, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """`group` flat images a sample, each with its class and, for Forward-Forward, a wrong one."""
    rows = micro_batch * model.group
    targets = torch.randint(0, model.classes, (rows,))
    made = {"images": torch.rand(rows, model.pixels), "targets": targets}
    if isinstance(model, ForwardForward):
        made["wrong"] = (targets + torch.randint(1, model.classes, (rows,))) % model.classes
    return made


def losses(model: nn.Module, batch: dict[str, Tensor]) -> Iterator[Tensor]:
    """Scalars to run backward one after another."""
    if isinstance(model, Twin):
        yield loss(model(batch["images"]), batch)
    else:
        yield from model.losses(**batch)


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """All of them at once: the same gradients, more kept."""
    return output.sum() if "wrong" in batch else F.cross_entropy(output.float(), batch["targets"])
