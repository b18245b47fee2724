"""Why plans were ruled out, by count: what a screen says where no plan is left."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from foretell.search.solve.found import Candidate, Reason
from foretell.search.solve.front import complaint
from foretell.search.space.constraints import SearchConstraints
from foretell.units import gib

if TYPE_CHECKING:
    from foretell.search.space.explore import Explored

_NUMBERS = re.compile(r"[0-9][0-9.,]*")
_REMEDY = "; try: "


def of_search(explored: Explored, dropped: Iterable[Candidate], wishes: SearchConstraints, capacity: int) -> tuple[Reason, ...]:
    """Of layouts by their quick costs, and of those that were looked at more closely."""
    found = []
    if explored.unfit and explored.nearest is not None:
        found.append(_unfit(explored.unfit, capacity + int(explored.nearest.short), capacity))
    limits = [words for words in (complaint(point, wishes) for point in explored.points) if words]
    found += _grouped(limits)
    found += [_ruled_out(count, why) for why, count in explored.left.most_common()]
    return (*found, *of_candidates(dropped))


def sentence(reasons: Sequence[Reason]) -> str:
    return "; ".join(f"{one.count:,} {one.why}" for one in reasons)


def of_candidates(plans: Iterable[Candidate]) -> tuple[Reason, ...]:
    """Those whose bytes were counted op by op and are too many, together; the others by what was said of them."""
    some = list(plans)
    short = [one.cost.worst.memory for one in some if one.cost is not None and not one.cost.fits]
    found = []
    if short:
        nearest = max(short, key=lambda memory: memory.margin_bytes)
        found.append(_unfit(len(short), nearest.capacity_bytes - nearest.margin_bytes, nearest.capacity_bytes))
    return (*found, *_grouped([one.why.partition(_REMEDY)[0] for one in some if one.why and (one.cost is None or one.cost.fits)]))


def _grouped(words: Iterable[str]) -> list[Reason]:
    """What differs in its numbers alone is one reason, told as it was first."""
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    for why in words:
        key = _NUMBERS.sub("0", why)
        counts[key] += 1
        first.setdefault(key, why)
    return [_ruled_out(count, first[key]) for key, count in counts.most_common()]


def _unfit(count: int, needs: int, capacity: int) -> Reason:
    smallest = "it needs" if count == 1 else "the smallest needs"
    return Reason(count=count, why=f"{'does' if count == 1 else 'do'} not fit ({smallest} {gib(needs)} of {gib(capacity)})")


def _ruled_out(count: int, why: str) -> Reason:
    return Reason(count=count, why=f"{'is' if count == 1 else 'are'} ruled out ({why})")
