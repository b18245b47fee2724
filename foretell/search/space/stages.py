"""Where to cut a stack of blocks into pipeline stages, and how many micro-batches each stage holds. Exact.

    price(stage, start, end): seconds of a stage that has these blocks; infinite where it cannot fit
    wanted: cuts under which the dearest stage costs least

A stage with more blocks never costs less. So for a given limit it is best to give each stage as many blocks as the
limit allows, and whether a limit can be kept takes a few prices a stage; the least limit is found by halving. Of cuts
that reach it, those nearest to even work are taken.

The price may hold anything, as long as it grows with the blocks: `joint` adds the least seconds of recomputation with
which the stage fits, given how many micro-batches it holds. Cuts and residency are then chosen together.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise

from foretell.lower.pipeline.order import orders
from foretell.search.space.residency import Treatment, Ways, hull, least, of_alike

Price = Callable[[int, int, int], float]
NARROW = 1e-9
"""Share to which the least limit is found."""
LARGEST = sys.float_info.max
FEW_KINDS = 4
"""Of blocks: as long as there are so few, stages are priced with the exact residency, else with a bound from below."""


# ---------------------------------------------------------------------- in flight


@lru_cache(maxsize=1024)
def in_flight(schedule: str, ranks: int, interleave: int, micro_batches: int) -> tuple[int, ...]:
    """Micro-batches whose activations each stage holds when its rank holds most."""
    stages = ranks * interleave
    if schedule == "gpipe":
        return (micro_batches,) * stages
    if schedule == "1f1b":
        return tuple(min(micro_batches, ranks - stage) for stage in range(ranks))
    found = [0] * stages
    for order in orders(schedule, ranks, stages, _enough(schedule, ranks, interleave, micro_batches)):
        now: dict[int, int] = {}
        most, held = 0, 0
        for event in order:
            if event.kind == "F":
                now[event.stage] = now.get(event.stage, 0) + 1
                held += 1
            elif event.kind in "BW":
                now[event.stage] -= 1
                held -= 1
            if held > most:
                most = held
                for stage, count in now.items():
                    found[stage] = count
    return tuple(found)


def _enough(schedule: str, ranks: int, interleave: int, micro_batches: int) -> int:
    """As many as show how many are held: the steady part of a schedule repeats."""
    shown = ranks * (2 * interleave + 2)
    return micro_batches if schedule == "zero-bubble-v" or micro_batches % ranks else min(micro_batches, shown)


def rank_of(schedule: str, ranks: int, stage: int) -> int:
    """Where along the pipeline axis a stage is."""
    turn, place = divmod(stage, ranks)
    return ranks - 1 - place if schedule == "zero-bubble-v" and turn % 2 else place


# ---------------------------------------------------------------------- cuts


def cut(price: Price, blocks: int, stages: int, work: Sequence[float] = ()) -> tuple[int, ...] | None:
    """First block of each stage after the first, so that the dearest stage costs least; None where no cuts fit.

    `work` says what blocks weigh when several cuts are equally good; the first and last weight are those of what runs
    before and after the blocks.
    """
    if not 1 <= stages <= blocks:
        return None
    low = max(price(0, 0, 1), price(stages - 1, blocks - 1, blocks))
    ends = _greedy(price, blocks, stages, LARGEST)
    if ends is None:
        return None
    high = _dearest(price, ends)
    while high - low > NARROW * high:
        found = _greedy(price, blocks, stages, (low + high) / 2)
        if found is not None:
            high = _dearest(price, found)
            continue
        low = (low + high) / 2
        found = _greedy(price, blocks, stages, high * (1 - NARROW))
        if found is None:  # nothing is between this and the best: alike blocks have few prices
            break
        high = _dearest(price, found)
    return _even(price, blocks, stages, high * (1 + NARROW), work or [0.0, *[1.0] * blocks, 0.0])


def _dearest(price: Price, ends: Sequence[int]) -> float:
    return max(price(stage, start, end) for stage, (start, end) in enumerate(pairwise([0, *ends])))


def _greedy(price: Price, blocks: int, stages: int, limit: float) -> list[int] | None:
    """Ends of stages that each have as many blocks as the limit allows; None where that does not cover all."""
    ends, start = [], 0
    for stage in range(stages):
        last = blocks - (stages - 1 - stage)
        end = last if stage == stages - 1 else _furthest(price, stage, start, last, limit)
        if end <= start or price(stage, start, end) > limit:
            return None
        ends.append(end)
        start = end
    return ends


def _furthest(price: Price, stage: int, start: int, last: int, limit: float) -> int:
    """The largest end with which a stage keeps the limit; `start` where none does."""
    sizes = range(1, last - start + 1)
    return start + bisect_left(sizes, True, key=lambda size: not price(stage, start, start + size) <= limit)


def _even(price: Price, blocks: int, stages: int, limit: float, work: Sequence[float]) -> tuple[int, ...]:
    """Cuts within a limit that can be kept, each as near to even work as the others allow."""
    earliest = _from_behind(price, blocks, stages, limit)
    sums = list(accumulate(work[1:-1], initial=work[0]))
    total = sums[-1] + work[-1]
    cuts, start = [], 0
    for stage in range(stages - 1):
        furthest = _furthest(price, stage, start, blocks - (stages - 1 - stage), limit)
        target = total * (stage + 1) / stages
        near = bisect_left(sums, target)
        if near and near < len(sums) and target - sums[near - 1] < sums[near] - target:
            near -= 1
        end = max(start + 1, earliest[stage + 1], min(near, furthest))
        cuts.append(end)
        start = end
    return tuple(cuts)


def _from_behind(price: Price, blocks: int, stages: int, limit: float) -> list[int]:
    """The earliest block that each stage may begin with, so that it and later ones keep the limit."""
    begins, end = [0] * stages, blocks
    for stage in reversed(range(stages)):
        sizes = range(1, end - stage + 1)
        fits = bisect_left(sizes, True, key=lambda size, s=stage, e=end: not price(s, e - size, e) <= limit)  # type: ignore[misc]
        end = begins[stage] = end - max(1, fits)
    return begins


# ---------------------------------------------------------------------- cuts and residency together


@dataclass(frozen=True, kw_only=True)
class BlockStack:
    """What cutting needs to know of a model's blocks, for one micro-batch on one rank of every other axis."""

    seconds: tuple[float, ...]
    """Of each block, forward and backward."""
    held: tuple[float, ...]
    """Bytes a block holds for each micro-batch in flight, when kept."""
    state: tuple[float, ...]
    """Bytes of a block's parameters, gradients and optimizer state."""
    ways: tuple[Ways, ...]
    """Of each block: bytes saved and seconds more, for one micro-batch."""
    before: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Seconds, bytes held and bytes of state of what runs before the blocks."""
    after: tuple[float, float, float] = (0.0, 0.0, 0.0)
    stream: float = 0.0
    """Bytes of what a block hands to the next."""
    beside: tuple[float, float] = (0.0, 0.0)
    """Bytes that a rank holds at least beside all that: any rank, and the one with what runs after the blocks."""

    @property
    def kinds(self) -> int:
        return len(set(self.ways))


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Where to cut, and how to treat each block."""

    cuts: tuple[int, ...]
    modes: tuple[str, ...]
    seconds: float
    """Of the dearest stage, one micro-batch."""


def joint(
    stack: BlockStack, flights: Sequence[int], room: Sequence[float], worth: Sequence[float] | None = None
) -> Cut | None:
    """Cuts and residency under which the dearest stage takes least, each stage within its `room` of bytes.

    `flights` are the micro-batches that each stage holds. Exact where blocks are of few kinds; else cuts are chosen by
    a bound of the residency's seconds, and the residency is exact for these cuts. `worth` says, for each stage, how
    many bytes a saved byte really frees.
    """
    pricing = _Pricing(stack=stack, flights=tuple(flights), room=tuple(room), worth=tuple(worth or [1.0] * len(flights)))
    work = [stack.before[0], *stack.seconds, stack.after[0]]
    cuts = cut(pricing.price, len(stack.seconds), len(flights), work)
    if cuts is None:
        return None
    modes: list[str] = []
    dearest = 0.0
    for stage, (start, end) in enumerate(pairwise([0, *cuts, len(stack.seconds)])):
        chosen = pricing.treated(stage, start, end)
        if chosen is None:
            return None
        modes += chosen.modes
        dearest = max(dearest, pricing.plain(stage, start, end) + chosen.seconds)
    return Cut(cuts=cuts, modes=tuple(modes), seconds=dearest)


@dataclass
class _Pricing:
    """Seconds of stages, remembered: alike stages cost alike."""

    stack: BlockStack
    flights: tuple[int, ...]
    room: tuple[float, ...]
    worth: tuple[float, ...]
    known: dict[tuple[int, int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.last = len(self.flights) - 1
        sums = (self.stack.seconds, self.stack.held, self.stack.state)
        self.sums = [list(accumulate(values, initial=0.0)) for values in sums]
        saves = [max((way.saves for way in ways), default=0.0) for ways in self.stack.ways]
        self.saves = list(accumulate(saves, initial=0.0))
        kinds = list(dict.fromkeys(self.stack.ways))
        self.alike, self.exact = len(kinds) == 1, len(kinds) <= FEW_KINDS
        steps = [(seconds / saves, saves, seconds, kind) for kind, ways in enumerate(kinds) for saves, seconds in hull(ways)]
        self.steps = sorted(steps)
        numbers = {ways: kind for kind, ways in enumerate(kinds)}
        which = [numbers[ways] for ways in self.stack.ways]
        self.counts = [list(accumulate((kind == one for one in which), initial=0)) for kind in range(len(kinds))]

    def plain(self, stage: int, start: int, end: int) -> float:
        return self._sum(0, stage, start, end)

    def _sum(self, part: int, stage: int, start: int, end: int) -> float:
        sums = self.sums[part]
        found = sums[end] - sums[start]
        if stage == 0:
            found += self.stack.before[part]
        if stage == self.last:
            found += self.stack.after[part]
        return found

    def need(self, stage: int, start: int, end: int) -> float:
        """Bytes too many for each micro-batch in flight."""
        held, state = self._sum(1, stage, start, end), self._sum(2, stage, start, end)
        found = held + (state - self.room[stage]) / self.flights[stage]
        return found / self.worth[stage] if found > 0 else found

    def price(self, stage: int, start: int, end: int) -> float:
        key = (stage, start, end)
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = self._sum(0, stage, start, end) + self._extra(stage, start, end)
        return found

    def _extra(self, stage: int, start: int, end: int) -> float:
        """Seconds of the residency that a stage needs."""
        need = self.need(stage, start, end)
        if need <= 0:
            return 0.0
        if self.saves[end] - self.saves[start] < need:
            return float("inf")
        ways = self.stack.ways
        if self.alike:
            return of_alike(ways[0], end - start, need)
        if not self.exact:
            return self._bound(start, end, need)
        found = least(ways[start:end], need)
        return found.seconds if found else float("inf")

    def _bound(self, start: int, end: int, need: float) -> float:
        """`residency.at_least` for a stretch of blocks, kind by kind."""
        total = 0.0
        for _, saves, seconds, kind in self.steps:
            counts = self.counts[kind]
            many = counts[end] - counts[start]
            if many * saves >= need:
                return total + seconds * need / saves
            need, total = need - many * saves, total + many * seconds
        return float("inf")

    def treated(self, stage: int, start: int, end: int) -> Treatment | None:
        return least(self.stack.ways[start:end], self.need(stage, start, end))
