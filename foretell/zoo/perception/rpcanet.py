"""RPCANet++ (Wu, Dai, Zhang, Ding, Yang, Cheng, Peng 2025, "RPCANet++: Deep Interpretable Robust PCA for Sparse Object
Segmentation"): a robust principal component analysis, image = low-rank background + sparse objects, unrolled.

Kept: K stages, each with weights of its own.  A stage approximates the background B from D - O, with a memory (a
convolutional LSTM whose state goes from stage to stage) that keeps background features from being lost on the way;
extracts objects, O + step * (D - B - O) less a learned gradient that sees a contrast prior (convolution less what it
makes of a flat neighbourhood); and restores the image D from B + O.  Objects of the last stage are segmented, soft IoU,
and the restored image is held against the input.  `stages_of` measures rank of B and sparsity of O at every stage.

Left out: training tricks and post-processing.  Layers within a module are as many as `depth` says; the paper's counts
are approximated, so that sizes are near those of the paper and not equal to them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RESTORED = 0.1
"""Weight of the restored image in the loss."""


class Refine(nn.Module):
    """A few 3x3 convolutions with BatchNorm, from one number of channels to another."""

    def __init__(self, inner: int, dim: int, outer: int, depth: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for n in range(depth):
            layers += [nn.Conv2d(inner if n == 0 else dim, dim, 3, padding=1, bias=False), nn.BatchNorm2d(dim), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        self.out = nn.Conv2d(dim, outer, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(x))


class Memory(nn.Module):
    """Convolutional LSTM cell over the stages: what is kept of the background, h, and what is known of it, c."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gates = nn.Conv2d(2 * dim, 4 * dim, 3, padding=1)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        keep, write, show, new = self.gates(torch.cat((x, h), dim=1)).chunk(4, dim=1)
        c = keep.sigmoid() * c + write.sigmoid() * new.tanh()
        return show.sigmoid() * c.tanh(), c


class Background(nn.Module):
    def __init__(self, channels: int, dim: int, depth: int) -> None:
        super().__init__()
        self.inner = nn.Conv2d(channels, dim, 3, padding=1)
        self.memory = Memory(dim)
        self.refine = Refine(dim, dim, channels, depth)

    def forward(self, rest: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, c = self.memory(F.relu(self.inner(rest)), h, c)
        return rest + self.refine(h), h, c


class Contrast(nn.Module):
    """A convolution of differences from the centre: nothing where the neighbourhood is flat."""

    def __init__(self, channels: int, dim: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, dim, 3, padding=1, padding_mode="replicate", bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) - F.conv2d(x, self.conv.weight.sum(dim=(2, 3), keepdim=True))


class Objects(nn.Module):
    def __init__(self, channels: int, dim: int, depth: int) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.empty(2))
        self.contrast = Contrast(channels, dim)
        self.refine = Refine(channels + dim, dim, channels, depth)

    def forward(self, image: Tensor, background: Tensor, objects: Tensor) -> Tensor:
        towards = objects + self.step[0] * (image - background - objects)
        return towards - self.step[1] * self.refine(torch.cat((towards, self.contrast(towards)), dim=1))


class Stage(nn.Module):
    """One step of the unrolled analysis; image, objects and memory go in and come out."""

    def __init__(self, channels: int, dim: int, depth: int) -> None:
        super().__init__()
        self.background = Background(channels, dim, depth)
        self.objects = Objects(channels, dim, depth)
        self.restore = Refine(channels, dim, channels, depth)

    def forward(self, image: Tensor, objects: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        background, h, c = self.background(image - objects, h, c)
        objects = self.objects(image, background, objects)
        both = background + objects
        return both + self.restore(both), objects, h, c, background


class RPCANet(nn.Module):
    image = 256

    def __init__(self, stages: int, channels: int, dim: int, depth: int) -> None:
        super().__init__()
        self.channels, self.dim = channels, dim
        self.stages = nn.ModuleList(Stage(channels, dim, depth) for _ in range(stages))
        for stage in self.stages:
            nn.init.constant_(stage.objects.step, 0.5)

    def unroll(self, images: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Background, objects and restored image after every stage."""
        image, objects = images, torch.zeros_like(images)
        h = c = images.new_zeros(images.shape[0], self.dim, *images.shape[2:])
        found = []
        for stage in self.stages:
            image, objects, h, c, background = stage(image, objects, h, c)
            found.append((background, objects, image))
        return found

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of objects and the restored image, both as large as the images."""
        _, objects, image = self.unroll(images)[-1]
        return objects, image

    @torch.no_grad()
    def stages_of(self, images: Tensor) -> list[tuple[float, float]]:
        """For every stage: how many singular values hold 99 % of the background's energy, and the share of the objects'
        pixels below a hundredth of their largest."""
        return [(_rank(background), _sparsity(objects)) for background, objects, _ in self.unroll(images)]


def _rank(maps: Tensor) -> float:
    energy = torch.linalg.svdvals(maps.float()).square().cumsum(dim=-1)
    return (energy < 0.99 * energy[..., -1:]).sum(dim=-1).add(1).float().mean().item()


def _sparsity(maps: Tensor) -> float:
    size = maps.abs()
    return (size < 0.01 * size.amax(dim=(-2, -1), keepdim=True)).float().mean().item()


def build(*, stages: int = 6, channels: int = 1, dim: int = 32, depth: int = 3) -> RPCANet:
    return RPCANet(stages, channels, dim, depth)


def batch(model: RPCANet, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """Random images, one pixel in a hundred of which belongs to an object."""
    shape = (micro_batch, model.channels, image or model.image, image or model.image)
    return {"images": torch.rand(shape), "masks": (torch.rand(shape) > 0.99).float()}


def loss(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """One less the soft overlap of the objects, and mean square error of the restored image."""
    objects, restored = output
    share, there = objects.float().sigmoid(), batch["masks"]
    common = (share * there).sum(dim=(1, 2, 3))
    iou = (common + 1) / (share.sum(dim=(1, 2, 3)) + there.sum(dim=(1, 2, 3)) - common + 1)
    return 1 - iou.mean() + RESTORED * F.mse_loss(restored.float(), batch["images"])
