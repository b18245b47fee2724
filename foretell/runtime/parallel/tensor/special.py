"""Calls whose local form is another call: rows of a split table, cross entropy over split classes, random numbers.

Each takes the team and the function that was called, then that function's arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.plan.tensor.adapted import APART
from foretell.plan.tensor.types import PARTIAL, Shard
from foretell.runtime.parallel.context.special import CONTEXT
from foretell.runtime.parallel.tensor.exchange import TensorGroup


def embedding(
    team: TensorGroup, _: Any, input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Tensor:  # fmt: skip
    """Rows this rank has and zeros for those of other ranks, summed up: kept partial, so would be all that is added."""
    rows = weight.shape[0]
    ids = input - team.rank * rows
    away = (ids < 0) | (ids >= rows)
    mine = None
    if padding_idx is not None:
        padding_idx = padding_idx % (rows * team.size) - team.rank * rows
        mine = padding_idx if 0 <= padding_idx < rows else None
    found = F.embedding(ids.masked_fill(away, 0), weight, mine)
    found = found.masked_fill(away[..., None], 0.0)
    return team.bring(found, PARTIAL, team.setting.stream(tuple(found.shape)), False)


def randomly(team: TensorGroup, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Every rank draws for its own part."""
    first = next(value for value in args if isinstance(value, Tensor))
    if not type(first).__name__.startswith(("Tensor", "SplitTensor", "Parameter")):
        return func(*args, **kwargs)  # fake, or a compiler's: no number can be drawn now
    with team.own_random(first.device):
        return func(*args, **kwargs)


def apart(_: TensorGroup, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Python code gets this rank's parts as tensors like any other: it would keep them for its backward as they came."""
    return func(*(x.view_as(x) if isinstance(x, Tensor) and hasattr(x, "_spec") else x for x in args), **kwargs)


def cross_entropy_classes(
    team: TensorGroup, _: Any, input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """Of logits whose classes are split: only a maximum, a sum and one logit per row go between the ranks."""
    logits = input.movedim(1, -1) if input.dim() > 1 else input
    losses = _ClassesSplit.apply(logits, target, ignore_index, team)
    found = _reduced(losses.sum(), target, ignore_index, reduction)
    return found if torch.is_autocast_enabled(input.device.type) else found.to(input.dtype)


def cross_entropy_rows(
    team: TensorGroup, _: Any, input: Any, target: Tensor, weight: Tensor | None = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """Of logits whose rows are split: every rank sums its own rows."""
    place = input._spec.place
    mine = team.part(target, Shard(place.dim - (place.dim > 1), place.segments))
    total = F.cross_entropy(input, mine, ignore_index=ignore_index, reduction="sum")
    return _reduced(team.bring(total, PARTIAL, None, False), target, ignore_index, reduction)


def _reduced(total: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    return total / (target != ignore_index).sum() if reduction == "mean" else total


class _ClassesSplit(torch.autograd.Function):
    """Cross entropy of every row, zero where the target is to be ignored; computed in fp32 at least."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignore_index: int, team: TensorGroup) -> Tensor:
        classes = logits.shape[-1]
        wide = torch.promote_types(logits.dtype, torch.float32)
        largest = team.all_reduce(logits.amax(-1).to(wide), "max")
        kept = target != ignore_index
        mine = target - team.rank * classes
        here = kept & (mine >= 0) & (mine < classes)
        index = torch.where(here, mine, 0)[..., None]
        shifted = logits.to(wide) - largest[..., None]
        chosen = torch.where(here, shifted.gather(-1, index)[..., 0], 0)
        powers = shifted.exp_()
        both = team.all_reduce(torch.stack([powers.sum(-1), chosen]))
        ctx.save_for_backward(powers.div_(both[0][..., None]).to(logits.dtype), index, here, kept)
        return torch.where(kept, both[0].log() - both[1], 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        shares, index, here, kept = ctx.saved_tensors
        grad = torch.where(kept, grad, 0)[..., None].to(shares.dtype)
        found = (shares * grad).scatter_add(-1, index, torch.where(here[..., None], -grad, 0))
        return found, None, None, None


def _reshape(_: TensorGroup, __: Any, x: Tensor, shape: Any) -> Tensor:
    return x.reshape(shape)


def _expand(_: TensorGroup, __: Any, x: Tensor, shape: Any) -> Tensor:
    return x.expand(shape)


SPECIAL: dict[str, Callable[..., Any]] = {
    "embedding": embedding, "random": randomly, "cross_entropy_classes": cross_entropy_classes,
    "cross_entropy_rows": cross_entropy_rows, "reshape": _reshape, "expand": _expand, APART: apart, **CONTEXT,
}  # fmt: skip
