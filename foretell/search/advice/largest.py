"""The largest size with which a step fits, and why the next one does not: every size that decides is predicted whole.

Bytes grow about in a line with the size, so two predictions say where the limit is; from there it is closed in on until a size that
fits and the next one that does not stand side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from foretell.errors import ForetellError, ModelError
from foretell.quantities import FITS, NO, Prediction
from foretell.simulate.memory.memory import TIGHT_SHARE

LIMIT = 1 << 20
LONG, GRAIN, STEP = 4096, 128, 160
"""Sizes above the first are told to one part in the second: each takes long to predict. The third is the part by which is stepped where a
line through known sizes ends."""


@dataclass(frozen=True, kw_only=True)
class Most:
    """The largest size that fits, what was predicted of it, and what the next one lacks."""

    size: int
    """0 where not even the least fits."""
    answer: Prediction
    """Of that size; of the least where none fits."""
    next_size: int
    next_short: int | None = None
    """Bytes that the next one is short of; None where something else ends it."""
    why: str = ""
    """What ends it, where that is not memory."""
    tight: int | None = None
    """About the largest that still runs, with less to spare than is called fitting: by the line through two that do not. None where that
    was not asked for, or is not known."""


def most(
    attempt: Callable[[int], Prediction], least: int = 1, progress: Callable[[int], None] = lambda _: None, *, first: int = 1,
) -> Most:  # fmt: skip
    """Predict with `attempt` until the largest is known; raises what the least one does, unless that names a larger one to begin with.

    `first`: a size to begin with that is likely to fit, where smaller ones say little of larger ones. Then the largest that still runs,
    tightly, is told too."""
    known: dict[int, Prediction | ForetellError] = {}

    def asked(size: int) -> Prediction | ForetellError:
        if size not in known:
            progress(size)
            try:
                known[size] = attempt(size)
            except ForetellError as error:
                if size == least:
                    raise
                known[size] = error
        return known[size]

    def fits(size: int) -> bool:
        found = asked(size)
        return isinstance(found, Prediction) and found.verdict == FITS

    begun = first if first > least and fits(first) else least
    try:
        asked(begun)
    except ModelError as error:
        larger = error.change.get("micro_batch", least)
        if larger <= least:
            raise
        return most(attempt, larger, progress)
    if not fits(begun):
        found = known[begun]
        assert isinstance(found, Prediction)
        return _told(0, found, begun, found)
    low, high = _near(fits, known, begun) if begun > least else (begun, 2 * begun)
    while begun == least and fits(high) and high < LIMIT:
        low, high = high, min(LIMIT, max(2 * high, _between(known[begun], begun, known[high], high)))
    by_halves = False
    while high - low > (low // GRAIN if low >= LONG else 1):
        line = (low + high) // 2 if by_halves else _between(known[low], low, known[high], high)
        middle = min(high - 1, max(low + 1, line))
        low, high = (middle, high) if fits(middle) else (low, middle)
        by_halves = not by_halves  # a line that creeps along one end is helped on
    best = known[low]
    assert isinstance(best, Prediction)
    return replace(_told(low, best, high, asked(high)), tight=_runs(asked, known, low, high) if first > least else None)


def _near(fits: Callable[[int], bool], known: Mapping[int, Prediction | ForetellError], begun: int) -> tuple[int, int]:
    """Two sizes side by side, or nearly where they are long, of which one fits and the other does not: along the line through the last two, and
    in steps that double once that ends near by."""
    low, high, before, size, step = begun, 0, begun, 2 * begun, 0
    while (not high or high - low > (low // GRAIN if low >= LONG else 1)) and low < LIMIT:
        if fits(size):
            low = size
        else:
            high = size
        line = _between(known[before], before, known[size], size) if before < size else _between(known[size], size, known[before], before)
        if abs(line - size) <= size // (STEP // 2) or (line < size) == (size == low):  # the line ends here, or behind
            step = max(2 * step, size // STEP, 1)
            line = size + step if size == low else size - step
        elif line >= LONG:
            line -= line // (2 * STEP)  # so that it fits, and a step beyond does not
        before, size = size, line if low < line and (not high or line < high) else (low + high) // 2
    return low, high or low + 1


def _runs(asked: Callable[[int], object], known: Mapping[int, object], low: int, high: int) -> int | None:
    """Where the line through two sizes that do not run ends: `margin_bytes` of these is what a run lacks, however it frees its cache."""

    def lacking() -> list[tuple[int, int]]:
        return sorted((size, -one.memory.margin_bytes) for size, one in known.items() if isinstance(one, Prediction) and one.verdict == NO)

    for share in (1.25, 1.5):
        if len(lacking()) < 2:
            asked(int(share * low))
    if len(lacking()) < 2:
        return None
    (one, less), (other, more) = lacking()[:2]
    found = math.floor(one - less * (other - one) / (more - less)) if more > less else low
    return found if low <= found else None


def _between(one: Prediction | ForetellError, size: int, other: Prediction | ForetellError, larger: int) -> int:
    """Where the line through two sizes leaves as little as a step that fits may leave; the middle where there is no line."""
    if not (isinstance(one, Prediction) and isinstance(other, Prediction)):
        return (size + larger) // 2
    slope = (other.memory.device_bytes - one.memory.device_bytes) / (larger - size)
    room = one.memory.margin_bytes - TIGHT_SHARE * one.memory.capacity_bytes
    return size + max(0, int(room / slope)) if slope > 0 else (size + larger) // 2


def _told(size: int, answer: Prediction, next_size: int, after: Prediction | ForetellError) -> Most:
    if isinstance(after, Prediction):
        return Most(size=size, answer=answer, next_size=next_size, next_short=-after.memory.margin_bytes)
    return Most(size=size, answer=answer, next_size=next_size, why=str(after).partition("\n")[0])
