"""Rules for calls that differ where the ranks share positions: attention, and losses over rows. Plain data, no torch.

All other calls follow the rules of `plan.tensor.rules`: a dimension is a dimension, whatever it counts.
"""

from __future__ import annotations

from typing import Any

from foretell.plan.tensor.products import attention as by_heads
from foretell.plan.tensor.types import Operand, Place, Refuse, Result, Setting, Shard
from foretell.plan.tensor.views import Rule


def attention(
    s: Setting, query: Operand, key: Operand, value: Operand, attn_mask: Operand | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Result:  # fmt: skip
    """Every rank attends from its own positions to all: keys and values are gathered, queries are not."""
    place = query.place
    if place is None and any(isinstance(x.place, Shard) and x.place.dim == len(x.shape) - 2 for x in (key, value)):
        raise Refuse("keys are split and queries are not")
    if not isinstance(place, Shard) or place.dim != len(query.shape) - 2:
        return by_heads(s, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if is_causal and len(place.segments) > 1:
        raise Refuse("causal attention over positions in several parts")
    want: dict[int, Place] = {query.slot: place}
    if attn_mask is not None:
        rows = len(attn_mask.shape) - 2
        split = rows >= 0 and attn_mask.shape[rows] == place.size
        want[attn_mask.slot] = place.at(rows) if split else None
    args = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return Result(place, want, args, {}, special="context_attention")


def cross_entropy(
    s: Setting, logits: Operand, target: Operand, weight: Operand | None = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Result:  # fmt: skip
    """Every rank's own rows. The mean is over the rows of all ranks that count."""
    place = logits.place
    if not isinstance(place, Shard):
        return Result(None)
    if place.dim == min(1, len(logits.shape) - 1):
        raise Refuse("a cross entropy over split classes")
    if size_average is not None or reduce is not None or len(target.shape) != len(logits.shape) - 1:
        raise Refuse("a cross entropy with soft targets")
    if reduction == "mean" and weight is not None:
        raise Refuse("a mean that weighs classes")
    rows = place.at(place.dim - (place.dim > 1))
    if reduction == "none":
        return Result(rows, {logits.slot: place, target.slot: rows})
    args = (rows, logits, target, weight, ignore_index, reduction, label_smoothing)
    return Result(None, {logits.slot: place}, args, {}, special="context_cross_entropy")


RULES: dict[str, Rule] = {"scaled_dot_product_attention": attention, "cross_entropy": cross_entropy}
