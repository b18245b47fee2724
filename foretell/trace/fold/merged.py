"""Several ops of a block as one: what they take together, so that a long step can be costed in few ops. Plain data.

Lowering, prices, timeline and allocator treat such an op like any other. What shapes say of a plain op, its attributes say
of this one: device seconds, host seconds, whether it calls cuBLAS, and what it holds besides its results at its highest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from foretell.trace.types import Op, Ref

MERGED = "foretell.merged"
NO_PRODUCT, PRODUCT, BIASED_PRODUCT = 0, 1, 2
"""Whether cuBLAS is called, and whether with a bias: it takes a workspace once for each."""
_FIXED = 6


class Merged(NamedTuple):
    """What the attributes of a merged op say."""

    seconds: float
    """On the device."""
    host_seconds: float
    family: str
    """Of the ops that most of the seconds go to."""
    products: int = NO_PRODUCT
    hungry_seconds: float = 0.0
    """Of its ops that a power limit slows down."""
    slower: float = 0.0
    """How much longer it takes beside a collective."""
    scratch: tuple[int, ...] = ()
    """Bytes of each tensor that comes and goes inside and is there at the highest point."""


def merged(
    about: Merged, inputs: Sequence[Ref], outputs: Sequence[Ref], module: str, phase: str, flops: int,
    allocates: Sequence[int], frees: Sequence[int],
) -> Op:  # fmt: skip
    """One op that stands for several."""
    attrs: tuple[int | float | str | bool, ...] = (
        about.seconds, about.host_seconds, about.family, about.products, about.hungry_seconds, about.slower, *about.scratch,
    )  # fmt: skip
    return Op(MERGED, tuple(inputs), tuple(outputs), module, phase, flops, tuple(allocates), tuple(frees), attrs)


def about(op: Op) -> Merged:
    """What a merged op says of itself."""
    seconds, host, family, products, hungry, slower = op.attrs[:_FIXED]
    return Merged(float(seconds), float(host), str(family), int(products), float(hungry), float(slower), tuple(map(int, op.attrs[_FIXED:])))
