"""A layout made whole: where its stages begin and which blocks are computed again, so that it fits in least time.

    bytes of the blocks, which add up ── all kept they may fit? ─► quick cost: they do ─► done
      ▼ no: cuts and residency that free what is needed, and no more (`stages.joint`, `residency.least`)
      ▼ quick cost: what each rank holds beside its blocks is then known
      ▼ cuts and residency again, and so on, until it fits and no block more can be kept
      ▼ nothing found: everything computed again ── does not fit either? ─► so many bytes are missing

The exact parts see a model in which bytes add up block by block. The quick cost knows more, so its answer is what
counts: a layout that it does not call fitting is not one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Protocol

from foretell.plan.legal import SPLIT_BACKWARD
from foretell.search.estimate.plan import Layout, Quick
from foretell.search.space.residency import KEPT, RecomputeOption, Ways, at_least, least
from foretell.search.space.stages import BlockStack, Cut, cut, in_flight, joint, rank_of

TRIES = 4
"""Times that the need is corrected by what the quick cost says."""
STEP = 0.1
"""Share by which a correction goes beyond what was missed."""
NEAR = 0.15
"""Share of the room that may be lacking with even cuts for others to be tried."""
WORTH_ROOM = 0.03
"""Share of the seconds that is worth not being tight."""
WORTH_ANOTHER = 0.003
"""Share of the seconds that is worth another quick cost."""
CLOSE = 0.002
"""Share of the room by which a need that was missed is raised above what was missed."""


class Pricer(Protocol):
    """What layouts are costed with: a sheet and a cluster."""

    @property
    def blocks(self) -> tuple[str, ...]: ...

    def quick(self, layout: Layout) -> Quick: ...

    def limit(self, layout: Layout) -> float:
        """Bytes that a rank may show and still be called fitting."""
        ...

    def stack(self, layout: Layout, treated: bool = False) -> BlockStack:
        """What blocks cost at the layout's micro-batch and axes; with `treated`, what saving their bytes costs, too."""
        ...

    def rough(self, layout: Layout) -> float:
        """About `ideal`, soon found."""
        ...

    def optimist(self) -> Pricer:
        """Layouts that share no parameters without traces of their own: no slower, and in no more bytes."""
        ...

    def ideal(self, layout: Layout) -> float:
        """Seconds that no cuts and residency of the layout go below."""
        ...


@dataclass(frozen=True, kw_only=True)
class Filled:
    """A whole layout and its cost."""

    layout: Layout
    quick: Quick
    short: float = 0.0
    """Bytes too many on the worst rank, with all blocks computed again; 0 where it fits."""
    tight: Filled | None = None
    """The same layout faster, with less memory to spare than is called tight."""

    @property
    def fits(self) -> bool:
        return self.short <= 0


def fill(
    layout: Layout, pricer: Pricer, most: float = float("inf"), roomy: float = 0.0, cuts: tuple[int, ...] | None = None
) -> Filled | None:
    """The fastest cuts and residency of a layout that show at most `most` bytes; None where it cannot be cut.

    `roomy` are bytes up to which a rank is not called tight. Staying below may cost a little recomputation: that is
    taken where it costs less than `WORTH_ROOM`. Where `cuts` are given, these are kept.
    """
    given = cuts is not None
    if layout.mesh.pp > 1:
        cuts = cuts if given else _even_cuts(pricer.stack(layout), layout.mesh.pp * layout.interleave)
        if cuts is None:
            return None
        layout = replace(layout, cuts=cuts)
    layout = replace(layout, modes=("keep",) * len(pricer.blocks))
    limit = min(pricer.limit(layout), most)
    made = _Filling(pricer, _allowed(pricer.stack(layout, True), layout), layout, limit, roomy, given)
    if layout.mesh.world > 1 and not made.may_keep():
        return made.filled()
    kept = made.kept
    fits = kept.fits and kept.memory_bytes <= most
    if fits and kept.memory_bytes <= (roomy or most):
        return Filled(layout=layout, quick=kept)
    found = made.filled(kept)
    if not fits:
        return found
    tight = Filled(layout=layout, quick=kept)
    return replace(found, tight=tight) if found.fits and found.quick.seconds <= kept.seconds * (1 + WORTH_ROOM) else tight


def least_seconds(layout: Layout, pricer: Pricer, limit: float) -> float:
    """Seconds that no cuts and residency of a layout in `limit` bytes go below: those of its blocks, which add up, as their
    bytes do. Infinite where none fits; 0 where that is not known."""
    stack = _allowed(pricer.stack(layout, True), layout)
    ends = [sum(pair) for pair in zip(stack.before, stack.after, strict=True)]
    seconds = sum(stack.seconds) + ends[0]
    if layout.mesh.pp == 1:
        more = at_least(stack.ways, sum(stack.held) + sum(stack.state) + ends[1] + ends[2] + stack.beside[1] - limit)
        return layout.accumulate * (seconds + more)
    dearest = _looped_seconds(layout, stack, limit, pricer) if layout.interleave > 1 else None
    if dearest is None:
        flights = in_flight(layout.schedule or "1f1b", layout.mesh.pp, 1, layout.accumulate)
        made = _Filling(pricer, stack, replace(layout, cuts=tuple(range(1, layout.mesh.pp))), limit, 0.0)
        found = joint(stack, flights, [limit - more for more in made.least_beside()])
        dearest = found.seconds if found is not None else float("inf")
    through = 0.0 if layout.schedule in SPLIT_BACKWARD else max(0.0, seconds - dearest)  # every other stage once
    return layout.accumulate * dearest + through / layout.interleave


def _looped_seconds(layout: Layout, stack: BlockStack, limit: float, pricer: Pricer) -> float:
    """Of the dearest rank with several stages, cut evenly, for one micro-batch; infinite where none fits."""
    cuts = _even_cuts(stack, layout.mesh.pp * layout.interleave)
    if cuts is None:
        return 0.0  # it is said why when it is costed
    layout = replace(layout, cuts=cuts, modes=("keep",) * len(stack.seconds))
    made = _Filling(pricer, stack, layout, limit, 0.0, given=True)
    step = made.step(made.least_beside())
    return float("inf") if step is None else max(made.seconds(step.modes))


def _allowed(stack: BlockStack, layout: Layout) -> BlockStack:
    """Without recomputation where a backward in two passes does not allow it."""
    if layout.mesh.pp == 1 or layout.schedule not in SPLIT_BACKWARD:
        return stack
    return replace(stack, ways=((KEPT,),) * len(stack.ways))


def _even_cuts(stack: BlockStack, stages: int) -> tuple[int, ...] | None:
    """Cuts for the least dearest stage when nothing is computed again."""
    return _cut_by(stack.seconds, stack.before[0], stack.after[0], stages)


@lru_cache(maxsize=4096)
def _cut_by(seconds: tuple[float, ...], before: float, after: float, stages: int) -> tuple[int, ...] | None:
    sums = [0.0]
    for value in seconds:
        sums.append(sums[-1] + value)

    def price(stage: int, start: int, end: int) -> float:
        return sums[end] - sums[start] + before * (stage == 0) + after * (stage == stages - 1)

    return cut(price, len(seconds), stages, [before, *seconds, after])


@dataclass
class _Filling:
    pricer: Pricer
    stack: BlockStack
    layout: Layout
    limit: float
    roomy: float
    given: bool = False
    """Whether cuts must stay as they are."""

    def __post_init__(self) -> None:
        self.room = self.limit
        self._last: tuple[tuple[float, ...], Cut | None] | None = None

    @cached_property
    def kept(self) -> Quick:
        """The cost with every block kept."""
        return self.pricer.quick(self.layout)

    def may_keep(self) -> bool:
        """Whether the blocks alone fit with everything kept."""
        return all(linear + beside <= self.limit for linear, beside in zip(self._linear(self.layout), self.least_beside(), strict=True))

    def least_beside(self) -> list[float]:
        """What each rank holds at least beside its blocks."""
        layout, last = self.layout, len(self.layout.cuts)
        found = [self.stack.beside[rank == self._rank(last)] for rank in range(layout.mesh.pp)]
        for stage in range(last + 1) if last else ():  # what comes and goes between ranks stays until the step ends
            turned = layout.schedule != "1f1b" and stage > 0
            found[self._rank(stage)] += ((stage > 0) + (stage < last) + turned) * layout.accumulate * self.stack.stream
        return found

    def filled(self, known: Quick | None = None) -> Filled:
        """The fastest that fits; else the one with everything computed again, and what it lacks. `known`: all kept, if costed."""
        if self.layout.mesh.world > 1:
            beside = self._beside(self.layout, known) if known is not None else self.least_beside()
            for room in dict.fromkeys((min(self.limit, self.roomy or self.limit), self.limit)):
                self.room = room
                found, beside = self._by_blocks(beside)
                if found is not None:
                    return found
        return self._from_ends()

    def _by_blocks(self, beside: list[float]) -> tuple[Filled | None, list[float]]:
        """Cuts and residency by the bytes of blocks and what is beside them, which every quick cost says anew; and that."""
        best: Filled | None = None
        tried, layout = set[Layout](), self.layout
        for _ in range(TRIES):
            step = self.step(beside)
            if step is None:
                break
            layout = replace(self.layout, cuts=step.cuts or self.layout.cuts, modes=step.modes)
            if layout in tried:
                if best is not None:
                    break
                beside = [more + CLOSE * self.room for more in beside]
                continue
            tried.add(layout)
            seen = self.pricer.quick(layout)
            beside = self._beside(layout, seen)
            if self._fine(seen, self.room):
                if best is None or seen.seconds < best.quick.seconds:
                    best = Filled(layout=layout, quick=seen)
                if not self._worth_another(layout, beside, seen):
                    break
            elif best is not None:
                break
        return best, beside

    def _worth_another(self, layout: Layout, beside: Sequence[float], seen: Quick) -> bool:
        """Whether what is now known to be beside the blocks lets enough of them be kept."""
        step = self.step(beside)
        if step is None or (step.cuts or layout.cuts) != layout.cuts:
            return step is not None
        gain = max(a - b for a, b in zip(self.seconds(layout.modes), self.seconds(step.modes), strict=True))
        return gain * layout.accumulate > WORTH_ANOTHER * seen.seconds

    def _from_ends(self) -> Filled:
        """From all kept and all computed again to what is between."""
        again = self._all_again()
        self.room = self.limit
        if self._fine(again.quick, min(self.limit, self.roomy or self.limit)):
            self.room = min(self.limit, self.roomy or self.limit)
        elif not self._fine(again.quick, self.limit):
            uneven = self._uneven(again) if self._alone else None
            return uneven or replace(again, short=max(1.0, *self._missing(again.quick)))
        found = self._between(again)
        if self.layout.mesh.world > 1:
            return found
        whole = self._whole_blocks()._between(again)  # one device may wait for a host that selective recompute keeps busy
        return min((found, whole), key=lambda one: one.quick.seconds)

    def _whole_blocks(self) -> _Filling:
        """The same without selective recomputation."""
        ways = tuple(tuple(way for way in of if way.mode != "selective") for of in self.stack.ways)
        other = replace(self, stack=replace(self.stack, ways=ways))
        other.room, other.kept = self.room, self.kept
        return other

    def _between(self, again: Filled) -> Filled:
        """From what keeping everything lacks and what recomputing everything frees, to just enough."""
        worth = self._worth(again.quick)
        needs = [missing / share * (1 + CLOSE) for missing, share in zip(self._missing(self.kept), worth, strict=True)]
        seen, layout = self.kept, self.layout
        for _ in range(TRIES):
            step = self._joint(layout, seen, worth) if self._alone else self._treated(needs)
            if step is None:
                break
            layout = replace(self.layout, cuts=step.cuts or self.layout.cuts, modes=step.modes)
            if layout.modes == again.layout.modes and layout.cuts == again.layout.cuts:
                break
            seen = self.pricer.quick(layout)
            if self._fine(seen, self.room):
                better = seen.seconds <= again.quick.seconds
                return Filled(layout=layout, quick=seen) if better else again
            missed = self._missing(seen)
            needs = [need + max(0.0, more) / share * (1 + STEP) + (CLOSE * self.room if more > 0 else 0.0)
                     for need, more, share in zip(needs, missed, worth, strict=True)]  # fmt: skip
            worth = [share * (1 - STEP) if more > 0 else share for share, more in zip(worth, missed, strict=True)]
        return again

    def _missing(self, seen: Quick) -> list[float]:
        """Bytes too many on each rank; below zero where there is room."""
        return [bytes_ - self.room for bytes_ in self._bytes(seen)]

    def _bytes(self, seen: Quick) -> list[float]:
        """Of each rank; of the worst as many as its margin says."""
        found = [float(bytes_) for bytes_ in seen.stage_memory]
        worst = max(range(len(found)), key=found.__getitem__)
        found[worst] = max(found[worst], self.room - float(seen.margin_bytes))
        return found

    @staticmethod
    def _fine(seen: Quick, room: float) -> bool:
        return seen.fits and seen.memory_bytes <= room

    def _worth(self, again: Quick) -> list[float]:
        """Of each rank: bytes really freed for each byte that the blocks' ways save."""
        saved = self._saves(self._most())
        freed = [a - b for a, b in zip(self.kept.stage_memory, again.stage_memory, strict=True)]
        worst = max(range(len(freed)), key=lambda rank: self.kept.stage_memory[rank])
        freed[worst] = max(freed[worst], again.margin_bytes - self.kept.margin_bytes)
        return [min(1.0, max(0.3, f / s)) if s > 0 and f > 0 else 1.0 for f, s in zip(freed, saved, strict=True)]

    def _saves(self, modes: Sequence[str]) -> list[float]:
        """Bytes that a residency saves on each rank, as the ways have it."""
        found = [0.0] * self.layout.mesh.pp
        for rank, block, flight in self._mine():
            found[rank] += flight * next((way.saves for way in self.stack.ways[block] if way.mode == modes[block]), 0.0)
        return found

    def seconds(self, modes: Sequence[str]) -> list[float]:
        """Of each rank for one micro-batch, by its blocks."""
        found = [0.0] * self.layout.mesh.pp
        found[0] += self.stack.before[0]
        found[self._rank(len(self.layout.cuts))] += self.stack.after[0]
        for rank, block, _ in self._mine():
            found[rank] += self.stack.seconds[block] + next((way.seconds for way in self.stack.ways[block] if way.mode == modes[block]), 0.0)
        return found

    def _rank(self, stage: int) -> int:
        layout = self.layout
        return rank_of(layout.schedule or "", layout.mesh.pp, stage) if layout.mesh.pp > 1 else 0

    def _mine(self) -> Iterator[tuple[int, int, int]]:
        """Rank, block and micro-batches in flight of every block."""
        layout, flights = self.layout, self._flights()
        for stage, (start, end) in enumerate(self._spans(layout.cuts)):
            for block in range(start, end):
                yield self._rank(stage), block, flights[stage]

    @property
    def _alone(self) -> bool:
        """Whether every rank of a pipeline has one stage, and other cuts may be taken."""
        return self.layout.mesh.pp > 1 and self.layout.interleave == 1 and not self.given

    def _flights(self) -> tuple[int, ...]:
        layout = self.layout
        if layout.mesh.pp == 1:
            return (1,)
        return in_flight(layout.schedule or "1f1b", layout.mesh.pp, layout.interleave, layout.accumulate)

    def _spans(self, cuts: Sequence[int]) -> list[tuple[int, int]]:
        return list(pairwise([0, *cuts, len(self.stack.seconds)]))

    # ------------------------------------------------------------------ steps

    def step(self, beside: Sequence[float]) -> Cut | None:
        """Cuts and residency for what each rank holds beside its blocks; asked twice where another is worth it."""
        key = (self.room, *beside)
        if self._last is None or self._last[0] != key:
            self._last = key, self._step(beside)
        return self._last[1]

    def _step(self, beside: Sequence[float]) -> Cut | None:
        room = self.room * (1 - CLOSE)
        if self._alone:
            return joint(self.stack, self._flights(), [room - more for more in beside])
        return self._treated([linear + more - room for linear, more in zip(self._linear(self.layout), beside, strict=True)])

    def _beside(self, layout: Layout, seen: Quick) -> list[float]:
        """What each rank holds beside its blocks."""
        return [bytes_ - linear for bytes_, linear in zip(self._bytes(seen), self._linear(layout), strict=True)]

    def _joint(self, layout: Layout, seen: Quick, worth: Sequence[float]) -> Cut | None:
        """Cuts and residency together; what the quick cost sees beside the blocks is taken from each stage's room."""
        rooms = [self.room * (1 - CLOSE) - more for more in self._beside(layout, seen)]
        return joint(self.stack, self._flights(), rooms, worth)

    def _linear(self, layout: Layout) -> list[float]:
        """Bytes of each rank's blocks, and of what is before and after them."""
        stack, flights = self.stack, self._flights()
        found, spans = [0.0] * layout.mesh.pp, self._spans(layout.cuts)
        for stage, (start, end) in enumerate(spans):
            ends = [stack.before] * (stage == 0) + [stack.after] * (stage == len(spans) - 1)
            held, state = (sum(part[p] for part in ends) for p in (1, 2))
            for block in range(start, end):
                saves = next((way.saves for way in stack.ways[block] if way.mode == layout.modes[block]), 0.0)
                held, state = held + stack.held[block] - saves, state + stack.state[block]
            found[self._rank(stage)] += state + held * flights[stage]
        return found

    def _treated(self, needs: Sequence[float]) -> Cut | None:
        """The residency of every rank for given needs; cuts stay."""
        mine: list[list[tuple[int, int]]] = [[] for _ in needs]
        for rank, block, flight in self._mine():
            mine[rank].append((block, flight))
        modes = ["keep"] * len(self.stack.seconds)
        for need, blocks in zip(needs, mine, strict=True):
            chosen = least([_held(self.stack.ways[block], flight) for block, flight in blocks], need)
            if chosen is None:
                return None
            for (block, _), mode in zip(blocks, chosen.modes, strict=True):
                modes[block] = mode
        return Cut(cuts=self.layout.cuts, modes=tuple(modes), seconds=0.0)

    def _most(self) -> tuple[str, ...]:
        return tuple(max(ways, key=lambda way: way.saves).mode if ways else "keep" for ways in self.stack.ways)

    def _all_again(self) -> Filled:
        """Everything computed again."""
        layout = replace(self.layout, modes=self._most())
        seen = self.pricer.quick(layout) if layout.modes != self.layout.modes else self.kept
        if self.may_keep() and seen.margin_bytes < self.kept.margin_bytes:  # computing again only costs here
            layout, seen = self.layout, self.kept
        return Filled(layout=layout, quick=seen)

    def _uneven(self, again: Filled) -> Filled | None:
        """Where even cuts lack a little on one rank, others may fit."""
        if max(self._missing(again.quick)) > NEAR * self.room:
            return None
        step = self._joint(again.layout, again.quick, self._worth(again.quick))
        if step is None:
            return None
        layout = replace(self.layout, cuts=step.cuts, modes=step.modes)
        seen = self.pricer.quick(layout)
        return Filled(layout=layout, quick=seen) if self._fine(seen, self.room) else None


@lru_cache(maxsize=8192)
def _held(ways: Ways, flight: int) -> Ways:
    """Ways of a block of which several micro-batches are held."""
    return ways if flight == 1 else tuple(RecomputeOption(way.saves * flight, way.seconds, way.mode) for way in ways)
