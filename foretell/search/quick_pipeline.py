"""The quick cost of a pipeline: seconds of each stage's events, laid out in the schedule's order; bytes in flight.

Events wait for each other as in `simulate.pipeline`. With many micro-batches the schedule repeats itself: a few rounds are
walked, and each further micro-batch takes as long as the slowest rank needs for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from foretell.errors import UserError
from foretell.lower.pipeline.order import Event, in_turn, needs, orders
from foretell.plan.blocks import V_SHAPED
from foretell.plan.legal import SPLIT_BACKWARD
from foretell.plan.types import LOOPED
from foretell.search.quick_memory import Bytes, Flight, Keeper, flights
from foretell.search.quick_stage import Seconds, Stage, Timer, keys_of
from foretell.search.sheet import Works
from foretell.search.sheet_ops import AFTER, BEFORE

if TYPE_CHECKING:
    from foretell.search.quick import Composer, Layout, Quick

MOST_EVENTS = 1200
"""Events that are walked one by one."""
F, F_WHOLE, B, B_WHOLE, W = range(5)
"""Kinds of events: a forward that gathers its parameters or finds them whole, a backward likewise, weights' gradients."""


class Variant(NamedTuple):
    """Events of one stage that take equally long."""

    stage: int
    kind: int
    begins: bool
    """The stage's first event."""
    adds: bool
    """A backward that finds gradients there."""
    ends: bool
    """The stage's last backward."""


@dataclass(frozen=True)
class Order:
    """A schedule, ready to be timed."""

    steps: tuple[tuple[int, int, int, int], ...]
    """Rank, variant, position of the event it waits for (-1: none), lane on which that one's result comes (-1: none);
    every event after those it waits for."""
    variants: tuple[Variant, ...]
    counts: tuple[int, ...]
    """How often each variant runs."""
    lanes: int
    flights: tuple[tuple[tuple[int, ...], ...], ...]
    """By rank: micro-batches in flight of each of its stages, where they are most."""
    micro_batches: int


def rank_of(schedule: str, ranks: int, stage: int) -> int:
    turn, place = divmod(stage, ranks)
    return ranks - 1 - place if schedule in V_SHAPED and turn % 2 else place


@lru_cache(maxsize=256)
def order_of(schedule: str, ranks: int, stages: int, micro_batches: int) -> Order:
    """All events of a schedule in an order that can be walked."""
    every = orders(schedule, ranks, stages, micro_batches)
    known: dict[Event, int] = {}
    steps: list[tuple[int, int, int, int]] = []
    variants: dict[Variant, int] = {}
    counts: list[int] = []
    lanes: dict[tuple[int, int], int] = {}
    state = _State(schedule, stages, micro_batches)
    for rank, event in in_turn(every, stages - 1):
        need = needs(event, stages - 1)
        number = variants.setdefault(state.next(event.kind, event.stage), len(variants))
        counts += [0] * (number == len(counts))
        counts[number] += 1
        waits = known[need] if need is not None else -1
        apart = waits >= 0 and steps[waits][0] != rank
        lane = lanes.setdefault((steps[waits][0], rank), len(lanes)) if apart else -1
        known[event] = len(steps)
        steps.append((rank, number, waits, lane))
    in_flight = tuple(_in_flight(mine) for mine in every)
    return Order(tuple(steps), tuple(variants), tuple(counts), len(lanes), in_flight, micro_batches)


class _State:
    """What each stage did last: whether its parameters are whole, whether it has gradients."""

    def __init__(self, schedule: str, stages: int, micro_batches: int) -> None:
        self.looped, self.split = schedule in LOOPED, schedule in SPLIT_BACKWARD
        self.before = [""] * stages
        self.added = [False] * stages
        self.left = [micro_batches] * stages

    def next(self, kind: str, stage: int) -> Variant:
        before = self.before[stage]
        begins, makes = not before, kind == "W" or (kind == "B")
        if kind == "W":
            code = W
        elif kind == "F":
            code = F_WHOLE if before == "B" or (begins and self.looped) else F
            self.before[stage] = "F"
        else:
            code = B if before == "F" else B_WHOLE
            self.before[stage] = "B"
        adds = makes and self.added[stage]
        self.added[stage] = self.added[stage] or makes
        self.left[stage] -= makes
        return Variant(stage, code, begins and self.looped, adds, makes and not self.left[stage])


def _in_flight(mine: Sequence[tuple[str, int, int]]) -> tuple[tuple[int, ...], ...]:
    """Micro-batches of each of a rank's stages that are in flight, and that wait for weights' gradients alone."""
    held = sorted({stage for _, stage, _ in mine})
    counts, waiting = dict.fromkeys(held, 0), dict.fromkeys(held, 0)
    seen: set[tuple[int, ...]] = set()
    for kind, stage, _ in mine:
        counts[stage] += (kind == "F") - (kind in ("B", "W"))
        waiting[stage] += (kind == "I") - (kind == "W")
        if kind in ("F", "I"):
            seen.add((*(counts[one] for one in held), *(waiting[one] for one in held)))
    return flights(seen)


# ---------------------------------------------------------------------- one layout


def pipeline_cost(composer: Composer, layout: Layout, works: Works, modes: Sequence[str]) -> Quick:
    """What a layout with pipeline stages costs."""
    return Pipe(composer, layout, works, modes).cost()


class Pipe:
    def __init__(self, composer: Composer, layout: Layout, works: Works, modes: Sequence[str]) -> None:
        from foretell.search.quick import runs_of, way_of

        self.composer, self.layout = composer, layout
        self.plain = works.compiling("none")
        self.works = self.plain if layout.compile == "none" else self.plain.compiling("model")
        self.schedule = layout.schedule or "1f1b"
        self.ranks, self.count = layout.mesh.pp, len(layout.cuts) + 1
        if self.count % self.ranks or (self.count > self.ranks and self.schedule not in LOOPED):
            raise UserError(f"{self.count} stages do not share {self.ranks} ranks under {self.schedule}", "give other cuts")
        edges = (0, *layout.cuts, len(modes))
        kinds = composer.sheet.kinds
        made = [
            Stage(runs_of(kinds[a:b], modes[a:b]), first=not i, last=i == self.count - 1)
            for i, (a, b) in enumerate(pairwise(edges))
        ]
        self.stages = [composer.ids.setdefault(stage, stage) for stage in made]
        self.where = [rank_of(self.schedule, self.ranks, stage) for stage in range(self.count)]
        self.way = way_of(layout)
        self.split = self.schedule in SPLIT_BACKWARD
        self.whole = works.boundary * (layout.mesh.tp if works.material.meta.get("split_stream") else 1)

    def root(self, stage: Stage) -> str:
        return BEFORE if stage.first else ("tail" if self.composer.sheet.tied else AFTER) if stage.last else "none"

    def cost(self) -> Quick:
        micro = self.layout.accumulate
        walked = self._walked(micro)
        order = order_of(self.schedule, self.ranks, self.count, walked)
        events = [self.events(index) for index in range(self.count)]
        step, busy = self._timed(order, events)
        held = [self.held(rank) for rank in range(self.ranks)]
        each = [sum(events[index].each for index in mine) for mine in held]
        updates = [self.update(rank) for rank in range(self.ranks)]
        more = micro - walked
        total = step + more * max(each) + max(updates)
        stage_seconds = tuple(
            one + more * per + update for one, per, update in zip(busy, each, updates, strict=True)
        )  # fmt: skip
        worst = max(range(self.ranks), key=lambda rank: stage_seconds[rank])
        return self.composer.answer(
            seconds=total, total=self._sum(held[worst], events), update=updates[worst], host=0.0,
            bubble=max(0.0, total - stage_seconds[worst]), memories=[self.memory(rank, order) for rank in range(self.ranks)],
            stage_seconds=stage_seconds, loads=self._loads(events, updates),
        )  # fmt: skip

    def held(self, rank: int) -> list[int]:
        """Stages of a rank."""
        return [index for index in range(self.count) if self.where[index] == rank]

    def _walked(self, micro: int) -> int:
        """Micro-batches that are walked one by one."""
        least = 2 * self.ranks + (self.ranks if self.schedule in LOOPED else 0)
        fits = MOST_EVENTS // (self.count * (3 if self.split else 2))
        walked = max(least, fits // self.ranks * self.ranks)
        return micro if micro <= walked else walked + (micro % self.ranks if walked + micro % self.ranks <= micro else 0)

    # ------------------------------------------------------------------ time

    def events(self, index: int) -> Events:
        """Seconds of a stage's events."""
        stage = self.stages[index]
        key = ("events", id(stage), self.way.reshard, self.split, id(self.works), self.schedule in LOOPED)
        found = self.composer.stages.get(key)
        if found is None:
            found = self.composer.stages[key] = self._timed_stage(stage)
        return found

    def _timed_stage(self, stage: Stage) -> Events:
        timer = Timer(self.works, self.way, self.composer.talk, self.composer.issue)
        root, data = self.root(stage), self.way.data
        forward = timer.forward(stage, root)
        plain = timer.forward(stage, root, gathers=False) if data else forward
        backward = timer.backward(stage, root, reduces=not data)
        ready = timer.backward(stage, root, gathers=False, reduces=not data) if data else backward
        after = timer.reduce_all(stage, root) if data else Seconds()
        adding = 0.0 if data else sum(timer.unit(key).adding * n for key, n in keys_of(stage, root))
        crossing = self._crossing(stage)
        gather_all = sum(timer.gather(timer.unit(key)) * n + timer.unit(key).copy_out * n for key, n in keys_of(stage, root)) if data else 0.0
        alone, both = self._weights(stage)
        return Events(forward, plain, backward, ready, after, adding, crossing, gather_all, alone, both, self.split, stage.first)

    def _weights(self, stage: Stage) -> tuple[float, float]:
        pieces = [(self.works.work(kind, mode), count) for kind, mode, count in stage.runs]
        pieces += [(self.works.work(AFTER), 1)] if stage.last else []
        pieces += [(self.works.work(BEFORE), 1)] if stage.first else []
        return sum(w.weights_seconds * n for w, n in pieces), sum(w.both_seconds * n for w, n in pieces)

    def _crossing(self, stage: Stage) -> tuple[float, float]:
        """Seconds in which a split stage gathers what it sends, forward and backward."""
        if self.layout.mesh.tp == 1 or not self.works.material.meta.get("split_stream"):
            return 0.0, 0.0
        seconds = self.composer.talk("tp", "all_gather", self.whole)
        return (0.0 if stage.last else seconds), (0.0 if stage.first else seconds)

    def _timed(self, order: Order, events: Sequence[Events]) -> tuple[float, list[float]]:
        """The end of the last event, and the seconds each rank is busy."""
        taken, busy = [], [0.0] * self.ranks
        for one, count in zip(order.variants, order.counts, strict=True):
            event = events[one.stage]
            seconds = event.seconds[one.kind] + event.gather_all * one.begins + event.adding * one.adds
            taken.append(seconds + event.after.total * one.ends)
            busy[self.where[one.stage]] += count * taken[-1]
        message = self.composer.talk("pp", "p2p", self.whole)
        free, lanes = [0.0] * self.ranks, [0.0] * order.lanes
        ends: list[float] = []
        push = ends.append
        for rank, number, waits, lane in order.steps:
            start = free[rank]
            if waits >= 0:
                arrived = ends[waits]
                if lane >= 0:
                    if lanes[lane] > arrived:
                        arrived = lanes[lane]
                    arrived += message
                    lanes[lane] = arrived
                if arrived > start:
                    start = arrived
            start += taken[number]
            free[rank] = start
            push(start)
        return max(free), busy

    def update(self, rank: int) -> float:
        """Seconds of the update of what a rank holds."""
        composer, mine = self.composer, [self.stages[index] for index in self.held(rank)]
        key = ("update", *map(id, mine), id(self.works))
        found = composer.stages.get(key)
        if found is None:
            device = composer.update(self.works, [(stage, self.root(stage)) for stage in mine], self.way)
            units = [one for stage in mine for one in keys_of(stage, self.root(stage))]
            tensors = sum(self.works.unit(key, 1, data=False).tensors * n for key, n in units)
            share = min(1.0, tensors / max(1, self.works.material.parameters))
            found = composer.stages[key] = max(device, composer.around(self.works, 1, share))
        return float(found)

    def _sum(self, mine: Sequence[int], events: Sequence[Events]) -> Seconds:
        found = Seconds()
        for index in mine:
            found.plus(events[index].forward, self.layout.accumulate)
            found.plus(events[index].backward, self.layout.accumulate)
            found.plus(events[index].after)
        return found

    def _loads(self, events: Sequence[Events], updates: Sequence[float]) -> list[tuple[Seconds, float]]:
        """What one rank does on average."""
        share = self.layout.accumulate / self.ranks
        mean = Seconds(
            device=share * sum(one.forward.device + one.backward.device for one in events),
            flops=share * sum(one.forward.flops + one.backward.flops for one in events),
            moved=share * sum(one.forward.moved + one.backward.moved for one in events),
        )  # fmt: skip
        return [(mean, sum(updates) / self.ranks)]

    # ------------------------------------------------------------------ memory

    def memory(self, rank: int, order: Order) -> Bytes:
        """What a rank holds."""
        mine = [(index, stage) for index, stage in enumerate(self.stages) if self.where[index] == rank]
        stages = tuple(stage for _, stage in mine)
        micro = self.layout.accumulate
        inputs = sum((index > 0) + (index < self.count - 1) for index, _ in mine)
        held = sum(1 for index, _ in mine if index and self.where[index - 1] != rank) if self.schedule != "1f1b" else 0
        profiles = order.flights[rank]
        if self.schedule == "gpipe":
            profiles = ((micro, 0),)
        flight = Flight(
            profiles, micro, self.whole * micro * (inputs + held), self.schedule in LOOPED,
            self.whole if self.whole != self.works.boundary else 0,
        )  # fmt: skip
        key = ("piped", *map(id, stages), flight, self.way.reshard, id(self.plain), self.composer.reserves)
        found = self.composer.stages.get(key)
        if found is None:
            keeper = Keeper(self.plain, self.way, micro)
            found = keeper.piped([(stage, self.root(stage)) for stage in stages], flight)
            beside = [  # with many micro-batches in flight, what one of them leaves serves the next
                self.composer.slack(self.plain, self.way, stage, self.root(stage), 2, piped=True) // max(1, max(row[place] for row in profiles))
                for place, stage in enumerate(stages) if self.composer.reserves and (stage.first or stage.last)
            ]  # fmt: skip
            found = replace(found, reserved=round(found.reserved * 1.02) + max(beside, default=0))
            self.composer.stages[key] = found
        return found


class Events:
    """Seconds of the events of one stage, each bound by the device or by its host."""

    def __init__(
        self, forward: Seconds, plain: Seconds, backward: Seconds, ready: Seconds, after: Seconds, adding: float,
        crossing: tuple[float, float], gather_all: float, alone: float, both: float, split: bool, first: bool,
    ) -> None:  # fmt: skip
        self.forward, self.backward, self.after = forward, backward, after
        self.adding, self.gather_all = adding, gather_all
        sizes = [max(one.total, one.host) for one in (forward, plain, backward, ready)]
        sizes = [size + crossing[place > 1] for place, size in enumerate(sizes)]
        later = 0.0
        if split:
            later = sizes[2] if first else alone + both
            sizes[2:] = [0.0, 0.0] if first else [max(0.0, size - alone) for size in sizes[2:]]
        self.seconds = (*sizes, later)
        self.each = sizes[1] + sizes[2] + later + adding
        """A micro-batch in the middle of the schedule: forward after backward finds its parameters whole."""
