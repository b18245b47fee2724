"""Slow ranks from what steps took on each: always slow, and slow now and then. Pure: numbers in, findings out.

Nothing here compares clocks: a step of a rank is the time it works and the time it waits for others, and who is slow works longer
while the others wait for it. A rank is compared with ranks of its role in the same step, so that what slows all of them (a longer
sequence, a busy machine) is nobody's fault; where nobody has its role, with itself at the beginning.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from foretell.runtime.detect.records import StepTable

UPPER = 0.75
"""Of the others, whom a slow rank outlasts: where there are many, one of them has some accident in almost every step."""
SLOW, INTERMITTENT = "slow rank", "intermittently slow rank"


@dataclass(frozen=True, kw_only=True)
class SlowLimits:
    """From when on a rank is slow. Drawn on one part of recorded runs and checked on another: benchmarks/stragglers.py."""

    stride: int = 10
    """A window begins so many steps after the one before."""
    window: int = 20
    """Steps that are looked at together."""
    windows: int = 5
    """In so many windows after each other it must be seen: 60 steps."""
    share: float = 0.6
    """Of a window's steps, in which it worked longer than three quarters of the others."""
    excess: float = 0.05
    """Of a step, that it works longer than the others."""
    z: float = 4.0
    """Standard errors of the median that this is above nothing."""
    spikes_stride: int = 50
    spikes_window: int = 100
    spikes_windows: int = 4
    spike: float = 0.5
    """Of a step, or `spike_z` deviations if that is more: what counts as one."""
    spike_z: float = 6.0
    spikes: int = 4
    """In a window, at least."""
    spikes_z: float = 4.0
    """Deviations above the mean of the other ranks, were they accidents (Poisson)."""
    spikes_cost: float = 0.03
    """Of all time, that they cost."""


LIMITS = SlowLimits()


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """A rank that the others wait for."""

    kind: str
    rank: int
    first_step: int
    last_step: int
    """Of the windows it was seen in."""
    seconds: float
    """A step, on average, that it costs."""
    step_seconds: float
    share: float
    """Of steps in which it worked longer than most, or was late."""
    data_seconds: float = 0.0
    """Of `seconds`, in which it waited for its next samples."""
    delayed_seconds: float = 0.0
    """A step, in which it was ready to run and had no core: not part of `seconds`."""

    @property
    def cost(self) -> float:
        """Share of all time."""
        return self.seconds / self.step_seconds if self.step_seconds > 0 else 0.0


def excess_of(own: np.ndarray, roles: Sequence[str], before: np.ndarray | None = None) -> np.ndarray:
    """Seconds that each rank works longer than the median of the others of its role, step by step; `before` is what each worked in a
    step at the beginning, for ranks that are alone in theirs."""
    if len(own) == 2 and roles[0] == roles[1]:
        return np.stack([own[0] - own[1], own[1] - own[0]])
    found = np.zeros_like(own)
    for rank in range(len(own)):
        peers = [other for other in range(len(own)) if other != rank and roles[other] == roles[rank]]
        base = np.median(own[peers], axis=0) if peers else before[rank] if before is not None else np.median(own[rank])
        found[rank] = own[rank] - base
    return found


def deviation(values: np.ndarray) -> float:
    """Robust standard deviation: 1.48 times the median distance from the median."""
    return float(1.4826 * np.median(np.abs(values - np.median(values)))) if values.size else 0.0


@dataclass
class SlowWatch:
    """Takes steps as they come and gives what was found; a finding is given once, and again only after it was gone."""

    roles: Sequence[str]
    limits: SlowLimits = LIMITS
    _before: list[np.ndarray] = field(default_factory=list)
    _runs: dict[tuple[str, int], list[SlowRank]] = field(default_factory=lambda: defaultdict(list))
    _told: set[tuple[str, int]] = field(default_factory=set)
    _gone: dict[tuple[str, int], int] = field(default_factory=lambda: defaultdict(int))
    """Windows in which what was told was not seen."""

    def window(self, table: StepTable) -> list[SlowRank]:
        """The last `limits.window` clean steps, `limits.stride` of them new."""
        if len(self.roles) < 2 or not len(table):
            return []
        if len(self._before) < self.limits.windows:
            self._before.append(np.median(table.own, axis=1))
        before = np.median(self._before, axis=0)
        return self._follow(SLOW, slow_in(table, self.roles, self.limits, before), self.limits.windows)

    def long_window(self, table: StepTable) -> list[SlowRank]:
        """The last `limits.spikes_window` clean steps."""
        if len(self.roles) < 2 or not len(table):
            return []
        found = [one for one in spikes_in(table, self.roles, self.limits) if (SLOW, one.rank) not in self._told]
        return self._follow(INTERMITTENT, found, self.limits.spikes_windows)

    def _follow(self, kind: str, found: Sequence[SlowRank], wanted: int) -> list[SlowRank]:
        seen = {one.rank: one for one in found}
        new = []
        for rank in range(len(self.roles)):
            key = (kind, rank)
            if rank not in seen:
                self._runs.pop(key, None)
                self._gone[key] += 1
                if self._gone[key] >= wanted:
                    self._told.discard(key)
                continue
            self._gone[key] = 0
            run = self._runs[key]
            run.append(seen[rank])
            if len(run) >= wanted and key not in self._told:
                self._told.add(key)
                new.append(_joined(run[-wanted:]))
        return new


def _joined(run: Sequence[SlowRank]) -> SlowRank:
    def mean(name: str) -> float:
        return float(np.mean([getattr(one, name) for one in run]))

    return SlowRank(
        kind=run[-1].kind, rank=run[-1].rank, first_step=run[0].first_step, last_step=run[-1].last_step, seconds=mean("seconds"),
        step_seconds=mean("step_seconds"), share=mean("share"), data_seconds=mean("data_seconds"), delayed_seconds=mean("delayed_seconds"),
    )  # fmt: skip


def slow_in(table: StepTable, roles: Sequence[str], limits: SlowLimits = LIMITS, before: np.ndarray | None = None) -> list[SlowRank]:
    """Ranks that were slow throughout one window."""
    excess = excess_of(table.own, roles, before)
    step, medians = float(np.median(table.whole[0])), np.median(excess, axis=1)
    found = []
    for rank in np.flatnonzero(medians >= limits.excess * step).tolist():  # nobody, mostly
        row, seconds = excess[rank], float(medians[rank])
        others = [other for other in range(len(excess)) if other != rank and roles[other] == roles[rank]]
        share = float(np.mean(row > np.quantile(excess[others], UPPER, axis=0))) if others else float(np.mean(row > 0))
        if share > limits.share and seconds > limits.z * 1.2533 * deviation(row) / np.sqrt(len(row)):
            data = float(np.median(excess_of(table.data, roles)[rank])) if others else 0.0
            found.append(SlowRank(
                kind=SLOW, rank=rank, first_step=int(table.steps[0]), last_step=int(table.steps[-1]), seconds=seconds, step_seconds=step,
                share=share, data_seconds=min(seconds, max(0.0, data)), delayed_seconds=float(np.mean(table.delayed[rank])),
            ))  # fmt: skip
    return found


def spikes_in(table: StepTable, roles: Sequence[str], limits: SlowLimits = LIMITS) -> list[SlowRank]:
    """The rank that was late now and then in one window, far more often than the others."""
    excess = excess_of(table.own, roles)
    step = float(np.median(table.whole[0]))
    late = excess > limits.spike * step
    if late.sum(axis=1).max() < limits.spikes:
        return []
    spread = max(deviation(row) for row in excess)
    late = excess > max(limits.spike * step, limits.spike_z * spread)
    counts = late.sum(axis=1)
    rank = int(np.argmax(counts))
    usual = float(np.delete(counts, rank).mean())
    if counts[rank] < max(limits.spikes, usual + limits.spikes_z * np.sqrt(usual + 1)):
        return []
    seconds = float(excess[rank][late[rank]].sum()) / len(table)
    if seconds < limits.spikes_cost * step:
        return []
    data = float(np.clip(excess_of(table.data, roles)[rank][late[rank]], 0, None).sum()) / len(table)
    return [SlowRank(
        kind=INTERMITTENT, rank=rank, first_step=int(table.steps[0]), last_step=int(table.steps[-1]), seconds=seconds, step_seconds=step,
        share=float(late[rank].mean()), data_seconds=min(seconds, data), delayed_seconds=float(np.mean(table.delayed[rank])),
    )]  # fmt: skip
