"""Which parameters have moments in codes, and the shapes of codes and scales. Plain data, no torch.

A row is what lies behind the leading dimensions of a parameter, and no block crosses one: ranks that share rows have the same
blocks as one rank has, and so the same codes.

    weight      (768, 3072)
    int8        codes (768, 3072)    scales (768, 12)     one for every 256 elements of a row
    int4        codes (768, 1536)    scales (768, 24)     one for every 128; two codes in a byte
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from foretell.trace.recipe import BLOCK

BLOCKS = {"int8": BLOCK, "int4": 128}
"""Format → elements that share one scale."""
LEAST = 4096
"""Elements: a smaller parameter keeps its moments as they are."""
SHORT = 64
"""Elements: dimensions are counted as part of a row until it is as long; a parameter with shorter ones keeps its moments."""
FIRST, SECOND = "exp_avg", "exp_avg_sq"
CODE, SCALE, EARLIER = "_code", "_unit", "_scale"
"""Behind a moment's name: its codes, and the scales of its blocks; what these were called when codes were other roots."""


def leading(shape: Sequence[int]) -> int:
    """How many dimensions count rows."""
    count = len(shape) - 1
    while count > 1 and prod(shape[count:]) < SHORT:
        count -= 1
    return count


def has_codes(shape: Sequence[int]) -> bool:
    """Whether moments of a parameter of this shape have codes; norms and biases, and whatever is small, have none."""
    return len(shape) > 1 and prod(shape) >= LEAST and prod(shape[leading(shape) :]) >= SHORT


def shapes(shape: Sequence[int], state_format: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """What is kept for a parameter with codes: name → shape and dtype."""
    count = leading(shape)
    rows, length = tuple(shape[:count]), prod(shape[count:])
    wide = (*rows, length if state_format == "int8" else -(-length // 2))
    scales = (*rows, -(-length // BLOCKS[state_format]))
    signed = "int8" if state_format == "int8" else "uint8"
    return {
        FIRST + CODE: (wide, signed), FIRST + SCALE: (scales, "float32"),
        SECOND + CODE: (wide, "uint8"), SECOND + SCALE: (scales, "float32"),
    }  # fmt: skip
