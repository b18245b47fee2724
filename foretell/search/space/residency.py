"""Which blocks to recompute so that a step fits: the ways with the least extra seconds. Exact.

    block → ways: keep (saves nothing, costs nothing), selective, recompute: bytes saved, seconds more
    wanted: one way for each block, bytes saved ≥ need, seconds least

Alike blocks are counted, not named: of n of them only how many are treated each way matters. Partial answers grow
block by block; one is dropped when another saves as much in less time, or when even the best mix of what is left
(ways taken in parts, a bound from below) cannot beat an answer that is known. Tests hold it against a mixed integer program
and against trying everything.

A way is bytes and seconds: moving activations to the host or to a disk will be further ways.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

FEW = 16
"""Partial answers that are followed for a near answer."""
SLACK = 1e-9
"""Share of the need, or of the seconds, that sums of floats may be off."""


@dataclass(frozen=True, order=True)
class RecomputeOption:
    """How a block's activations may be treated."""

    saves: float
    """Bytes less than when kept."""
    seconds: float
    """More than when kept, of one step."""
    mode: str


Ways = tuple[RecomputeOption, ...]
KEPT = RecomputeOption(0.0, 0.0, "keep")


@dataclass(frozen=True, kw_only=True)
class Treatment:
    """One way for each block, in their order."""

    modes: tuple[str, ...]
    saves: float
    seconds: float


def least(blocks: Sequence[Ways], need: float) -> Treatment | None:
    """The ways that save `need` bytes with the least extra seconds; None where all together cannot."""
    ways = [_useful(block) for block in blocks]
    if need <= 0:
        return Treatment(modes=tuple(found[0].mode for found in ways), saves=0.0, seconds=0.0)
    if sum(found[-1].saves for found in ways) < need * (1 - SLACK):
        return None
    groups: dict[Ways, list[int]] = {}
    for number, found in enumerate(ways):
        groups.setdefault(found, []).append(number)
    if len(groups) == 1:
        chosen = [_line(ways[0], len(ways)).counts(need)]
    else:
        chosen = _search([(found, len(members)) for found, members in groups.items()], need)
    modes = [""] * len(ways)
    saves = seconds = 0.0
    for (found, members), counts in zip(groups.items(), chosen, strict=True):
        for number, way in zip(members, _dealt(found, counts), strict=True):
            modes[number] = way.mode
            saves, seconds = saves + way.saves, seconds + way.seconds
    return Treatment(modes=tuple(modes), saves=saves, seconds=seconds)


def of_alike(block: Ways, count: int, need: float) -> float:
    """Seconds of `least` for so many alike blocks; infinite where all of them cannot save as much."""
    return _line(_useful(block), count).seconds(need) if need > 0 else 0.0


def at_least(blocks: Iterable[Ways], need: float) -> float:
    """Seconds below which no treatment saves `need` bytes: ways may be taken in parts. Infinite where none can."""
    if need <= 0:
        return 0.0
    steps = sorted((step for block in blocks for step in _hull(_useful(block))), key=lambda step: step[1] / step[0])
    total = 0.0
    for saves, seconds in steps:
        if saves >= need * (1 - SLACK):
            return total + seconds * min(1.0, need / saves)
        need, total = need - saves, total + seconds
    return 0.0 if need <= 0 else float("inf")


def hull(block: Ways) -> tuple[tuple[float, float], ...]:
    """Steps of bytes and seconds from keeping a block to what saves most, the cheapest bytes first."""
    return _hull(_useful(block))


@lru_cache(maxsize=4096)
def _useful(block: Ways) -> Ways:
    """Ways that no other beats in both, keep first."""
    found: list[RecomputeOption] = []
    for way in sorted(block or (KEPT,), key=lambda way: (way.seconds, -way.saves)):
        if not found or way.saves > found[-1].saves:
            found.append(way)
    return tuple(found)


@lru_cache(maxsize=4096)
def _hull(ways: Ways) -> tuple[tuple[float, float], ...]:
    """Steps of bytes and seconds along the lower hull of a block's ways, the cheapest bytes first."""
    hull: list[RecomputeOption] = []
    for way in ways:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], way):
            hull.pop()
        hull.append(way)
    return tuple((b.saves - a.saves, b.seconds - a.seconds) for a, b in pairwise(hull))


def _slope(a: RecomputeOption, b: RecomputeOption) -> float:
    return (b.seconds - a.seconds) / (b.saves - a.saves)


def _dealt(ways: Ways, counts: Sequence[int]) -> list[RecomputeOption]:
    """The ways of alike blocks: what saves most comes first, since the first blocks' backward comes last, when most
    of what others hold is gone and there is room to compute again."""
    return [way for way, count in reversed(list(zip(ways, counts, strict=True))) for _ in range(count)]


# ---------------------------------------------------------------------- alike blocks


class _Divisions:
    """Every useful division of alike blocks among their ways, by rising bytes and seconds."""

    def __init__(self, ways: Ways, count: int) -> None:
        gain, pay, counts = _options(ways, count)
        self.gain, self.pay, self.divided = gain.tolist(), pay.tolist(), counts

    def place(self, need: float) -> int:
        return bisect_left(self.gain, need * (1 - SLACK))

    def seconds(self, need: float) -> float:
        place = self.place(need)
        return float(self.pay[place]) if place < len(self.pay) else float("inf")

    def counts(self, need: float) -> tuple[int, ...]:
        return tuple(map(int, self.divided[self.place(need)]))


@lru_cache(maxsize=4096)
def _line(ways: Ways, count: int) -> _Divisions:
    return _Divisions(ways, count)


# ---------------------------------------------------------------------- exact search over counts


def _search(groups: Sequence[tuple[Ways, int]], need: float) -> list[tuple[int, ...]]:
    """How many of each group go each way: first with few partial answers at a time, for a near answer that rules out most of the rest."""
    import numpy as np

    order = sorted(range(len(groups)), key=lambda g: -groups[g][1] * groups[g][0][-1].saves)
    options = [_options(*groups[g]) for g in order]
    bounds = _bounds([groups[g] for g in order])
    best = _rounded([groups[g] for g in order], need)
    near, _ = _walked(options, bounds, need, best, most=FEW)
    seconds, trail = _walked(options, bounds, need, min([best, *near]))
    state = int(np.argmin(seconds))
    chosen: list[tuple[int, ...]] = [()] * len(groups)
    for place in reversed(range(len(order))):
        before, option = trail[place]
        chosen[order[place]] = tuple(map(int, options[place][2][int(option[state])]))
        state = int(before[state])
    return chosen


def _walked(
    options: Sequence[tuple[Any, Any, Any]], bounds: Sequence[tuple[Any, Any]], need: float, best: float, most: int | None = None
) -> tuple[Any, list[tuple[Any, Any]]]:
    """Seconds of the answers that are left, and of each group: what they follow from, and how it is divided.

    `most`: so many of the partial answers are followed, those that may become the best."""
    import numpy as np

    saves, seconds = np.zeros(1), np.zeros(1)
    trail: list[tuple[Any, Any]] = []
    for place, (gain, pay, _) in enumerate(options):
        total = (saves[:, None] + gain[None, :]).ravel()
        spent = (seconds[:, None] + pay[None, :]).ravel()
        rest = bounds[place + 1]
        least_total = spent + np.interp(need - total, *rest)
        short = need - total > rest[0][-1] + SLACK * need
        alive = np.flatnonzero(~short & (least_total <= best * (1 + SLACK)))
        if most is not None and len(alive) > most:
            alive = alive[np.argpartition(least_total[alive], most)[:most]]
        total = np.minimum(total, need)  # beyond the need, more is no better
        keep = alive[_undominated(total[alive], spent[alive])]
        trail.append((keep // len(gain), keep % len(gain)))
        saves, seconds = total[keep], spent[keep]
    return seconds, trail


@lru_cache(maxsize=512)
def _options(ways: Ways, count: int) -> tuple[Any, Any, Any]:
    """Bytes, seconds and counts of every useful division of alike blocks among their ways."""
    import numpy as np

    others = np.indices([count + 1] * (len(ways) - 1)).reshape(len(ways) - 1, (count + 1) ** (len(ways) - 1))
    others = others[:, others.sum(axis=0) <= count]
    counts = np.vstack([count - others.sum(axis=0), others]) if len(ways) > 1 else np.array([[count]])
    gain = np.array([way.saves for way in ways]) @ counts
    pay = np.array([way.seconds for way in ways]) @ counts
    keep = _undominated(gain, pay)
    return gain[keep], pay[keep], counts[:, keep].T


def _undominated(gain: Any, pay: Any) -> Any:
    """Indices of answers that no other matches in bytes for fewer seconds, by rising seconds."""
    import numpy as np

    order = np.argsort(pay, kind="stable")
    sorted_gain = gain[order]
    first = np.ones(len(order), bool)
    first[1:] = sorted_gain[1:] > np.maximum.accumulate(sorted_gain)[:-1]
    kept = order[first]
    last = np.ones(len(kept), bool)  # of those with the same seconds, the one with most bytes
    last[:-1] = pay[kept[1:]] > pay[kept[:-1]]
    return kept[last]


def _bounds(groups: Sequence[tuple[Ways, int]]) -> list[tuple[Any, Any]]:
    """Of the groups from each one on: the least seconds for any bytes when ways may be taken in parts, corners of a convex line."""
    import numpy as np

    steps = [(s * count, t * count, place) for place, (ways, count) in enumerate(groups) for s, t in _hull(ways)]
    steps.sort(key=lambda step: step[1] / step[0])
    saves, seconds, places = (np.array([start, *(step[part] for step in steps)]) for part, start in enumerate((0.0, 0.0, len(groups))))
    return [(np.cumsum(saves[places >= first]), np.cumsum(seconds[places >= first])) for first in range(len(groups) + 1)]


def _rounded(groups: Sequence[tuple[Ways, int]], need: float) -> float:
    """Seconds of an answer that is easily found: the cheapest bytes first, block by block."""
    steps = sorted(((t / s, s, t, count, g) for g, (ways, count) in enumerate(groups) for s, t in _hull(ways)), key=lambda step: step[0])
    total, touched = 0.0, set[int]()
    for _, saves, seconds, count, group in steps:
        touched.add(group)
        times = min(count, int(need // saves))
        need, total = need - times * saves, total + times * seconds
        if need <= 0:
            break
        if times < count:  # the rest by one block more of these, or by one that was not touched
            fresh = [way.seconds for g, (ways, _) in enumerate(groups) if g not in touched for way in ways if way.saves >= need]
            return total + min([seconds, *fresh])
    return total
