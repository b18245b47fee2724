"""What the stand-ins of a box are told: how long messages take, and when those of other stages come. And what was asked of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from foretell.simulate.arrivals import Arrivals

Seconds = Callable[[str, int, tuple[int, ...]], float]
"""Operation, bytes of its larger buffer, global ranks that take part → seconds."""


@dataclass(frozen=True, kw_only=True)
class BoxScript:
    """How messages go."""

    seconds: Seconds = lambda *_: 0.0
    channels: Callable[[int], int] = lambda _: 1
    """Bytes → thread blocks of its kernel."""
    arrivals: Arrivals = field(default_factory=Arrivals)
    """Of a pipeline; empty without one."""
    free: bool = False
    """Messages take no time; what is received is filled as fast as memory allows."""


@dataclass(frozen=True)
class BoxMessage:
    """Something this rank asked of others."""

    operation: str
    """all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, send, receive, ..."""
    nbytes: int
    """Of the larger buffer."""
    ranks: tuple[int, ...]
    """That take part, this one included."""
    seconds: float = 0.0
