"""The clock that a device holds under load: short bursts run cool, a training step runs at the power limit.

A device's kernels are measured in bursts. Held for longer, matrix products ask for more watts than the board may draw; its clock
falls until the mean over some tens of milliseconds is the limit. Ops that wait for memory ask for less, and so lend their watts to
the products between them. With w the share of products in the seconds around an op (at burst speed), each s times as long:

    w · compute · s^(1 - exponent) + (1 - w) · other  =  w · s + 1 - w          watts as shares of the limit
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

WINDOW_SECONDS = 0.05
"""Over which the board's power is taken to be averaged; assumed."""
MOST = 2.0


@dataclass(frozen=True)
class Clocks:
    """What a device would draw at burst speed, as shares of its power limit."""

    compute: float
    other: float
    exponent: float
    """Of the power of products in their rate: more than one, since a lower clock needs less voltage."""

    def slower(self, share: float) -> float:
        """How much longer products take where they are this share of the work."""
        if share <= 0 or share * self.compute + (1 - share) * self.other <= 1:
            return 1.0
        low, high = 1.0, MOST
        for _ in range(30):
            middle = (low + high) / 2
            drawn = share * self.compute * middle ** (1 - self.exponent) + (1 - share) * self.other
            low, high = (middle, high) if drawn > share * middle + 1 - share else (low, middle)
        return low

    def at(self, scale: float) -> Clocks:
        """Of a board that has so many times fewer watts for the same work."""
        return Clocks(self.compute * scale, min(self.other * scale, 1.0), self.exponent)

    def to_dict(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, float]) -> Clocks:
        return cls(data["compute"], data["other"], data["exponent"])


def slowdowns(work: Sequence[tuple[float, float]], clocks: Clocks) -> list[float]:
    """For ops in their order (seconds of products in them, seconds of all of them, at burst speed): how much longer the products
    of each take."""
    if not work:
        return []
    products, seconds = np.array(work, dtype=np.float64).T
    ends = np.concatenate([[0.0], seconds.cumsum()])
    busy = np.concatenate([[0.0], products.cumsum()])
    middle = ends[1:] - seconds / 2
    first, last = np.maximum(middle - WINDOW_SECONDS / 2, 0.0), np.minimum(middle + WINDOW_SECONDS / 2, ends[-1])
    share = (np.interp(last, ends, busy) - np.interp(first, ends, busy)) / np.maximum(last - first, 1e-12)
    return [float(factor) for factor in np.interp(share, *_curve(clocks))]


@functools.cache
def _curve(clocks: Clocks) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    shares = np.linspace(0.0, 1.0, 201)
    return shares, np.array([clocks.slower(share) for share in shares.tolist()])


OTHER, EXPONENT = 0.5, 1.55
"""As fitted on an H200 to products held for 26 s and inside three kinds of steps (benchmarks/results/clocks.jsonl)."""


def learn(held: float) -> Clocks | None:
    """From how much longer products take that are repeated and nothing else; None where they do not slow down."""
    if held <= 1.01:
        return None
    return Clocks(round(held**EXPONENT, 3), OTHER, EXPONENT)
