"""Sessions as figures: share solved, share faster by p, geometric mean. A transcript scores the same whenever it is replayed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from foretell.tune.generate.rounds import SessionAnswer

FAST = (1.0, 1.2, 2.0)


@dataclass(frozen=True, kw_only=True)
class SessionScore:
    """Of several tasks."""

    tasks: int
    at_first: float
    """Share whose first kernel is right."""
    solved: float
    """Share with any kernel that is."""
    faster: tuple[tuple[float, float], ...]
    """p → share that is right and faster than p times the reference."""
    geometric_mean: float
    """Of the best speedups of those solved; 0 where none is."""
    kernels: int
    money: float

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "faster": {f"{p:g}": share for p, share in self.faster}}


def score(sessions: Sequence[SessionAnswer]) -> SessionScore:
    count = max(1, len(sessions))
    best = [one.best.speedup for one in sessions if one.best is not None]
    first = sum(bool(one.variants) and one.variants[0].measured.reward > 0 for one in sessions)
    return SessionScore(
        tasks=len(sessions), at_first=first / count, solved=len(best) / count,
        faster=tuple((p, sum(one > p for one in best) / count) for p in FAST),
        geometric_mean=math.exp(sum(map(math.log, best)) / len(best)) if best else 0.0,
        kernels=sum(one.asked for one in sessions), money=sum(one.spent for one in sessions),
    )  # fmt: skip
