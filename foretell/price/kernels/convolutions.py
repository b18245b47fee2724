"""What cuDNN 9.19 takes for itself in a convolution on an H200: a few recipes, and small trees that vote for one.

    convolution ─► features ─► trees (convolutions.json) ─► a recipe each ─► bytes, on the upper side of the votes

cuDNN's fast engines want NHWC with channels in multiples of 16 bytes. From NCHW it makes copies of input, output and
weight (`x`, `y` and `w`, padded), which is nearly all there is; the rest are fp32 sums of weights' gradients, one per
sample or one per split of a long sum. Of the convolutions that were measured nearly all follow a recipe below to 2 MiB.
Which one is cuDNN's secret, and neighbours in shape differ. Thresholds read by hand off a grid of shapes are one of the
recipes; where measured models speak against them the trees name another. benchmarks/convolutions.py grows them from half
of the families of models and holds them against the others. By hand alone: depthwise, channels_last, fp32 but for
forward passes larger than 1x1, and gradients of the input alone.

Not covered: transforms that gradients of fp32 weights were seen in, rarely (130 KiB for each pair of an input channel and
an output in 1-d, 812 MiB at most; 18 times the input in one 3x3). Neighbours of these shapes take none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from math import ceil, prod
from pathlib import Path
from typing import Any

from foretell.hardware.generations import reference
from foretell.price.kernels.scratch_data import Convolution, round_up
from foretell.units import MIB

TREES = Path(__file__).with_suffix(".json")
_TILE = 128
LEAN = 0.7
"""More than half: a byte too few may end a run, one too many does not. Held-out families of the half `fit` chose it of 0.5 to 0.8."""
ALIKE, ALIKE_BACKWARD = 8 * MIB, 6 * MIB
"""Of two that differ by no more the larger is taken: so nothing of the grid or the zoo that thresholds gave enough gets too little."""


def workspace(c: Convolution) -> int:
    """Forward: what cuDNN takes. Backward: the highest of its passes, above all that the op returns."""
    if c.depthwise or c.channels_last or not c.mask[1]:
        return c.by_hand()
    known = recipes(c)
    by_trees, by_hand = voted(trees()[kind(c)], features(c), known), known["by hand"]
    return by_trees if abs(by_trees - by_hand) > (ALIKE_BACKWARD if c.backward else ALIKE) else max(by_trees, by_hand)


def kind(c: Convolution) -> str:
    """Which trees: of the direction, of narrow or fp32 numbers, of 1x1 or larger."""
    parts = "backward" if c.backward else "forward", "narrow" if c.narrow else "wide", "1x1" if c.kernel == 1 else "full"
    return " ".join(parts)


def features(c: Convolution) -> dict[str, float]:
    """What may decide: sizes and how they divide, which bounds vector loads; work, and how it fills the device."""
    positions = c.batch * c.plane_out
    taps = prod(c.weight.shape[2:])
    depth = c.weight.numel // max(1, c.outputs)
    both = c.channels + c.outputs
    return {
        "dims": len(c.source.shape) - 2, "batch": c.batch, "channels": c.channels,
        "outputs": c.outputs, "channels divide": _divides(c.channels), "outputs divide": _divides(c.outputs),
        "least channels": min(c.channels, c.outputs), "most channels": max(c.channels, c.outputs),
        "plane": c.plane, "plane out": c.plane_out, "plane divides": _divides(c.plane),
        "plane out divides": _divides(c.plane_out), "row divides": _divides(c.source.shape[-1]),
        "row": c.source.shape[-1], "row out": c.result.shape[-1],
        "taps": taps, "last tap": c.weight.shape[-1], "stride": c.stride, "padding": c.padding,
        "dilation": c.dilation, "transposed": c.transposed, "groups": c.groups, "group": c.weight.shape[1],
        "patches": c.padding == 0 and c.stride == c.kernel > 1, "data": c.backward and c.mask[0],
        "positions": positions, "depth": depth, "weights": c.weight.numel,
        "x": c.source.numel, "y": c.result.numel, "x per y": c.source.numel / max(1, c.result.numel),
        "work": positions * depth * c.outputs, "outputs per channel": c.outputs / max(1, c.channels),
        "intensity": c.channels * c.outputs * taps / c.groups / max(1, both),
        "waves": ceil(positions / _TILE) * ceil(c.outputs / _TILE) / reference().sm_count,
        "waves back": ceil(c.batch * c.plane / _TILE) * ceil(c.channels / _TILE) / reference().sm_count,
        "tiles": _tiles(c), "sums": c.batch * c.weight.numel,
        "sums per copies": c.batch * c.weight32 / max(1, c.x + c.y), "by hand per copies": c.by_hand() / max(1, c.x + c.y),
    }  # fmt: skip


def recipes(c: Convolution) -> dict[str, int]:
    """Bytes of everything cuDNN was seen to take, by name."""
    step = 1 if c.groups > 1 else 8 if c.narrow else 4
    padded, padded_out = round_up(c.channels, step) / max(1, c.channels), round_up(c.outputs, step) / max(1, c.outputs)
    x, y = int(c.source.nbytes * padded), int(c.result.nbytes * padded_out)
    w = int(c.weight.nbytes * padded * padded_out) if c.kernel > 1 else 0
    splits = int(c.weight32 * padded * padded_out) * (reference().sm_count // max(1, _tiles(c)))
    all_three = x + y + w
    found = {
        "by hand": c.by_hand(), "none": 0, "x + w": x + w, "x + y": x + y, "x + y + w": all_three,
        "x + y + w + splits": all_three + splits, "x + y + w + 8 MiB": all_three + 8 * MIB,
    }  # fmt: skip
    if c.backward:
        found |= {
            "x": x, "y": y, "x + w + 8 MiB": x + w + 8 * MIB, "splits": splits, "8 MiB": 8 * MIB,
            "20 MiB": 20 * MIB, "x + y + w + 4 MiB": all_three + 4 * MIB, "x + y + w + 20 MiB": all_three + 20 * MIB,
            "sum per sample": c.batch * c.weight32,
        }  # fmt: skip
    return found


def _tiles(c: Convolution) -> int:
    """Of the gradient of the weight: 128 outputs by 128 channels, a tap each."""
    return ceil(c.outputs / _TILE) * ceil(c.channels / c.groups / _TILE) * prod(c.weight.shape[2:])


def _divides(value: int) -> int:
    """The largest power of two up to 64 that divides it."""
    return min(64, value & -value) if value else 64


def named(node: Any, asked: Mapping[str, float]) -> str:
    """The recipe that a tree names: a node is the name of one, or [feature, threshold, up to it, above it]."""
    while not isinstance(node, str):
        feature, threshold, low, high = node
        node = high if asked[feature] > threshold else low
    return node


def voted(grown: Sequence[Any], asked: Mapping[str, float], known: Mapping[str, int]) -> int:
    """The bytes that LEAN of the trees do not exceed by the recipe they name."""
    sizes = sorted(known[named(tree, asked)] for tree in grown)
    return sizes[int(LEAN * len(sizes))]


@cache
def trees() -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = json.loads(TREES.read_text())["trees"]
    return found
