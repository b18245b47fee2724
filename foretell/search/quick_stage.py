"""One stage of a pipeline, quickly: seconds of its events and bytes it keeps, from its lowering on a short stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from foretell.lower.pipeline.cut import some
from foretell.lower.pipeline.order import Order
from foretell.lower.pipeline.part import GRADIENT_RECEIVED, GRADIENT_SENT, HELD, INPUT, RECEIVED, Part
from foretell.lower.pipeline.rank import STEP, RankTrace, arranged
from foretell.plan.legal import SPLIT_BACKWARD
from foretell.plan.types import Plan
from foretell.price.speeds import Speeds
from foretell.search.depth import Peak, Stage, deepened, extended, name_of, replayed
from foretell.search.quick_step import freed
from foretell.search.sheet import Works
from foretell.search.sheet_work import rounded
from foretell.search.short import LINK, Item
from foretell.simulate.time.step import drags, tasks_of
from foretell.simulate.time.streams import simulate
from foretell.trace.types import Op, Program, Trace

WHOLE = (
    ("F", "F first"), ("F", "F F"), ("B", "B first"), ("B", "B B"), ("F", "F B"), ("B", "B F"), ("F", ""), ("B", "B last"),
)  # fmt: skip
"""Events of a stage in an order that has each kind: its first forward, one after a forward or a backward, ..."""
SPLIT = (
    ("F", "F first"), ("F", "F F"), ("I", "I first"), ("I", "I I"), ("W", "W first"), ("W", "W more"), ("F", "F B"),
    ("I", "I F"), ("W", "W F"), ("F", ""), ("I", ""), ("W", "W last"),
)  # fmt: skip
"""The same where gradients of inputs and of weights come apart."""
FEW, FEW_SPLIT = 3, 5
"""Micro-batches of a rank that are replayed; and where backward comes in two passes."""


@dataclass
class Stages:
    """Stages of one model at one micro-batch, under one plan but for cuts and number of micro-batches."""

    works: Works
    plan: Plan
    speeds: Speeds | None
    _timed: dict[object, Mapping[str, float]] = field(default_factory=dict)
    _seconds: dict[object, Mapping[str, float]] = field(default_factory=dict)
    _ranks: dict[object, tuple[RankTrace, dict[int, str]]] = field(default_factory=dict)
    _peaks: dict[object, Peak] = field(default_factory=dict)
    _sizes: dict[object, Mapping[str, float]] = field(default_factory=dict)
    _kept: dict[Stage, tuple[dict[str, float], list[dict[str, float]]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.plan.pipeline is not None
        self.split = self.plan.pipeline.schedule in SPLIT_BACKWARD

    # ------------------------------------------------------------------ lowering

    def parts(self, stages: Sequence[tuple[int, Stage]], accumulate: int) -> tuple[Trace, list[Part], list[list[str]]]:
        """Some walked stages on one rank, by their numbers, between links that stand for those of other ranks."""
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
        trace = self.works.stack(items, split=self.split)
        plan = replace(self.plan, accumulate=accumulate)
        found = some(trace, lists, mine)
        parts = [Part(trace, replace(one, index=number), plan) for one, (number, _) in zip(found, stages, strict=True)]
        return trace, parts, lasts

    # ------------------------------------------------------------------ time

    def seconds(self, stage: Stage) -> Mapping[str, float]:
        """Kind of event → its seconds, and those of the update: of the device, or of a host that takes longer."""
        found = self._seconds.get(stage)
        if found is None:
            both = extended(stage, self._walked)
            names = [name.removesuffix("|device") for name in both if name.endswith("|device")]
            found = self._seconds[stage] = {name: max(both[f"{name}|device"], both[f"{name}|host"]) for name in names}
        return found

    def _walked(self, stage: Stage) -> Mapping[str, float]:
        if stage not in self._timed:
            events = SPLIT if self.split else WHOLE
            count = sum(kind == "F" for kind, _ in events)
            trace, (part,), _ = self.parts([(0 if stage.first else 1, stage)], count)
            found: dict[str, float] = {}
            seen: dict[object, tuple[float, float]] = {}
            for kind, name in events:
                ops = part.ops(kind)
                key = (kind, len(ops), sum(len(op.outputs) for op in ops))
                if name:
                    if key not in seen:
                        seen[key] = self._event(trace, ops, around=False)
                    found[f"{name}|device"], found[f"{name}|host"] = seen[key]
            held = replace(trace, storages=part.storages, resident=part.resident())
            update = self._event(held, part.update(trace.programs["update"].ops), around=True)
            found["update|device"], found["update|host"] = update
            self._timed[stage] = found
        return self._timed[stage]

    def _event(self, trace: Trace, ops: Sequence[Op], *, around: bool) -> tuple[float, float]:
        if self.speeds is None or not ops:
            return 0.0, 0.0
        alone = replace(trace, programs={"event": Program("event", tuple(ops))}, schedule={"steady_step": (("event", 1),)})
        host, tasks = freed(list(tasks_of(alone, (("event", 1),), self.speeds, around=around)))
        return simulate(tasks, steps=2, drag=drags(tasks, self.speeds)).seconds, host

    # ------------------------------------------------------------------ memory

    def sizes(self, stage: Stage) -> Mapping[str, float]:
        """Bytes of a stage for each micro-batch: kept from forward, left between two passes of backward, received, ..."""
        if stage not in self._sizes:
            walked = stage.walked
            if walked not in self._kept:
                _, (part,), (lasts,) = self.parts([(0 if stage.first else 1, walked)], 1)
                self._kept[walked] = _kept(part, lasts)
            found, each = self._kept[walked]
            self._sizes[stage] = {
                name: value + sum(left * one[name] for left, one in zip(stage.left, each, strict=True)) for name, value in found.items()
            }
        return self._sizes[stage]

    def peak(self, rank: int, stages: Sequence[tuple[int, Stage]], order: Order, ties: Sequence[int]) -> Peak:
        """Of a rank with these stages that runs these events; `ties` are the ranks of the first and the last stage."""
        key = (rank, tuple(stages), order)
        if key not in self._peaks:
            found, names = self._arranged(rank, stages, order, ties)
            times = {names[place]: left for place, (number, left) in enumerate(
                (number, left) for number, stage in stages for left in stage.left
            )}  # fmt: skip
            ends = [end for _, _, end in found.events]
            step = found.trace.programs[STEP].ops
            deep = deepened(found.trace, times, lambda ops: ends if ops is step else ())
            self._peaks[key] = replayed(deep, self.works.prices.sizes)
        return self._peaks[key]

    def _arranged(
        self, rank: int, stages: Sequence[tuple[int, Stage]], order: Order, ties: Sequence[int]
    ) -> tuple[RankTrace, dict[int, str]]:
        walked = tuple((number, stage.walked) for number, stage in stages)
        key = (rank, walked, order)
        if key not in self._ranks:
            count = 1 + max(event.micro for event in order)
            trace, parts, lasts = self.parts(walked, count)
            plan = replace(self.plan, accumulate=count)
            tied = {n: sorted(set(ties)) for part in parts for n in part.stage.tied}
            names = dict(enumerate(name for names in lasts for name in names))
            self._ranks[key] = arranged(trace, rank, parts, plan, order, tied), names
        return self._ranks[key]


def _kept(part: Part, lasts: Sequence[str]) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Bytes for each micro-batch: of a stage, and of the last block of each of its runs alone."""
    across = {n for op in part.programs.get("I", ((), ()))[0] for n in op.allocates}
    names = (HELD, "left", INPUT, RECEIVED, GRADIENT_RECEIVED, GRADIENT_SENT)
    found, each = dict.fromkeys(names, 0.0), [dict.fromkeys(names, 0.0) for _ in lasts]
    for number, kind in part.kinds.items():
        name, storage = "left" if number in across and kind == HELD else kind, part.storages[number]
        if name in found:
            found[name] += rounded(storage.nbytes)
            for last, mine in zip(lasts, each, strict=True):
                if name in (HELD, "left") and (storage.module == last or storage.module.startswith(f"{last}.")):
                    mine[name] += rounded(storage.nbytes)
    return found, each


__all__ = ["FEW", "FEW_SPLIT", "Stages"]
