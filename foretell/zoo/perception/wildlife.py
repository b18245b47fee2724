"""Pytorch-Wildlife (Hernandez et al., 2024, "Pytorch-Wildlife: A Collaborative Deep Learning Framework for Conservation").

Kept: camera traps in two stages: a detector finds animals, people and vehicles in large images that are mostly empty, and a
classifier names the species of each crop. Config `phase` chooses which is trained: `detector` on boxes, or `classifier` on the
crops that a frozen detector cuts out (candidates by topk of objectness, the overlapping ones struck out, each resampled from
the image to one size).

How many crops there are depends on the images. `crops` bounds them for each image: the classifier sees that many, and a mask
says which count. With `ragged` it sees only those that pass, however many they are, so that a trace needs to be told the share
that passes (a hint for `aten.nonzero.default`). The detector is a plain one-stage one on a residual network with three scales,
in the place of MegaDetector's YOLO; its assignment is one cell of each scale per object. Left out: the model zoo, the video
and folder tools, and augmentation. Sizes: ResNet-50 twice, 1280 pixels, crops of 224, 36 species.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.zoo.vision import resnet

PHASES = ("detector", "classifier")
KINDS = 3
"""Animal, person, vehicle."""
STRIDES = (8, 16, 32)
FIRST = 0.2
"""Side of a box before anything is learned, as a share of the image."""


class Detector(nn.Module):
    """(b, 3, side, side) to (b, cells, 1 + KINDS + 4): objectness, kind, and how far the box reaches from the cell."""

    def __init__(self, depths: tuple[int, int, int, int], width: int, dim: int, side: int) -> None:
        super().__init__()
        self.trunk = resnet.ResNet(depths, width, 1)
        self.trunk.head = nn.Identity()
        channels = [(width << level) * resnet.Bottleneck.expansion for level in (1, 2, 3)]
        self.lateral = nn.ModuleList(nn.Conv2d(wide, dim, 1) for wide in channels)
        self.mix = nn.Conv2d(dim, dim, 3, padding=1)
        self.head = nn.Conv2d(dim, 1 + KINDS + 4, 1)
        self.centres: Tensor
        grids = [(torch.arange(side // stride) + 0.5) * stride / side for stride in STRIDES]
        cells = [torch.stack(torch.meshgrid(grid, grid, indexing="ij"), dim=-1).flatten(0, 1).flip(1) for grid in grids]
        self.register_buffer("centres", torch.cat(cells), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        x, maps = self.trunk.stem(images), []
        for stage in (self.trunk.stage1, self.trunk.stage2, self.trunk.stage3, self.trunk.stage4):
            for block in stage:
                x = block(x)
            maps.append(x)
        found: list[Tensor] = []
        above: Tensor | None = None
        for conv, features in zip(reversed(self.lateral), reversed(maps[1:]), strict=True):
            above = conv(features) if above is None else conv(features) + F.interpolate(above, scale_factor=2.0)
            found.insert(0, self.head(F.relu(self.mix(above))).flatten(2).transpose(1, 2))
        return torch.cat(found, dim=1)

    def boxes(self, cells: Tensor) -> Tensor:
        """Corners (x0, y0, x1, y1) as shares of the image."""
        reach = FIRST / 2 * cells[..., 1 + KINDS :].clamp(-4.0, 4.0).exp()
        return torch.cat([self.centres - reach[..., :2], self.centres + reach[..., 2:]], dim=-1)


def overlaps(one: Tensor, other: Tensor) -> Tensor:
    """Intersection over union of all pairs of (b, n, 4) and (b, m, 4)."""
    low, high = torch.maximum(one[:, :, None, :2], other[:, None, :, :2]), torch.minimum(one[:, :, None, 2:], other[:, None, :, 2:])
    shared = (high - low).clamp(min=0.0).prod(dim=-1)
    first, second = ((box[..., 2:] - box[..., :2]).clamp(min=0.0).prod(dim=-1) for box in (one, other))
    return shared / (first[:, :, None] + second[:, None] - shared + 1e-9)


class Wildlife(nn.Module):
    def __init__(
        self, detector: Detector, classifier: nn.Module, phase: str, crops: int, crop: int, species: int, objects: int,
        image: int, threshold: float, ragged: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.phase, self.crops, self.crop, self.threshold, self.ragged = phase, crops, crop, threshold, ragged
        self.species, self.objects, self.image = species, objects, image
        self.detector, self.classifier = detector, classifier
        (classifier if phase == "detector" else detector).requires_grad_(False)

    def train(self, mode: bool = True) -> Wildlife:
        """What is frozen keeps the statistics it was trained with."""
        super().train(mode)
        (self.classifier if self.phase == "detector" else self.detector).eval()
        return self

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        if self.phase == "detector":
            cells = self.detector(images)
            return {"cells": cells, "boxes": self.detector.boxes(cells), "centres": self.detector.centres}
        with torch.no_grad():
            boxes, passed = self.candidates(images)
            cuts, which = self.cut(images, boxes), {"passed": passed}
            if self.ragged:
                which = {"chosen": passed.flatten().nonzero().squeeze(1)}
                cuts = cuts[which["chosen"]]
        return {"species": self.classifier(cuts), "boxes": boxes, **which}

    def candidates(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The best boxes of each image (b, crops, 4), and which of them count: sure enough, and not a better one again."""
        cells = self.detector(images)
        scores, index = cells[..., 0].sigmoid().topk(self.crops, dim=1)
        boxes = self.detector.boxes(cells).gather(1, index[..., None].expand(-1, -1, 4))
        again = overlaps(boxes, boxes).tril(diagonal=-1).amax(dim=2) > 0.5
        return boxes, (scores > self.threshold) & ~again

    def cut(self, images: Tensor, boxes: Tensor) -> Tensor:
        """Every box resampled to (crop, crop): (b * crops, 3, crop, crop)."""
        steps = (torch.arange(self.crop, device=images.device, dtype=images.dtype) + 0.5) / self.crop
        x, y = (2.0 * (boxes[..., i, None] + (boxes[..., i + 2, None] - boxes[..., i, None]) * steps) - 1.0 for i in (0, 1))
        b, crops, side = x.shape
        grid = torch.stack([x[:, :, None].expand(-1, -1, side, -1), y[..., None].expand(-1, -1, -1, side)], dim=-1)
        cuts = F.grid_sample(images, grid.reshape(b, crops * side, side, 2).to(images.dtype), align_corners=False)
        return cuts.view(b, -1, crops, side, side).transpose(1, 2).reshape(b * crops, -1, side, side)


def build(
    *, phase: str = "detector", depth1: int = 3, depth2: int = 4, depth3: int = 6, depth4: int = 3, width: int = 64, dim: int = 256,
    crops: int = 16, crop: int = 224, species: int = 36, objects: int = 8, image: int = 1280, threshold: float = 0.2,
    ragged: bool = False,
) -> nn.Module:  # fmt: skip
    if phase not in PHASES:
        raise ValueError(f"no phase '{phase}': {', '.join(PHASES)}")
    if image % 32:
        raise ValueError(f"image side {image} is not divisible by 32")
    depths = (depth1, depth2, depth3, depth4)
    detector, classifier = Detector(depths, width, dim, image), resnet.ResNet(depths, width, species + 1)
    return Wildlife(detector, classifier, phase, crops, crop, species, objects, image, threshold, ragged)


def batch(model: nn.Module, micro_batch: int, seq: int | None, image: int | None) -> dict[str, Tensor]:
    """Random images with the corners of `objects` boxes, the kind and the species in each."""
    if image is not None and image != model.image:
        raise ValueError(f"image side {image} was asked for, but the model was built with image={model.image}")
    corner, size = torch.rand(micro_batch, model.objects, 2) * 0.7, 0.05 + 0.2 * torch.rand(micro_batch, model.objects, 2)
    return {
        "images": torch.randn(micro_batch, 3, model.image, model.image),
        "targets": torch.cat([corner, corner + size], dim=-1),
        "kinds": torch.randint(KINDS, (micro_batch, model.objects)),
        "labels": torch.randint(model.species, (micro_batch, model.objects)),
    }


def loss(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Detector: objectness of all cells, kind and box of those that hold an object. Classifier: species of what counts."""
    targets = batch["targets"]
    if "cells" in output:
        return _detected(output, targets, batch["kinds"])
    overlap, nearest = overlaps(output["boxes"], targets).max(dim=2)
    other = output["species"].shape[1] - 1  # a crop that shows no labelled animal
    label = batch["labels"].gather(1, nearest).masked_fill(overlap < 0.1, other).flatten()
    if "chosen" in output:
        return F.cross_entropy(output["species"], label[output["chosen"]])
    losses = F.cross_entropy(output["species"], label, reduction="none")
    passed = output["passed"].flatten().to(losses.dtype)
    return (losses * passed).sum() / passed.sum().clamp(min=1.0)


def _detected(output: dict[str, Tensor], targets: Tensor, kinds: Tensor) -> Tensor:
    cells, centres = output["cells"], output["centres"]
    middle = (targets[..., :2] + targets[..., 2:]) / 2
    first, places = 0, []
    side = 32 * round((len(centres) / sum((32 // stride) ** 2 for stride in STRIDES)) ** 0.5)  # of the image
    for stride in STRIDES:
        count = side // stride
        column, row = (middle * count).long().clamp(max=count - 1).unbind(dim=-1)
        places.append(first + row * count + column)
        first += count * count
    place = torch.cat(places, dim=1)
    wanted = torch.zeros_like(cells[..., 0]).scatter_(1, place, 1.0)
    kind = cells[..., 1 : 1 + KINDS].gather(1, place[..., None].expand(-1, -1, KINDS)).flatten(0, 1)
    box = output["boxes"].gather(1, place[..., None].expand(-1, -1, 4))
    return (
        F.binary_cross_entropy_with_logits(cells[..., 0], wanted)
        + F.cross_entropy(kind, kinds.repeat(1, len(STRIDES)).flatten())
        + F.smooth_l1_loss(box, targets.repeat(1, len(STRIDES), 1))
    )
