"""Calls whose local form is another call where the ranks share positions: attention, and cross entropy over rows.

Each takes the team and the function that was called, then the arguments that its rule gives.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.plan.tensor.types import PARTIAL, Shard
from foretell.runtime.check import dry_run

if TYPE_CHECKING:
    from foretell.runtime.parallel.context.exchange import ContextTeam


def attention(
    team: ContextTeam, _: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool,
    scale: float | None, grouped: bool,
) -> Tensor:  # fmt: skip
    """From this rank's positions to those of all ranks; where it is causal, to those up to its own."""
    options: dict[str, Any] = {"dropout_p": dropout, "scale": scale, "enable_gqa": grouped}
    with team.own_random(query.device) if dropout > 0 else nullcontext():
        if not causal:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)
        rows = query.shape[-2]
        start = team.rank * rows
        seen = min(start + rows, key.shape[-2])
        key, value = key.narrow(-2, 0, seen), value.narrow(-2, 0, seen)
        if not start and seen == rows:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, **options)
        if _has_kernel(query.device) and seen == start + rows:
            found = team.on_parts(_lower_right(rows, seen, options), query, key, value)
            if found is not None:
                return found
        mask = torch.ones(rows, seen, dtype=torch.bool, device=query.device).tril_(start)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)


def _has_kernel(device: torch.device) -> bool:
    """Whether attention from the last rows alone needs no mask on this device."""
    return device.type == "cuda" or (dry_run.active is not None and dry_run.active.lower_right is not None)


def _lower_right(rows: int, columns: int, options: Any) -> Callable[..., Tensor | None]:
    """Causal attention of the last rows of a square, with kernels that need no mask."""
    if dry_run.active is not None and (attend := dry_run.active.lower_right) is not None:
        return lambda query, key, value: attend(query, key, value, options)
    from torch.nn.attention.bias import CausalBias, causal_lower_right

    return lambda query, key, value: CausalBias._dispatch(
        query, key, value, causal_lower_right(rows, columns), **options
    )


def cross_entropy(
    team: ContextTeam, _: Any, place: Shard, logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int,
    reduction: str, smoothing: float,
) -> Tensor:  # fmt: skip
    """The sum over this rank's rows, summed over ranks; a mean is over the rows of all ranks that are not ignored."""
    mine = team.part(target, place)
    total = F.cross_entropy(
        logits, mine, weight, ignore_index=ignore_index, reduction="sum", label_smoothing=smoothing
    )
    total = team.bring(total, PARTIAL, None, False)
    return total / (target != ignore_index).sum() if reduction == "mean" else total


CONTEXT: dict[str, Callable[..., Any]] = {"context_attention": attention, "context_cross_entropy": cross_entropy}
