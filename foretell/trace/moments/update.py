"""AdamW's update of parameters whose moments are in codes: one op for a list of them.

What is computed is written down once, number by number and in an order that CUDA's kernel keeps: each product, sum, quotient
and root is rounded to fp32 by itself, so that both give the same bits.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.trace.moments import codes
from foretell.trace.moments.rows import BLOCKS

_AT_ONCE = 2**14
"""Elements that are updated at a time where there is no kernel: what that takes besides stays in a cache."""


class Moments(NamedTuple):
    """What is kept for one parameter."""

    first: Tensor
    first_scales: Tensor
    second: Tensor
    second_scales: Tensor

    @property
    def packed(self) -> bool:
        """Whether two codes share a byte."""
        return self.first.dtype == torch.uint8

    @property
    def rows(self) -> int:
        return self.first.shape[:-1].numel()


class Settings(NamedTuple):
    """Those of a group of parameters."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@torch.library.custom_op(
    "foretell::coded_adamw_", mutates_args=("weights", "first", "first_scales", "second", "second_scales"),
    schema="(Tensor(a!)[] weights, Tensor[] grads, Tensor(b!)[] first, Tensor(c!)[] first_scales, Tensor(d!)[] second, "
           "Tensor(e!)[] second_scales, Tensor[] steps, Tensor? skip, float lr, float beta1, float beta2, float eps, "
           "float weight_decay, bool decoupled) -> ()",
)  # fmt: skip
def coded_adamw_(
    weights: Sequence[Tensor], grads: Sequence[Tensor], first: Sequence[Tensor], first_scales: Sequence[Tensor],
    second: Sequence[Tensor], second_scales: Sequence[Tensor], steps: Sequence[Tensor], skip: Tensor | None,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, decoupled: bool,
) -> None:  # fmt: skip
    """Update weights, codes and scales, given steps that count this one; where `skip` is 1 nothing changes."""
    settings = Settings(lr, beta1, beta2, eps, weight_decay, decoupled)
    corrections = _corrections(steps, settings)
    for number, (weight, grad, *kept) in enumerate(zip(weights, grads, first, first_scales, second, second_scales, strict=True)):
        moments = Moments(*kept)
        if not weight.numel():
            continue
        if weight.is_cuda and _has_triton():
            from foretell.trace.moments.kernel import update

            update(weight, grad.contiguous(), moments, corrections, number, skip, settings)
        else:
            _update(weight, grad.contiguous(), moments, corrections[:, number], skip, settings)


@coded_adamw_.register_fake
def _(*_: object) -> None:
    pass


def _corrections(steps: Sequence[Tensor], settings: Settings) -> Tensor:
    """For every parameter, by how many updates it has had: the size of a step, and what roots of second moments are multiplied by."""
    counted = torch.stack(list(steps)).double()
    first, second = ((1 - torch.pow(beta, counted)).float() for beta in (settings.beta1, settings.beta2))
    return torch.stack((torch.full_like(first, settings.lr).div_(first), codes.root_(second).reciprocal_()))


def _update(weight: Tensor, grad: Tensor, moments: Moments, corrections: Tensor, skip: Tensor | None, settings: Settings) -> None:
    """A few rows at a time."""
    rows = moments.rows
    table, gradients = weight.view(rows, -1), grad.view(rows, -1)
    kept = Moments(*(one.view(rows, -1) for one in moments))
    most = max(1, _AT_ONCE // table.shape[1])
    for row in range(0, rows, most):
        some = slice(row, row + most)
        _rows(table[some], gradients[some], Moments(*(one[some] for one in kept)), corrections, skip, settings)


def _rows(weight: Tensor, grad: Tensor, moments: Moments, corrections: Tensor, skip: Tensor | None, settings: Settings) -> None:
    rows, length = weight.shape
    blocks = moments.first_scales.shape[1]
    width = blocks * BLOCKS["int4" if moments.packed else "int8"]
    first, second, spare = torch.empty(3, rows * width, device=weight.device).unbind()
    scales = [one.reshape(-1) for one in (moments.first_scales, moments.second_scales)]
    codes.decode_first(_unpacked(moments.first, moments.packed, True, width), scales[0], first, spare)
    codes.decode_second(_unpacked(moments.second, moments.packed, False, width), scales[1], second)
    values = F.pad(weight.float(), (0, width - length)).view(-1)
    values = _adamw(values, F.pad(grad.float(), (0, width - length)).view(-1), first, second, corrections, settings)
    keep = None if skip is None else skip > 0
    _put(weight, values.view(rows, width)[:, :length], keep)
    steps = (codes.FEW_SIGNED, codes.FEW_UNSIGNED) if moments.packed else (codes.SIGNED, codes.UNSIGNED)
    fresh = torch.empty((rows, width), dtype=torch.int8, device=weight.device), torch.empty((rows, width), dtype=torch.uint8, device=weight.device)
    codes.encode_first(first, fresh[0].view(-1), scales[0], spare, keep, steps[0])
    codes.encode_second(second, fresh[1].view(-1), scales[1], spare, keep, steps[1])
    for kept, made in zip((moments.first, moments.second), fresh, strict=True):
        _put(kept, _packed(made[:, :length]) if moments.packed else made[:, :length], keep)
    for kept, made in zip((moments.first_scales, moments.second_scales), scales, strict=True):
        kept.copy_(made.view(rows, blocks))


def _adamw(weight: Tensor, grad: Tensor, first: Tensor, second: Tensor, corrections: Tensor, settings: Settings) -> Tensor:
    """The new weight; moments change in place."""
    if settings.decoupled:
        weight = weight * (1 - settings.lr * settings.weight_decay)
    else:
        grad = grad + weight * settings.weight_decay
    first.mul_(settings.beta1).add_(grad * (1 - settings.beta1))
    second.mul_(settings.beta2).add_((grad * grad).mul_(1 - settings.beta2))
    root = codes.root_(second.clone()).mul_(corrections[1]).add_(settings.eps)
    return weight - (first / root).mul_(corrections[0])


def _put(into: Tensor, fresh: Tensor, keep: Tensor | None) -> None:
    into.copy_(fresh if keep is None else torch.where(keep, into, fresh.to(into.dtype)))


def _unpacked(kept: Tensor, packed: bool, signed: bool, width: int) -> Tensor:
    """Codes, one in a byte, of whole blocks."""
    if packed:
        kept = torch.stack((kept & 15, kept >> 4), dim=-1).view(len(kept), -1)
        kept = (kept ^ 8).to(torch.int8) - 8 if signed else kept
    return F.pad(kept, (0, width - kept.shape[1]))[:, :width].reshape(-1)


def _packed(made: Tensor) -> Tensor:
    """Two codes in a byte, the first in its lower half."""
    pairs = F.pad(made.view(torch.uint8) if made.is_contiguous() else made.contiguous().view(torch.uint8), (0, made.shape[1] % 2))
    return (pairs[:, ::2] & 15) | (pairs[:, 1::2] << 4)
