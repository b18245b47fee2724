"""The largest size with which a step fits, and why the next one does not: every size that decides is predicted whole.

Bytes grow about in a line with the size, so two predictions say where the limit is; from there it is closed in on until a size that
fits and the next one that does not stand side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from foretell.errors import ForetellError, ModelError
from foretell.quantities import FITS, Prediction
from foretell.simulate.memory.memory import TIGHT_SHARE

LIMIT = 1 << 20


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


def most(attempt: Callable[[int], Prediction], least: int = 1, progress: Callable[[int], None] = lambda _: None) -> Most:
    """Predict with `attempt` until the largest is known; raises what the least one does, unless that names a larger one to begin with."""
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

    try:
        asked(least)
    except ModelError as error:
        larger = error.change.get("micro_batch", least)
        if larger <= least:
            raise
        return most(attempt, larger, progress)

    def fits(size: int) -> bool:
        found = asked(size)
        return isinstance(found, Prediction) and found.verdict == FITS

    if not fits(least):
        first = known[least]
        assert isinstance(first, Prediction)
        return _told(0, first, least, first)
    low, high = least, 2 * least
    while fits(high) and high < LIMIT:
        low, high = high, min(LIMIT, max(2 * high, _between(known[least], least, known[high], high)))
    by_halves = False
    while high - low > 1:
        line = (low + high) // 2 if by_halves else _between(known[low], low, known[high], high)
        middle = min(high - 1, max(low + 1, line))
        low, high = (middle, high) if fits(middle) else (low, middle)
        by_halves = not by_halves  # a line that creeps along one end is helped on
    best = known[low]
    assert isinstance(best, Prediction)
    return _told(low, best, high, asked(high))


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
