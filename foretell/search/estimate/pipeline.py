"""The quick cost of a pipeline: its stages' events laid out in the schedule's order, its ranks replayed with few micro-batches.

Events wait for each other as in `simulate.pipeline`. With many micro-batches the schedule repeats itself: a few rounds are
walked, and each further micro-batch takes as long as the slowest rank needs for one. A rank is replayed with the first few
micro-batches of its own order; what more of them would keep at its highest point is added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from foretell.errors import UserError
from foretell.lower.pipeline.order import Event, in_turn, needs, orders, target
from foretell.lower.pipeline.order import Order as Turns
from foretell.lower.pipeline.part import GRADIENT_RECEIVED, GRADIENT_SENT, HELD, INPUT, RECEIVED
from foretell.plan.legal import SPLIT_BACKWARD
from foretell.plan.types import LOOPED
from foretell.quantities import Task
from foretell.search.block_costs.sheet import Works
from foretell.search.estimate.depth import DeepStage, Depth, Peak, runs_of, stage_of
from foretell.search.estimate.stage import FEW, FEW_SPLIT
from foretell.search.space.stages import rank_of
from foretell.simulate.time.streams import Makespan

if TYPE_CHECKING:
    from foretell.search.estimate.plan import Composer, Layout, Ops, Quick

UNSURE = 0.15
"""Share by which a rank may hold more than its short stack says."""
MOST_HELD = 32
"""Micro-batches of a schedule that holds all of them, which are replayed with every block."""
MOST_EVENTS = 1200
"""Events that are walked one by one."""
Flight = tuple[tuple[int, int, int], ...]
"""Of each stage: its number, micro-batches in flight, and those that wait for weights' gradients alone."""
Variant = tuple[int, tuple[tuple[str, int], ...]]
"""Stage, and its kinds of events that add up to one, each with a sign."""


@dataclass(frozen=True)
class Order:
    """A schedule, ready to be timed."""

    course: Makespan
    variants: tuple[Variant, ...]
    which: tuple[int, ...]
    """Of every task: its variant; -1: a message, -2 and below: the update of rank 0, 1, ..."""
    counts: tuple[int, ...]
    """How often each variant runs."""
    turns: tuple[Turns, ...]
    """Events of every rank."""
    flights: tuple[tuple[Flight, ...], ...]
    """Of every rank, wherever most may be held."""
    micro_batches: int


@lru_cache(maxsize=256)
def order_of(schedule: str, ranks: int, stages: int, micro_batches: int) -> Order:
    """All events of a schedule in an order that can be walked."""
    every = orders(schedule, ranks, stages, micro_batches)
    tasks: list[Task] = []
    which: list[int] = []
    variants: dict[Variant, int] = {}
    counts: list[int] = []
    done: dict[Event, int] = {}
    state = _State(schedule, stages, micro_batches)
    for rank, event in in_turn(every, stages - 1):
        need = needs(event, stages - 1)
        number = variants.setdefault((event.stage, state.next(event.kind, event.stage)), len(variants))
        counts += [0] * (number == len(counts))
        counts[number] += 1
        tasks.append(Task(event.kind, f"rank {rank}", 0.0, () if need is None else (done[need],)))
        which.append(number)
        to = target(event, stages - 1)
        there = rank_of(schedule, ranks, to) if to is not None else rank
        if there != rank:
            tasks.append(Task("send", f"{rank} to {there}", 0.0, (len(tasks) - 1,)))
            which.append(-1)
        done[event] = len(tasks) - 1
    for rank in range(ranks):
        tasks.append(Task("update", f"rank {rank}", 0.0))
        which.append(-2 - rank)
    return Order(Makespan(tasks), tuple(variants), tuple(which), tuple(counts), every, tuple(map(in_flight, every)), micro_batches)


class _State:
    """What each stage did last: whether its parameters are whole, whether it has gradients, and how many are to come."""

    def __init__(self, schedule: str, stages: int, micro_batches: int) -> None:
        self.split, self.looped = schedule in SPLIT_BACKWARD, schedule in LOOPED
        self.before = [""] * stages
        self.made, self.waiting = [False] * stages, [False] * stages
        self.left = [micro_batches] * stages

    def next(self, kind: str, stage: int) -> tuple[tuple[str, int], ...]:
        before, split = self.before[stage], self.split and stage > 0
        if kind == "F":
            self.before[stage] = "F"
            if before:
                return ((f"F {before}", 1),)
            return (("F B", 1), ("gather", 1)) if self.looped else (("F F", 1),)
        if kind == "I" and not split:
            return ()
        if kind == "I":
            fresh, self.before[stage] = not self.waiting[stage], "B"
            self.waiting[stage] = False
            if before == "F":
                return (("I first" if fresh else "I F", 1),)
            return (("I I", 1),) if fresh else (("I I", 1), ("I F", 1), ("I first", -1))
        last = "W" if kind == "W" else "B"
        first, self.made[stage] = not self.made[stage], True
        self.left[stage] -= 1
        more: tuple[tuple[str, int], ...]
        if split:
            self.waiting[stage] = True
            more = (("W first" if first else "W more", 1),)
            return more if self.left[stage] else (*more, ("tail", 1))
        self.before[stage] = "B"
        after = f"{last} F"
        again = "W more" if last == "W" else "B B"
        more = ((f"{last} first" if first else after, 1),) if before == "F" else ((again, 1),)
        return more if self.left[stage] else (*more, ("tail", 1))


def in_flight(mine: Turns) -> tuple[Flight, ...]:
    """Wherever most may be held."""
    counts: dict[int, list[int]] = {event.stage: [0, 0] for event in mine}
    seen: set[Flight] = set()
    for kind, stage, _ in mine:
        counts[stage][0] += (kind == "F") - (kind in ("B", "W"))
        counts[stage][1] += (kind == "I") - (kind == "W")
        if kind in ("F", "I"):
            seen.add(tuple((one, *found) for one, found in sorted(counts.items())))  # type: ignore[misc]
    return _largest(seen)


def _largest(rows: Iterable[Flight]) -> tuple[Flight, ...]:
    """Those that no other one exceeds everywhere."""
    found: list[Flight] = []
    for row in sorted(set(rows), key=lambda row: -sum(a + b for _, a, b in row)):
        if not any(all(x[1] >= y[1] and x[2] >= y[2] for x, y in zip(other, row, strict=True)) for other in found):
            found.append(row)
    return tuple(found)


# ---------------------------------------------------------------------- one layout


class Pipe:
    """A layout with pipeline stages."""

    def __init__(self, composer: Composer, layout: Layout, works: Works, modes: Sequence[str]) -> None:
        self.composer, self.layout, self.modes = composer, layout, modes
        self.works = works.compiling("none")
        self.faster = 1.0 if layout.compile == "none" else self._share(self.works.compiling("model"), modes)
        self.schedule = layout.schedule or "1f1b"
        self.ranks, self.count = layout.mesh.pp, len(layout.cuts) + 1
        if self.count % self.ranks or (self.count > self.ranks and self.schedule not in LOOPED):
            raise UserError(f"{self.count} stages do not share {self.ranks} ranks under {self.schedule}", "give other cuts")
        self.edges = (0, *layout.cuts, len(modes))
        self.where = [rank_of(self.schedule, self.ranks, stage) for stage in range(self.count)]
        self.made = composer.stages(layout, self.works)
        whole = self.works.material.meta.get("split_stream")
        self.message = self.works.boundary * (layout.mesh.tp if whole else 1)

    def stage(self, index: int, *, whole: bool = False) -> DeepStage:
        """The blocks of a stage; `whole`: of which every one is walked. The same for all layouts that have such a stage."""
        start, end = self.edges[index : index + 2]
        first, last = index == 0, index == self.count - 1
        known, key = self.works.known, (DeepStage, start, end, self.modes[start:end], first, last, whole)
        if key not in known:
            runs = runs_of(self.composer.sheet.kinds[start:end], self.modes[start:end])
            known[key] = DeepStage(runs, first, last, whole=True) if whole else stage_of(runs, self.works.taken, first=first, last=last)
        found: DeepStage = known[key]
        return found

    def _share(self, compiled: Works, modes: Sequence[str]) -> float:
        """How much quicker a compiled step is, on one device."""
        plain, quick = (self.composer.ops(works, modes) for works in (self.works, compiled))
        return min(1.0, quick.device / plain.device) if plain.device else 1.0

    def cost(self, held: Depth = Depth.SHORT) -> Quick:
        walked = self._walked(self.layout.accumulate)
        order = order_of(self.schedule, self.ranks, self.count, walked)
        memories = self.memories(order, held)
        if held == Depth.ALIVE and max(one.reserved for one in memories) > self.composer.careful:
            return self.composer.bound(self._whole_ops(), memories, self.layout)
        return self.timed(order, walked, memories)

    def timed(self, order: Order, walked: int, memories: Sequence[Peak]) -> Quick:
        """The cost where it is known what each rank holds."""
        micro = self.layout.accumulate
        events = [self.events(index) for index in range(self.count)]
        updates = [self.update(rank) for rank in range(self.ranks)]
        step, busy = self._timed(order, events, updates)
        each = [sum(_each(events[index], index, self.schedule) for index in self.held(rank)) for rank in range(self.ranks)]
        more = micro - walked
        total = step + more * max(each)
        stage_seconds = tuple(one + more * per + update for one, per, update in zip(busy, each, updates, strict=True))
        worst = max(range(self.ranks), key=lambda rank: stage_seconds[rank])
        return self.composer.answer(
            seconds=total, ops=[self.ops(rank) for rank in range(self.ranks)], worst=worst, busy=stage_seconds[worst] - updates[worst],
            waited={}, update=updates[worst], updates=updates, bubble=max(0.0, total - stage_seconds[worst]),
            memories=memories, stage_seconds=stage_seconds,
        )  # fmt: skip

    def held(self, rank: int) -> list[int]:
        """Stages of a rank."""
        return [index for index in range(self.count) if self.where[index] == rank]

    def _least(self, micro: int) -> int:
        """Micro-batches with which a schedule comes to repeat itself; one that holds all of them never does."""
        least = 2 * self.ranks + (self.ranks if self.schedule in LOOPED else 0)
        least = max(least, MOST_HELD) if self.schedule == "gpipe" else least
        return micro if micro <= least else least + (micro % self.ranks if least + micro % self.ranks <= micro else 0)

    def _walked(self, micro: int) -> int:
        """Micro-batches that are walked one by one."""
        least = 2 * self.ranks + (self.ranks if self.schedule in LOOPED else 0)
        fits = MOST_EVENTS // (self.count * (3 if self.schedule in SPLIT_BACKWARD else 2))
        walked = max(least, fits // self.ranks * self.ranks)
        return micro if micro <= walked else walked + (micro % self.ranks if walked + micro % self.ranks <= micro else 0)

    # ------------------------------------------------------------------ time

    def events(self, index: int) -> Mapping[str, float]:
        """Seconds of a stage's events."""
        found = self.made.seconds(self.stage(index))
        return found if self.faster == 1.0 else {name: value * self.faster for name, value in found.items()}

    def update(self, rank: int) -> float:
        """Seconds of the update of what a rank holds."""
        return sum(self.events(index)["update"] for index in self.held(rank))

    def _timed(self, order: Order, events: Sequence[Mapping[str, float]], updates: Sequence[float]) -> tuple[float, list[float]]:
        """The end of the step, and the seconds each rank is busy with events."""
        taken, busy = [], [0.0] * self.ranks
        for (stage, parts), count in zip(order.variants, order.counts, strict=True):
            taken.append(max(0.0, sum(sign * events[stage][name] for name, sign in parts)))
            busy[self.where[stage]] += count * taken[-1]
        speeds = self.composer.speeds(self.layout.reshard)
        message = speeds.p2p_time(self.message) * speeds.slowdown if speeds is not None else 0.0
        seconds = [taken[one] if one >= 0 else message if one == -1 else updates[-2 - one] for one in order.which]
        return order.course.seconds(seconds), busy

    def _whole_ops(self) -> Ops:
        runs = [run for index in range(self.count) for run in self.stage(index).every]
        return self.composer.ops_of(self.works, runs).times(self.layout.accumulate)

    def ops(self, rank: int) -> Ops:
        """Sums over the ops of a rank."""
        mine = [self.stage(index) for index in self.held(rank)]
        runs = [run for stage in mine for run in stage.every]
        first, last = any(one.first for one in mine), any(one.last for one in mine)
        found = self.composer.ops_of(self.works, runs, first=first, last=last)
        return found.times(self.layout.accumulate)

    # ------------------------------------------------------------------ memory

    def memories(self, order: Order, held: Depth) -> list[Peak]:
        """What each rank holds; with every block, of those that may hold most or more than there is."""
        found = [self.memory(rank, order, min(held, Depth.SHORT)) for rank in range(self.ranks)]
        if held < Depth.WHOLE:
            return found
        most = 0
        for rank in sorted(range(self.ranks), key=lambda rank: -found[rank].reserved):
            if found[rank].reserved * (1 + UNSURE) > min(most, self.composer.careful):
                found[rank] = self.memory(rank, order, held)
                most = max(most, found[rank].reserved)
        return found

    def memory(self, rank: int, order: Order, held: Depth) -> Peak:
        """What a rank holds: replayed with few micro-batches, or as its events add up."""
        mine = [(index, self.stage(index)) for index in self.held(rank)]
        every = order.turns[rank]
        sizes = {index: self.made.sizes(stage) for index, stage in mine}
        most = self._most(order.flights[rank], sizes)
        if self.schedule == "gpipe":
            most += (self.layout.accumulate - order.micro_batches) * sum(one[HELD] for one in sizes.values())
        stays = sum(self._stays(index, sizes[index], rank) for index, _ in mine)
        if held == Depth.ALIVE:
            beside = max(one["event"] - one[HELD] for one in sizes.values())
            lasting = sum(one["lasting"] for one in sizes.values())
            found = round(lasting + most + beside + self.layout.accumulate * stays)
            return Peak(found, found)
        few = min(self.layout.accumulate, FEW_SPLIT if self.schedule in SPLIT_BACKWARD else FEW)
        short, last = tuple(event for event in every if event.micro < few), self.where[self.count - 1]
        if held == Depth.WHOLE:
            few = self._least(self.layout.accumulate)
            short = order_of(self.schedule, self.ranks, self.count, few).turns[rank]
            mine = [(index, self.stage(index, whole=True)) for index, _ in mine]
        names = _names(mine)
        peak = self.made.peak(
            rank if rank in (0, last) else -1, tuple((names[index], stage) for index, stage in mine),
            tuple(event._replace(stage=names[event.stage]) for event in short), (self.where[0], last),
        )  # fmt: skip
        more = round(most - self._most(in_flight(short), sizes) + (self.layout.accumulate - few) * stays)
        return Peak(peak.reserved + more, peak.allocated + more)

    @staticmethod
    def _most(rows: Sequence[Flight], sizes: Mapping[int, Mapping[str, float]]) -> float:
        return max(sum(held * sizes[stage][HELD] + left * sizes[stage]["left"] for stage, held, left in row) for row in rows)

    def _stays(self, index: int, sizes: Mapping[str, float], rank: int) -> float:
        """Bytes of every micro-batch of a step that stay until its end."""
        found = sizes[INPUT] if index == self.held(rank)[0] else 0.0
        found += sizes[RECEIVED] + sizes[GRADIENT_RECEIVED]
        apart = index > 0 and self.where[index - 1] != rank
        return found + (sizes[GRADIENT_SENT] if apart and self.schedule != "1f1b" else 0.0)


def _names(mine: Sequence[tuple[int, DeepStage]]) -> dict[int, int]:
    """Numbers of stages that say as much as their rank needs: which is the first, which follow each other."""
    found: dict[int, int] = {}
    place = -2
    for index, _ in mine:
        place = 0 if index == 0 else place + 1 if index - 1 in found else max(2, place + 2)
        found[index] = place
    return found


def _each(events: Mapping[str, float], index: int, schedule: str) -> float:
    """A micro-batch in the middle of the schedule: forward after backward finds its parameters whole."""
    if schedule not in SPLIT_BACKWARD:
        return events["F B"] + events["B F"]
    return events["F B"] + (events["I F"] + events["W more"] if index else events["W F"])

