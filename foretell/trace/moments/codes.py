"""Moments in 8 or 4 bits: codes of blocks of elements, each block with one scale.

    first moment     the square root of its size in 127 steps and a sign, to the nearest step; in 4 bits in 7 steps
    second moment    the fourth root in 255 steps, up or down by chance, and never to nothing; in 4 bits in 15 steps

Roots, because within a block moments differ by powers of ten and Adam divides the first by the root of the second: steps grow
with the value, and both are the same root of a gradient's size. Higher roots reach further down and are coarser near a block's
largest values: with the fourth and the eighth root updates are off by 1.5 times as much in 8 bits, by 1.9 times in 4.

The second moment changes by a thousandth in a step, less than half a step of its code: rounded to the nearest it would stand
still, or climb only. So it goes up with the probability of its fraction, and on average nowhere else. Chance is the value's own
last bits: the same values give the same codes, in whatever runs and on whatever stream.

Fourth roots are square roots of square roots, and powers squares: results are exact to the last bit on every device, and do not
depend on where a run is cut. What is not finite makes its block's scale so, and all of the block from then on.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from foretell.trace.recipe import BLOCK

SIGNED, UNSIGNED = 127, 255
FEW_SIGNED, FEW_UNSIGNED = 7, 15
"""The same in 4 bits."""
LEAST = 1e-20
"""Of a scale: that of a block of zeros, to divide by. Roots of the smallest number above zero are far larger."""
CHANCE = 14
"""Last bits of a second moment that are its chance: enough that no side is preferred by what its decay would not make good,
and few enough that they say nothing about its code."""


def padded(elements: int) -> int:
    """Elements of whole blocks."""
    return -(-elements // BLOCK) * BLOCK


def decode_first(codes: Tensor, scales: Tensor, out: Tensor, spare: Tensor) -> None:
    """Whole blocks of first moments into `out`, fp32; `spare` is as long and used up."""
    blocks = _blocks(out, scales)
    torch.mul(codes.view(blocks.shape), scales[:, None], out=blocks)
    torch.mul(out, out, out=spare)
    torch.copysign(spare, out, out=out)


def decode_second(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Whole blocks of second moments into `out`, fp32."""
    blocks = _blocks(out, scales)
    torch.mul(codes.view(blocks.shape), scales[:, None], out=blocks)
    for _ in range(2):
        out.mul_(out)


def encode_first(
    moment: Tensor, codes: Tensor, scales: Tensor, spare: Tensor, keep: Tensor | None = None, steps: int = SIGNED
) -> None:
    """Codes and scales of whole blocks; `moment` and `spare` are used up. Where `keep` is true they stay as they are."""
    root_(torch.abs(moment, out=spare))
    roots = _blocks(spare, scales)
    fresh = _scales(roots, steps)
    roots.mul_(fresh.reciprocal()[:, None]).add_(0.5)
    torch.copysign(spare, moment, out=spare)
    _store(spare, codes, moment, keep)  # towards zero
    _store(fresh, scales, fresh, keep)


def encode_second(
    moment: Tensor, codes: Tensor, scales: Tensor, spare: Tensor, keep: Tensor | None = None, steps: int = UNSIGNED
) -> None:
    """As `encode_first`."""
    chance = torch.bitwise_and(moment.view(torch.int32), 2**CHANCE - 1, out=spare.view(torch.int32))
    root_(root_(moment))
    roots = _blocks(moment, scales)
    fresh = _scales(roots, steps + 2.0**-CHANCE)  # a block's largest value has its own code, whatever is rounded off
    roots.mul_(fresh.reciprocal()[:, None])
    moment.add_(chance, alpha=2.0**-CHANCE).clamp_(1, steps)
    _store(moment, codes, spare, keep)
    _store(fresh, scales, fresh, keep)


def root_(values: Tensor) -> Tensor:
    """Square roots in place, rounded to the nearest as on a GPU; those of MKL, which torch has on a CPU, are not always."""
    if values.device.type == "cpu":
        with np.errstate(invalid="ignore"):
            np.sqrt(values.numpy(), out=values.numpy())
        return values
    return values.sqrt_()


def _blocks(flat: Tensor, scales: Tensor) -> Tensor:
    return flat.view(scales.numel(), flat.numel() // max(1, scales.numel()))


def _scales(roots: Tensor, steps: float) -> Tensor:
    return roots.amax(1).div_(steps).clamp_min_(LEAST)


def _store(values: Tensor, into: Tensor, spare: Tensor, keep: Tensor | None) -> None:
    if keep is None:
        into.copy_(values)
        return
    fresh = values
    if into.dtype != values.dtype:
        fresh = spare.view(into.dtype)[: into.numel()]
        fresh.copy_(values)
    torch.where(keep, into, fresh, out=into)
