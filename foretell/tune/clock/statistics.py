"""From pairs of times to a verdict. Pure.

Two programs take turns, a b b a a b b a ..., so that what drifts (clock, heat, other users) falls on both. Of every pair the log of
the ratio is kept; its median is the speedup, and resampling the pairs says how sure that is. A mean would follow the few pairs in
which something else ran.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

RESAMPLES = 2000
LEAST_PAIRS = 10
LEAST_GAIN = 1.02
"""Speedup that the lower end of the interval must exceed."""
BELOW_FLOOR = 0.9
"""Share of the floor below which a time is a lie and not a measurement's error."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Times of a baseline over times of a candidate: above 1 the candidate is faster."""

    speedup: float
    low: float
    high: float
    """Between which nine and a half of ten resamples lie."""
    pairs: int

    @property
    def sure(self) -> bool:
        return self.pairs >= LEAST_PAIRS and self.low > LEAST_GAIN


def ratio(baseline: Sequence[float], candidate: Sequence[float], *, seed: int = 0) -> Ratio:
    """Of pairs measured side by side."""
    if len(baseline) != len(candidate) or not baseline:
        raise ValueError(f"{len(baseline)} times and {len(candidate)} make no pairs")
    logs = np.log(np.asarray(baseline)) - np.log(np.asarray(candidate))
    drawn = np.random.default_rng(seed).integers(len(logs), size=(RESAMPLES, len(logs)))
    medians = np.median(logs[drawn], axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return Ratio(speedup=math.exp(float(np.median(logs))), low=math.exp(float(low)), high=math.exp(float(high)), pairs=len(logs))


def turns(pairs: int) -> list[bool]:
    """Whose turn it is, the candidate's where true: a b b a."""
    return [which for place in range(pairs) for which in ((False, True) if place % 2 == 0 else (True, False))]


@dataclass(frozen=True, kw_only=True)
class ShapeResult:
    """One declared shape."""

    name: str
    floor_seconds: float
    """To move the least bytes the op can do with; 0 where that is not known."""
    candidate_seconds: float
    baselines: Mapping[str, float]
    """Median seconds of each."""
    ratios: Mapping[str, Ratio]

    @property
    def best(self) -> str:
        """The baseline that counts: the one the candidate gains least on."""
        return min(self.ratios, key=lambda name: self.ratios[name].speedup)

    @property
    def of_floor(self) -> float:
        """Share of the floor's speed that the candidate reaches."""
        return self.floor_seconds / self.candidate_seconds if self.candidate_seconds else math.inf


@dataclass(frozen=True, kw_only=True)
class SpeedVerdict:
    """Whether a kernel is faster than the best of its baselines, on the worst of its shapes."""

    faster: bool
    check: str
    """floor or baseline, where it is not; unsure where more pairs are needed."""
    reason: str
    shapes: tuple[ShapeResult, ...]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "best": {one.name: one.best for one in self.shapes}}


def judged(shapes: Sequence[ShapeResult]) -> SpeedVerdict:
    """By the worst shape: a mean over shapes can be bought with one that is not computed."""
    for one in shapes:
        if one.candidate_seconds < BELOW_FLOOR * one.floor_seconds:
            text = f"{one.name}: {_micro(one.candidate_seconds)}, and moving its bytes alone takes {_micro(one.floor_seconds)}: something is not done"
            return SpeedVerdict(faster=False, check="floor", reason=text, shapes=tuple(shapes))
    worst = min(shapes, key=lambda one: one.ratios[one.best].low)
    found = worst.ratios[worst.best]
    text = f"{found.speedup:.3f}× ({found.low:.3f} to {found.high:.3f}) beside {worst.best} at {worst.name}"
    if found.sure:
        return SpeedVerdict(faster=True, check="", reason=text, shapes=tuple(shapes))
    check = "baseline" if found.speedup <= LEAST_GAIN or found.high <= LEAST_GAIN else "unsure"
    return SpeedVerdict(faster=False, check=check, reason=text, shapes=tuple(shapes))


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs"
