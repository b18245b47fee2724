"""What would make a step faster: every change is predicted by the path of the answer itself before it is told.

    legal changes (faster_ways) ─► each predicted ─► those that gain, joined one by one, each joint predicted ─► ranked

A change counts by what a step gets through in a second, so that larger batches compare with faster ones. Joining is greedy: the
largest gain first, another kept where the joint is faster still; at last other ways of an axis are tried in the joint's place. Every
gain has a range (gain_range); a change that may gain nothing is no advice, and told apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from foretell.errors import ForetellError
from foretell.quantities import FITS, NO, TIGHT, Prediction
from foretell.search.advice import faster_ways
from foretell.search.advice.faster_ways import Faster, SpeedRequest
from foretell.search.advice.gain_range import MEASURE, WIDE, gain_range
from foretell.search.advice.ways import Attempt, Prepare

GAINS = 1.01
"""Times as fast, from which a change is worth telling."""
JOINS = 1.005
"""The same of one more in a joint."""


@dataclass(frozen=True, kw_only=True)
class Gain:
    """One change, or several together, and what was predicted of the step with it."""

    change: str
    flag: str
    """For the command line of `fit`."""
    code: str
    """For a plain loop."""
    maths: str
    """exact, bounded (rounding) or changes the model."""
    costs: str
    speedup: float
    """Times as many samples or tokens a second."""
    low: float
    high: float
    """Nine of ten speedups are expected between these: hosts differ, and a change is not known exactly."""
    step_seconds: float
    per_second: float
    device_bytes: int
    saves_bytes: int
    """Of device memory; negative where it needs more."""
    verdict: str
    per_billion: float | None = None
    """Money for a billion tokens or samples."""
    joins: int = 1
    """Changes in it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `fit`."""

    @property
    def sure(self) -> bool:
        """Whether it is faster even at the low end."""
        return self.low > 1.0

    @property
    def told_range(self) -> str:
        """Low and high where they are far apart, as they are where a step waits for its host."""
        return f"{self.low:.2f} to {self.high:.2f}x" if self.high > self.low * WIDE else ""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What would make a step faster, the largest gain first."""

    gains: tuple[Gain, ...]
    """Single changes that are faster even at the low end of their range."""
    joint: Gain | None
    """The best of them together; None where no two join, or where even that may gain nothing."""
    tried: int
    whole: bool
    """Whether there was time for all."""
    unsure: tuple[Gain, ...] = ()
    """Single changes whose predicted gain is within what hosts differ by: to be measured."""


def faster(
    answer: Prediction, asked: SpeedRequest, attempt: Attempt, *, seconds: float = 600.0, joins: bool = True, prepare: Prepare = lambda _, __: None,
    progress: Callable[[str], None] = lambda _: None,
) -> Advice:  # fmt: skip
    """Of a step whose time is known; no change is begun after so many seconds. `joins`: look for the best of them together too, and for
    how large a batch still gains."""
    if answer.throughput is None or answer.time is None:
        return Advice(gains=(), joint=None, tried=0, whole=True)
    search = _Search(answer, asked, attempt, seconds, progress)
    single, batches = faster_ways.ways(asked, answer), list(faster_ways.batches(asked))
    batches = batches if joins else batches[:1]
    progress("predicting what would make it faster")
    prepare([way.options for way in (*single, *batches[:1])], seconds)
    search.singles(single)
    search.larger(batches)
    joint = search.joint() if joins else None
    gains, unsure = told_apart([(way.axis, gain) for way, gain in search.found])
    joint = joint if joint is not None and joint.sure else None
    return Advice(gains=gains, joint=joint, tried=search.tried, whole=not search.late, unsure=unsure)


def told_apart(found: Sequence[tuple[str, Gain]]) -> tuple[tuple[Gain, ...], tuple[Gain, ...]]:
    """Axes and single changes → those that gain even at the low end, and the others that may gain; the largest gain first, and of batches
    and of ways to compile the best alone."""
    ranked = sorted(((axis, gain) for axis, gain in found if gain.speedup >= GAINS), key=lambda one: (not one[1].sure, -one[1].speedup))
    first = {axis: next((gain for other, gain in ranked if other == axis), None) for axis in ("batch", "compile")}
    best = [gain for axis, gain in ranked if first.get(axis, gain) is gain]
    return tuple(gain for gain in best if gain.sure), tuple(gain for gain in best if not gain.sure)


@dataclass
class _Search:
    answer: Prediction
    asked: SpeedRequest
    attempt: Attempt
    seconds: float
    progress: Callable[[str], None]
    found: list[tuple[Faster, Gain]] = field(default_factory=list)
    tried: int = 0
    late: bool = False
    began: float = field(default_factory=time.monotonic)

    def singles(self, ways: list[Faster]) -> None:
        for way in ways:
            self._try(way)

    def larger(self, batches: Sequence[Faster]) -> None:
        """Larger micro-batches, until one does not fit or gains no more."""
        before = 1.0
        for way in batches:
            gain = self._try(way)
            if gain is None or gain.speedup < before * GAINS:
                return
            before = gain.speedup

    def joint(self) -> Gain | None:
        """The best single one with others that help it."""
        ranked = sorted(((way, gain) for way, gain in self.found if gain.speedup >= GAINS), key=lambda one: -one[1].speedup)
        if not ranked:
            return None
        (best, top), rest, parts = (_marked(*ranked[0]), ranked[0][1]), ranked[1:], [_marked(*ranked[0])]
        for plain, alone in [*rest, *((one, gain) for one, gain in self.found if gain.speedup < GAINS)]:
            way = _marked(plain, alone)
            if any(way.axis == part.axis for part in parts):
                continue
            gain = self._try(best.beside(way), joins=len(parts) + 1)
            if gain is not None and gain.speedup > top.speedup * JOINS:
                best, top, parts = best.beside(way), gain, [*parts, way]
        for way in [_marked(*one) for one in self.found]:
            place = next((number for number, part in enumerate(parts) if part.axis == way.axis and part != way), None)
            if place is None or "+" in way.axis or len(parts) == 1:
                continue
            other = [*parts[:place], way, *parts[place + 1 :]]
            joined = other[0]
            for part in other[1:]:
                joined = joined.beside(part)
            gain = self._try(joined, joins=len(other))
            if gain is not None and gain.speedup > top.speedup * JOINS:
                best, top, parts = joined, gain, other
        return top if len(parts) > 1 else None

    def _try(self, way: Faster, joins: int = 1) -> Gain | None:
        """Predict one; None where it cannot be done to this model, or does not fit."""
        self.late = self.late or time.monotonic() - self.began > self.seconds
        if self.late or not faster_ways.legal(self.asked, way.options):
            return None
        self.progress(f"predicting {way.flag}")
        self.tried += 1
        try:
            then = self.attempt(way.options)
        except ForetellError:
            return None
        base = self.answer.throughput
        if then.throughput is None or then.time is None or base is None or self.answer.time is None or not self._fits(then):
            return None
        if "overrides" in way.options and not faster_ways.pads(self.answer, then):
            return None
        speedup = then.throughput.per_second / base.per_second
        low, high = gain_range(self.answer.time, then.time, speedup, way.axis, serial=self.asked.cluster.device.backend == "cpu")
        gain = Gain(
            change=way.change, flag=way.flag, code=way.code, maths=way.maths, costs=way.costs, speedup=speedup, low=low, high=high,
            step_seconds=then.time.step_seconds, per_second=then.throughput.per_second,
            device_bytes=then.memory.device_bytes, saves_bytes=self.answer.memory.device_bytes - then.memory.device_bytes,
            verdict=then.verdict, per_billion=then.cost.per_billion if then.cost is not None else None, joins=joins, options=way.options,
        )  # fmt: skip
        if joins == 1:
            self.found.append((way, gain))
        return gain

    def _fits(self, then: Prediction) -> bool:
        """What did not fit need not; nothing else may become tight."""
        return then.verdict == FITS or self.answer.verdict == NO or (then.verdict == TIGHT and self.answer.verdict == TIGHT)


def _marked(way: Faster, alone: Gain) -> Faster:
    """A way for a joint, which says so where it may gain nothing by itself."""
    if alone.sure or alone.speedup < GAINS:
        return way
    return replace(way, costs="; ".join(filter(None, (way.costs, f"{way.change} {MEASURE}"))))
