"""Boxes without anchors, as detectors of the YOLO family have since 2022: every place of the feature maps says classes and
a distribution over its distance to each side of a box.

Targets are assigned by alignment of score and overlap (the best `TOP` places in a box), dense and masked: the objects of an
image are padded to a number that the model fixes, so that no size depends on data.  Non-maximum suppression is `detect`,
whose sizes do: it is for after the network and never traced.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BINS = 16
"""Of the distribution over a distance, in strides."""
TOP = 10

Output = tuple[Tensor, Tensor, Tensor, Tensor]
"""Logits of classes (batch, places, classes) and of distances (batch, places, 4, bins), centres and strides of places."""


def places(x: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    h, w = ((torch.arange(side, dtype=torch.float32, device=x.device) + 0.5) * stride for side in x.shape[2:])
    centres = torch.stack((w.expand(len(h), -1), h.unsqueeze(1).expand(-1, len(w))), dim=-1).flatten(0, 1)
    return centres, torch.full((len(centres), 1), float(stride), device=x.device)


def boxes_of(sides: Tensor, centres: Tensor, strides: Tensor) -> Tensor:
    """Left, top, right, bottom in pixels: the expected distance to each side, from the centre."""
    bins = torch.arange(BINS, dtype=torch.float32, device=sides.device)
    away = (sides.float().softmax(dim=-1) * bins).sum(dim=-1) * strides
    return torch.cat((centres - away[..., :2], centres + away[..., 2:]), dim=-1)


def overlap(one: Tensor, other: Tensor, *, generalised: bool = False) -> Tensor:
    """Share of the union that two boxes have in common; generalised, less the share of the hull that neither has."""

    def area(low: Tensor, high: Tensor) -> Tensor:
        return (high - low).clamp(min=0).prod(dim=-1)

    low, high, low2, high2 = one[..., :2], one[..., 2:], other[..., :2], other[..., 2:]
    common = area(torch.maximum(low, low2), torch.minimum(high, high2))
    union = area(low, high) + area(low2, high2) - common + 1e-7
    hull = area(torch.minimum(low, low2), torch.maximum(high, high2)) + 1e-7 if generalised else union
    return common / union - (hull - union) / hull


@torch.no_grad()
def assign(logits: Tensor, boxes: Tensor, centres: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Object of each place and how well they go together, 0 where there is none: (batch, places) both."""
    wanted, there = batch["boxes"].unsqueeze(2), batch["there"].unsqueeze(-1)
    inside = ((centres > wanted[..., :2]) & (centres < wanted[..., 2:])).all(dim=-1) & there
    shared = overlap(wanted, boxes.unsqueeze(1)).clamp(min=0) * inside
    score = logits.float().sigmoid().transpose(1, 2).gather(1, batch["classes"].unsqueeze(-1).expand_as(shared))
    fit = score.sqrt() * shared**6 + 1e-9 * inside
    best = fit.topk(min(TOP, fit.shape[-1]), dim=-1)
    chosen = torch.zeros_like(fit).scatter_(-1, best.indices, (best.values > 0).to(fit.dtype))
    most, whose = ((shared + 1e-6) * chosen * inside).max(dim=1)
    return whose, most


def detection_loss(output: Output, batch: dict[str, Tensor]) -> Tensor:
    """Classes everywhere; overlap and distribution of distances where an object was assigned."""
    logits, sides, centres, strides = output
    boxes = boxes_of(sides, centres, strides)
    whose, weight = assign(logits, boxes, centres, batch)
    wanted = batch["boxes"].gather(1, whose.unsqueeze(-1).expand(-1, -1, 4))
    kinds = F.one_hot(batch["classes"].gather(1, whose), logits.shape[-1]) * weight.unsqueeze(-1)
    total = weight.sum().clamp(min=1)
    named = F.binary_cross_entropy_with_logits(logits.float(), kinds, reduction="sum")
    off = (1 - overlap(boxes, wanted, generalised=True)) * weight
    away = torch.cat((centres - wanted[..., :2], wanted[..., 2:] - centres), dim=-1) / strides
    away = away.clamp(0, BINS - 1.01)
    low = away.floor()
    each = sides.float().log_softmax(dim=-1)
    below, above = (each.gather(-1, (low + n).long().unsqueeze(-1)).squeeze(-1) for n in (0, 1))
    shape = -((1 + low - away) * below + (away - low) * above).mean(dim=-1) * weight
    return (0.5 * named + 7.5 * off.sum() + 1.5 * shape.sum()) / total


@torch.no_grad()
def detect(output: Output, score: float = 0.25, shared: float = 0.65) -> list[Tensor]:
    """Non-maximum suppression: for every image (found, 6): box, score, class.  Sizes depend on values: never traced."""
    logits, sides, centres, strides = output
    found = []
    for all_boxes, all_scores in zip(boxes_of(sides, centres, strides), logits.float().sigmoid(), strict=True):
        best, kind = all_scores.max(dim=-1)
        order = [n for n in best.argsort(descending=True).tolist() if best[n] >= score]
        kept: list[int] = []
        for n in order:
            rivals = [m for m in kept if kind[m] == kind[n]]
            if not rivals or overlap(all_boxes[n], all_boxes[rivals]).max() <= shared:
                kept.append(n)
        found.append(torch.cat((all_boxes[kept], best[kept, None], kind[kept, None].float()), dim=-1))
    return found
