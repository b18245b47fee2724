"""The quick cost of a rank without a pipeline: a short stack lowered, laid on the timeline and replayed, and made deep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace

from foretell.lower.steps import NEXT, whole_step
from foretell.plan.types import Plan
from foretell.price.speeds import Speeds
from foretell.quantities import COLLECTIVES, COMPUTE, Task
from foretell.search.block_costs.kept import Kept
from foretell.search.block_costs.sheet import Works
from foretell.search.estimate.depth import (
    DeepStage,
    More,
    Peak,
    around_blocks,
    deepened,
    held_bytes,
    inside,
    more_of,
    of_pair,
    periods,
    replayed,
    without,
)
from foretell.simulate.memory.memory import used_of
from foretell.simulate.plan import sharded
from foretell.simulate.time.step import drags, lane, tasks_of, with_end
from foretell.simulate.time.streams import simulate
from foretell.trace import types
from foretell.trace.types import Op, Program, Storage, Trace

Values = dict[str, float]
AXES = ("dp_shard", "dp_replicate", "tp", "cp", "ep")


@dataclass
class Steps:
    """Steps of one model at one micro-batch, under one plan but for depth and number of micro-batches."""

    works: Works
    plan: Plan
    speeds: Speeds | None
    kept: Kept
    _lowered: dict[object, Trace] = field(default_factory=dict)

    def lowered(self, stage: DeepStage, accumulate: int) -> Trace:
        """One rank's step of a walked stack."""
        key = (stage, accumulate)
        if key not in self._lowered:
            plan = replace(self.plan, accumulate=accumulate)
            known = self.works.known
            if stage not in known:
                known[stage] = self.works.stack(stage.items())
            self._lowered[key] = sharded(whole_step(known[stage], accumulate), plan)
        return self._lowered[key]

    # ------------------------------------------------------------------ time

    def seconds(self, stage: DeepStage, accumulate: int) -> dict[str, float]:
        """Of a step: of the device and of the host, those of the update, and those that each axis is waited for."""
        few = self._few(accumulate)
        found = self._deep(stage, few, few)
        if accumulate > few:
            less = self._deep(stage, few, few - 1)
            found = {name: value + (accumulate - few) * (value - less.get(name, 0.0)) for name, value in found.items()}
        return {**found, "seconds": max(found["device"], found["host"])}

    def _deep(self, stage: DeepStage, accumulate: int, run: int) -> Values:
        """With `run` of the micro-batches of a step."""
        if stage.ends is None:
            found, each = self._walked(stage.walked, accumulate, run)
            more = list(zip(stage.left, each, strict=True))
        else:
            found, _ = self._walked(replace(stage.walked, runs=of_pair(stage.ends)), accumulate, run)
            more = [(times, self._walked(two, accumulate, run, len(two.runs) - 1)[1][-1]) for two, times in stage.steps(of_pair)]
        return {name: value + sum(times * one.get(name, 0.0) for times, one in more) for name, value in found.items()}

    def _few(self, accumulate: int) -> int:
        """Micro-batches of a step that are walked one by one: with replicas, the first and the last differ from others."""
        return min(accumulate, 3 if self.plan.mesh.dp_replicate > 1 else 2)

    def _walked(self, stage: DeepStage, accumulate: int, run: int, place: int | None = None) -> tuple[Values, list[Values]]:
        """With `run` of the micro-batches of a step; and what one block more of each run adds, or of the one at a place."""
        found: tuple[Values, list[Values]] = self.kept.of(
            "steps", (stage, accumulate, run) if place is None else (stage, accumulate, run, place),
            lambda: self._simulated(self.lowered(stage, accumulate), stage.grown(stage.lasts(), place), accumulate - run, run),
        )
        return found

    def _simulated(self, local: Trace, lasts: Sequence[str | None], less: int, run: int) -> tuple[Values, list[Values]]:
        speeds = self.speeds
        if speeds is None:
            return dict.fromkeys(("device", "host", "busy", "update"), 0.0), [{} for _ in lasts]
        steps = [(name, times - less if name == NEXT else times) for name, times in local.schedule["steady_step"]]
        asked = with_end(tasks_of(local, [(name, times) for name, times in steps if times], speeds), speeds)
        host, tasks = freed(asked)
        timeline = simulate(tasks, steps=2, drag=drags(tasks, speeds))
        waited = {axis: timeline.exposed[lane(axis)] for axis in AXES if lane(axis) in timeline.exposed}
        update = _update(tasks)
        found = {"device": timeline.seconds, "host": host, "busy": timeline.busy[COMPUTE], "update": update, **waited}
        weight, more = speeds.machine.host.weights["parameter"], list[Values]()
        for last in lasts:
            if last is None:
                more.append({})
                continue
            mine = {number for number, one in local.storages.items() if inside(one.module, last)}
            trained = sum(number in mine for number in local.resident if local.storages[number].role == types.PARAMETER)
            ahead, back = periods(timeline, last, ("forward",)), periods(timeline, last, ("backward", "recompute"))
            rest = [without(op, mine) for name, _ in steps if name == "update" for op in local.programs[name].ops]
            least = list(tasks_of(_only(local, rest), (("update", 1),), speeds, around=False)) if rest else []
            own = update - _update(least) if rest else 0.0
            asks = sum(task.host_seconds for task in asked if task.phase != "update" and inside(task.module, last))
            busy = sum(task.seconds for task in tasks if task.resource == COMPUTE and task.phase != "update" and inside(task.module, last))
            passes = run * (ahead.get(COMPUTE, 0.0) + max(back.values(), default=0.0))
            more.append({
                "device": passes + own, "host": asks + _listed(local, mine, speeds) + trained * weight * (len(steps) - 1) / len(steps),
                "busy": min(passes, busy) + own, "update": own,
            })  # fmt: skip
            for axis in waited:
                more[-1][axis] = max(0.0, passes - busy) if axis == next(iter(waited)) else 0.0
        return found, more

    # ------------------------------------------------------------------ memory

    def peak(self, stage: DeepStage, accumulate: int) -> Peak:
        return Peak(*self.kept.of("peaks", (stage, accumulate), lambda: self._replayed(stage, accumulate)))

    def used(self, stage: DeepStage, accumulate: int, capacity: int, beside: int) -> Peak:
        """Of a stack with every block, under the limit of a device: what is reserved there, its cache given back where it must."""

        def replayed() -> tuple[int, int]:
            local = self.lowered(stage, accumulate)
            meta = {**local.meta, **({"compiled": self.works.way} if self.works.way != "none" else {})}
            return used_of(replace(local, meta=meta), self.works.prices.sizes, capacity, beside)

        return Peak(*self.kept.of("peaks", (stage, accumulate, capacity, beside), replayed))

    def _replayed(self, stage: DeepStage, accumulate: int) -> tuple[int, int]:
        few = self._few(accumulate)
        local = self.lowered(stage.walked, few)
        more = more_of(stage, lambda run: self._held(stage.alone(run), few))
        deep = deepened(local, dict(zip(stage.walked.lasts(), more, strict=True)), around_blocks)
        deep = _fed(deep, accumulate - few)
        return astuple(replayed(deep, self.works.prices.sizes))

    def _held(self, stage: DeepStage, accumulate: int) -> More:
        def made() -> tuple[Values, list[Values]]:
            (path,) = stage.lasts()
            lasting, kept = held_bytes(self.lowered(stage, accumulate), path, around_blocks)
            return {}, [{"lasting": lasting, "kept": kept}]

        (found,) = self.kept.of("sizes", (stage, accumulate), made)[1]
        return found["lasting"], found["kept"]


def _update(tasks: Sequence[Task]) -> float:
    return sum(task.seconds for task in tasks if task.phase == "update" and not task.resource.startswith(COLLECTIVES))


def _only(trace: Trace, ops: Sequence[Op]) -> Trace:
    return replace(trace, programs={"update": Program("update", tuple(ops))}, schedule={"steady_step": (("update", 1),)})


def _listed(trace: Trace, mine: set[int], speeds: Speeds) -> float:
    """Host seconds of a block's tensors in the lists of an update."""
    ops = trace.programs["update"].ops if "update" in trace.programs else ()
    host = speeds.machine.host
    return sum(host.issue(op) - host.issue(without(op, mine)) for op in ops if op.inputs)


def freed(tasks: Sequence[Task]) -> tuple[float, list[Task]]:
    """Seconds of the host for some tasks; and the tasks as though it took none, unless it has to wait for some of them.

    Which of the two a stack waits for may change with its depth, and a difference of two stacks would not see it."""
    host = sum(task.host_seconds for task in tasks)
    return host, list(tasks) if any(task.synchronises for task in tasks) else [task._replace(host_seconds=0.0) for task in tasks]


def _fed(trace: Trace, more: int) -> Trace:
    """With so many more micro-batches on the device."""
    inputs = {trace.storages[number] for number in trace.resident if trace.storages[number].role == types.INPUT}
    if more <= 0 or not inputs:
        return trace
    number = max(trace.storages) + 1
    brick = Storage(more * sum(one.nbytes for one in inputs), types.INPUT, "")
    return replace(trace, storages={**trace.storages, number: brick}, resident=(*trace.resident, number))
