"""Rules for calls of layers with an adapter. Plain data, no torch.

    low rank, x: ..I, A: RI, B: OR → ..O     a letter that the ranks share: of the samples or positions, I or O

Where outputs are shared B is split by rows, A is whole and its gradient is the sum of the ranks'. Where inputs are shared A is split
by columns; every rank's small product goes through the whole of B, so that the answer is partial as that of the base is, and both
are summed up at once; the gradient of B is the sum of the ranks'. Packed weights and DoRA's lengths are of whole layers.
"""

from __future__ import annotations

from dataclasses import replace
from string import ascii_letters
from typing import Any

from foretell.plan.tensor.products import product
from foretell.plan.tensor.types import Operand, Refuse, Result, Setting, Shard
from foretell.plan.tensor.views import Rule

APART = "apart"
"""What is run is Python, which must see this rank's part as a tensor like any other."""


def low_rank_product(s: Setting, x: Operand, a: Operand, b: Operand, *_: Any) -> Result:
    batch = ascii_letters[: len(x.shape) - 1]
    return replace(product(s, [(x, f"{batch}I"), (a, "RI"), (b, "OR")], f"{batch}O"), special=APART)


def adapted_product(
    s: Setting, x: Operand, a: Operand, b: Operand, inner: float, outer: float, round_first: bool, bias: Operand | None,
    weight: Operand | None, *_: Any,
) -> Result:  # fmt: skip
    if weight is None:
        return _by_rows(s, x)
    batch = ascii_letters[: len(x.shape) - 1]
    factors = [(x, f"{batch}I"), (a, "RI"), (b, "OR"), (weight, "OI")]
    return replace(product(s, factors, f"{batch}O", (bias, "O") if bias is not None else None), special=APART)


def packed_product(s: Setting, x: Operand, *_: Any) -> Result:
    return _by_rows(s, x)


def dora_product(s: Setting, x: Operand, result: Operand, *_: Any) -> Result:
    return _by_rows(s, x, result)


def _by_rows(s: Setting, *along: Operand) -> Result:
    """Every row of the input by itself, with weights that are whole."""
    found = [x.place for x in along if isinstance(x.place, Shard)]
    if not found:
        return Result(None)
    if any(place != found[0] or place.dim >= len(along[0].shape) - 1 for place in found):
        raise Refuse("a layer with a packed weight or DoRA is whole")
    return Result(found[0], dict.fromkeys((x.slot for x in along), found[0]), special=APART)


RULES: dict[str, Rule] = {
    "low_rank_product": low_rank_product, "adapted_product": adapted_product, "packed_product": packed_product, "dora_product": dora_product,
}  # fmt: skip
