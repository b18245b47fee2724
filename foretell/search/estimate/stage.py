"""One stage of a pipeline, quickly: seconds of its events and bytes it keeps, from its lowering on a short stack."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace

from foretell.lower.pipeline.cut import CutStage as Cut
from foretell.lower.pipeline.cut import some
from foretell.lower.pipeline.order import Order
from foretell.lower.pipeline.part import EACH, GRADIENT_RECEIVED, GRADIENT_SENT, HELD, INPUT, RECEIVED, StagePart
from foretell.lower.pipeline.rank import STEP, RankTrace, arranged
from foretell.plan.legal import SPLIT_BACKWARD
from foretell.plan.types import Plan
from foretell.price.speeds import Speeds
from foretell.quantities import COMPUTE, HOST
from foretell.search.block_costs.kept import Kept
from foretell.search.block_costs.sheet import Works
from foretell.search.block_costs.work import rounded
from foretell.search.estimate.depth import (
    DeepStage,
    More,
    Peak,
    Run,
    between,
    deepened,
    inside,
    more_of,
    name_of,
    of_pair,
    periods,
    replayed,
    without,
)
from foretell.search.estimate.short import LINK, Item
from foretell.search.estimate.step import freed
from foretell.simulate.pipeline import HALVES
from foretell.simulate.time.step import drags, tasks_of
from foretell.simulate.time.streams import simulate
from foretell.trace import types
from foretell.trace.types import Op, Program, Trace

Values = dict[str, float]
WHOLE = (
    ("F", "F first"), ("F", "F F"), ("B", "B first"), ("B", "B B"), ("F", "F B"), ("B", "B F"), ("F", ""), ("B", "tail"),
)  # fmt: skip
"""Events of a stage in an order that has each kind: its first forward, one after a forward or a backward, ..."""
SPLIT = (
    ("F", "F first"), ("F", "F F"), ("I", "I first"), ("I", "I I"), ("W", "W first"), ("W", "W more"), ("F", "F B"),
    ("I", "I F"), ("W", "W F"), ("F", ""), ("I", ""), ("W", "tail"),
)  # fmt: skip
"""The same where gradients of inputs and of weights come apart. `tail` is what the last one does besides."""
FEW, FEW_SPLIT = 3, 5
"""Micro-batches of a rank that are replayed; and where backward comes in two passes."""


@dataclass
class Stages:
    """Stages of one model at one micro-batch, under one plan but for cuts and number of micro-batches."""

    works: Works
    plan: Plan
    speeds: Speeds | None
    kept: Kept
    _ran: dict[DeepStage, _Ran] = field(default_factory=dict)
    _seconds: dict[DeepStage, dict[str, float]] = field(default_factory=dict)
    _ranks: dict[object, tuple[RankTrace, list[str]]] = field(default_factory=dict)
    _peaks: dict[object, Peak] = field(default_factory=dict)
    _sizes: dict[DeepStage, dict[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.plan.pipeline is not None
        self.split = self.plan.pipeline.schedule in SPLIT_BACKWARD

    # ------------------------------------------------------------------ lowering

    def parts(self, stages: Sequence[tuple[int, DeepStage]], accumulate: int) -> tuple[Trace, list[StagePart], list[list[str]]]:
        """Some walked stages on one rank, by their numbers; and the names of the last block of each of their runs."""
        known = self.works.known
        key = (tuple(stages), self.split)
        if key not in known:
            known[key] = cut_out(self.works, stages, self.split)
        trace, found, lasts = known[key]
        plan = replace(self.plan, accumulate=accumulate)
        return trace, [StagePart(trace, replace(one, index=number), plan) for one, (number, _) in zip(found, stages, strict=True)], lasts

    def _run(self, stage: DeepStage) -> _Ran:
        """A walked stage with one event of each kind."""
        if stage not in self._ran:
            events = SPLIT if self.split else WHOLE
            trace, (part,), (lasts,) = self.parts([(0 if stage.first else 1, stage)], sum(kind == "F" for kind, _ in events))
            self._ran[stage] = _Ran(trace, part, lasts, [(kind, name, part.ops(kind)) for kind, name in events])
            self._ran[stage].divide(looped=part.looped and part.weaver is not None)
        return self._ran[stage]

    def _events(self, stage: DeepStage, place: int | None = None) -> dict[str, tuple[Values, list[Values]]]:
        """Of every kind of event of a walked stage: when each stream has done with it, and how much later for a block more of
        each run, or of the one at a place."""
        key = stage if place is None else (stage, place)
        found: dict[str, tuple[Values, list[Values]]] = self.kept.of("events", key, lambda: self._simulated(stage, place))
        return found

    def _simulated(self, stage: DeepStage, place: int | None) -> dict[str, tuple[Values, list[Values]]]:
        ran, found = self._run(stage), dict[str, tuple[Values, list[Values]]]()
        lasts = stage.grown(ran.lasts, place)
        seen: dict[object, tuple[Values, list[Values]]] = {}
        for name, ops in ran.named.items():
            key = (name[:1], len(ops), sum(len(op.outputs) for op in ops))
            if key not in seen:
                seen[key] = self._event(ran.trace, ops, lasts, apart=name in ("gather", "tail"))
            found[name] = seen[key]
        found.update(_halved(found))
        found["update"] = self._update(replace(ran.trace, storages=ran.part.storages, resident=ran.part.resident()), ran.update, lasts)
        return found

    # ------------------------------------------------------------------ time

    def seconds(self, stage: DeepStage) -> Mapping[str, float]:
        """Kind of event → its seconds, and those of the update: of the device, or of a host that takes longer."""
        found = self._seconds.get(stage)
        if found is None:
            found = self._seconds[stage] = {}
            short = stage.walked if stage.ends is None else replace(stage.walked, runs=of_pair(stage.ends))
            steps = [] if stage.ends is None else [(times, self._events(two, 1)) for two, times in stage.steps(between)]
            for name, (ends, each) in self._events(short).items():
                more = [(times, events[name][1][1]) for times, events in steps] or list(zip(stage.left, each, strict=True))
                deep = (end + sum(times * one.get(stream, 0.0) for times, one in more) for stream, end in ends.items())
                found[name] = max(deep, default=0.0)
        return found

    def _event(self, trace: Trace, ops: Sequence[Op], lasts: Sequence[str | None], *, apart: bool) -> tuple[Values, list[Values]]:
        """`apart`: every stream goes its own way; else messages keep up with compute, or it waits for them."""
        if self.speeds is None or not ops:
            return {}, [{} for _ in lasts]
        alone = replace(trace, programs={"event": Program("event", tuple(ops))}, schedule={"steady_step": (("event", 1),)})
        asked = list(tasks_of(alone, (("event", 1),), self.speeds, around=False))
        host, tasks = freed(asked)
        timeline = simulate(tasks, steps=2, drag=drags(tasks, self.speeds))
        ends: dict[str, float] = {}
        for task, finish in zip(timeline.tasks, timeline.finish, strict=True):
            ends[task.resource] = max(ends.get(task.resource, 0.0), finish)
        more = [{} if last is None else periods(timeline, last) for last in lasts]
        for one, last in zip(more, lasts, strict=True):
            if last is None:
                continue
            if not apart:
                one.update(dict.fromkeys(ends, one.get(COMPUTE, 0.0)))
            one[HOST] = sum(task.host_seconds for task in asked if inside(task.module, last))
        return {**ends, HOST: host}, more

    def _update(self, trace: Trace, ops: Sequence[Op], lasts: Sequence[str | None]) -> tuple[Values, list[Values]]:
        """An update waits for nothing: its seconds, and what they are less without a block."""

        def of(kept: Sequence[Op], parameters: int) -> Values:
            if self.speeds is None or not kept:
                return {}
            alone = replace(trace, programs={"event": Program("event", tuple(kept))}, schedule={"steady_step": (("event", 1),)})
            tasks = list(tasks_of(alone, (("event", 1),), self.speeds))
            host = sum(task.host_seconds for task in tasks) - parameters * self.speeds.machine.host.weights["parameter"]
            return {COMPUTE: sum(task.seconds for task in tasks), HOST: host}

        whole, more = of(ops, 0), list[Values]()
        for last in lasts:
            if last is None:
                more.append({})
                continue
            mine = {number for number, one in trace.storages.items() if inside(one.module, last)}
            count = sum(number in mine for number in trace.resident if trace.storages[number].role == types.PARAMETER)
            less = of([without(op, mine) for op in ops], count)
            more.append({stream: value - less.get(stream, 0.0) for stream, value in whole.items()})
        return whole, more

    # ------------------------------------------------------------------ memory

    def sizes(self, stage: DeepStage) -> Mapping[str, float]:
        """Bytes of a stage: for each micro-batch kept from forward, left between two passes of backward, received, ...;
        `lasting` whatever runs; `event` most in an event, of one micro-batch."""
        if stage not in self._sizes:
            found, each = self._walked_sizes(stage.walked)
            more = list(zip(stage.left, each, strict=True))
            more += [(one[2], self._walked_sizes(stage.alone(one))[1][0]) for runs in stage.others for one in runs]
            self._sizes[stage] = {name: value + sum(times * one[name] for times, one in more) for name, value in found.items()}
        return self._sizes[stage]

    def _walked_sizes(self, stage: DeepStage) -> tuple[Values, list[Values]]:
        found: tuple[Values, list[Values]] = self.kept.of("sizes", stage, lambda: _kept(self._run(stage), self.works))
        return found

    def _held(self, stage: DeepStage, run: Run) -> More:
        one = self._walked_sizes(stage.alone(run))[1][0]
        return one["lasting"], one[HELD] + one["left"]

    def peak(self, rank: int, stages: Sequence[tuple[int, DeepStage]], order: Order, ties: Sequence[int]) -> Peak:
        """Of a rank with these stages that runs these events; `ties` are the ranks of the first and the last stage."""
        key = (rank, tuple(stages), order)
        if key not in self._peaks:
            self._peaks[key] = Peak(*self.kept.of("peaks", key, lambda: self._replayed(rank, stages, order, ties)))
        return self._peaks[key]

    def _replayed(self, rank: int, stages: Sequence[tuple[int, DeepStage]], order: Order, ties: Sequence[int]) -> tuple[int, int]:
        found, names = self._arranged(rank, stages, order, ties)
        more = (one for _, stage in stages for one in more_of(stage, functools.partial(self._held, stage)))
        times = dict(zip(names, more, strict=True))
        ends = [end for _, _, end in found.events]
        step = found.trace.programs[STEP].ops
        deep = deepened(found.trace, times, lambda ops: ends if ops is step else ())
        return astuple(replayed(deep, self.works.prices.sizes))

    def _arranged(
        self, rank: int, stages: Sequence[tuple[int, DeepStage]], order: Order, ties: Sequence[int]
    ) -> tuple[RankTrace, list[str]]:
        walked = tuple((number, stage.walked) for number, stage in stages)
        key = (rank, walked, order)
        if key not in self._ranks:
            count = 1 + max(event.micro for event in order)
            trace, parts, lasts = self.parts(walked, count)
            plan = replace(self.plan, accumulate=count)
            tied = {n: sorted(set(ties)) for part in parts for n in part.stage.tied}
            self._ranks[key] = arranged(trace, rank, parts, plan, order, tied), [name for names in lasts for name in names]
        return self._ranks[key]


def cut_out(works: Works, stages: Sequence[tuple[int, DeepStage]], split: bool) -> tuple[Trace, tuple[Cut, ...], list[list[str]]]:
    """Stages of a short stack, between links that stand for those of other ranks."""
    items: list[Item] = []
    lists: list[list[str]] = []
    mine, lasts = [], []

    def link() -> None:
        items.append(Item(LINK, "keep", name_of(len(items))))
        lists.append([items[-1].name])

    before = -1
    for number, stage in stages:
        if number > 0 and before != number - 1:
            link()
        mine.append(len(lists))
        lasts.append(stage.lasts(len(items)))
        own = stage.items(len(items))
        items += own
        lists.append([item.name for item in own])
        before = number
    if not stages[-1][1].last:
        link()
    trace = works.stack(items, split=split)
    return trace, some(trace, lists, mine), lasts


class _Ran:
    """A stage and one event of each kind, lowered."""

    def __init__(self, trace: Trace, part: StagePart, lasts: list[str], events: list[tuple[str, str, list[Op]]]) -> None:
        self.trace, self.part, self.lasts, self.events = trace, part, lasts, events
        self.named: dict[str, list[Op]] = {}
        """Kind of event → its ops."""
        self.update = part.update(trace.programs["update"].ops)

    def divide(self, *, looped: bool) -> None:
        """What the first and the last event do besides, on their own."""
        self.named = {name: ops for _, name, ops in self.events if name}
        usual = self.named["W F" if "W F" in self.named else "B F"]
        self.named["tail"] = self.named["tail"][len(usual) :]
        first = self.named.pop("F first")
        self.named["gather"] = first[: len(first) - len(self.named["F B"])] if looped else []


def _kept(ran: _Ran, works: Works) -> tuple[Values, list[Values]]:
    """Bytes of a stage, and of the last block of each of its runs alone."""
    part, lasts = ran.part, ran.lasts
    across = {n for op in part.programs.get("I", ((), ()))[0] for n in op.allocates}
    names = (HELD, "left", INPUT, RECEIVED, GRADIENT_RECEIVED, GRADIENT_SENT, "lasting", "event")
    found, each = dict.fromkeys(names, 0.0), [dict.fromkeys(names, 0.0) for _ in lasts]

    def add(name: str, number: int, times: float = 1.0) -> None:
        storage = part.storages[number]
        size = times * rounded(storage.nbytes)
        found[name] += size
        for last, mine in zip(lasts, each, strict=True):
            if name in (HELD, "left", "lasting") and inside(storage.module, last):
                mine[name] += size

    for number, kind in part.kinds.items():
        name = "left" if number in across and kind == HELD else kind
        if name in found:
            add(name, number)
    trained = {ref.storage for op in ran.update for ref in op.inputs}
    for number in part.resident():
        if part.storages[number].role != types.INPUT:
            add("lasting", number, 1.0 + works.slots * (number in trained))
    alive, most = _walked(part, [ops for _, _, ops in ran.events], works)
    for number in alive:
        add("lasting", number)
    found["event"] = most
    found["lasting"] += 2 * works.prices.sizes.cublas_workspace_bytes
    for one in each:
        one["event"] = one[HELD]  # what else an event holds is the same at any depth
    return found, each


def _walked(part: StagePart, run: Sequence[Sequence[Op]], works: Works) -> tuple[set[int], float]:
    """What stays alive between events besides what every micro-batch has of its own; and most bytes in the last events, above
    that, with one micro-batch in flight."""
    live, most = 0, 0
    alive: dict[int, int] = {}
    lasting: set[int] = set()
    halves = len(run) - (3 if part.split else 2)
    for place, ops in enumerate(run):
        if place == halves:
            lasting = {number for number in alive if part.kinds.get(number) not in EACH}
            live = sum(size for number, size in alive.items() if number not in lasting)
            base = sum(alive[number] for number in lasting)
            alive = dict(alive)
            most = -base
            live = base
        for op in ops:
            for number in op.allocates:
                live -= alive.get(number, 0)
                alive[number] = rounded(part.storages[number].nbytes)
                live += alive[number]
            if place >= halves:
                stages, extra = works.prices.sizes.scratch(op)
                most = max(most, live + extra + max((sum(stage) for stage in stages), default=0) - base)
            for number in op.frees:
                live -= alive.pop(number, 0)
    return lasting, float(most)


__all__ = ["FEW", "FEW_SPLIT", "Stages"]


def _halved(events: Mapping[str, tuple[Values, list[Values]]]) -> dict[str, tuple[Values, list[Values]]]:
    """With what the host takes longer where a backward comes in two halves."""
    pair = [next((events[name] for name in events if name.startswith(half)), None) for half in HALVES]
    if any(one is None or not one[0] for one in pair):
        return {}
    ends, each = (list(part) for part in zip(*(one for one in pair if one is not None), strict=True))
    whole, more = sum(one[HOST] for one in ends), [sum(one.get(HOST, 0.0) for one in both) for both in zip(*each, strict=True)]
    found = {}
    for name, (end, blocks) in events.items():
        share = HALVES.get(name[:1])
        if share is not None and end:
            found[name] = {**end, HOST: share * whole}, [{**one, HOST: share * part} for one, part in zip(blocks, more, strict=True)]
    return found
