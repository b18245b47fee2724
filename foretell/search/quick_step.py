"""The quick cost of a rank without a pipeline: a short stack lowered, laid on the timeline and replayed, and made deep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from foretell.lower.steps import NEXT, whole_step
from foretell.plan.types import Plan
from foretell.price.speeds import Speeds
from foretell.quantities import COLLECTIVES, COMPUTE, Task
from foretell.search.depth import Peak, Stage, around_blocks, deepened, extended, replayed
from foretell.search.sheet import Works
from foretell.simulate.plan import sharded
from foretell.simulate.time.step import drags, lane, tasks_of, with_end
from foretell.simulate.time.streams import simulate
from foretell.trace import types
from foretell.trace.types import Storage, Trace

FEW = 3
"""Micro-batches of a step that are walked one by one."""
AXES = ("dp_shard", "dp_replicate", "tp", "cp", "ep")


@dataclass
class Steps:
    """Steps of one model at one micro-batch, under one plan but for depth and number of micro-batches."""

    works: Works
    plan: Plan
    speeds: Speeds | None
    _lowered: dict[object, Trace] = field(default_factory=dict)
    _timed: dict[object, Mapping[str, float]] = field(default_factory=dict)
    _peaks: dict[object, Peak] = field(default_factory=dict)

    def lowered(self, stage: Stage, accumulate: int) -> Trace:
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

    def seconds(self, stage: Stage, accumulate: int) -> dict[str, float]:
        """Of a step: in all, those of the update, and those that each axis is waited for."""
        few = min(accumulate, FEW)
        found = extended(stage, lambda walked: self._walked(walked, few, few))
        if accumulate > few:
            less = extended(stage, lambda walked: self._walked(walked, few, few - 1))
            for name in found:
                found[name] += (accumulate - few) * (found[name] - less[name])
        return {**found, "seconds": max(found["device"], found["host"])}

    def _walked(self, stage: Stage, accumulate: int, run: int) -> Mapping[str, float]:
        """With `run` of the micro-batches of a step."""
        key = (stage, accumulate, run)
        if key not in self._timed:
            self._timed[key] = self._simulated(self.lowered(stage, accumulate), accumulate - run)
        return self._timed[key]

    def _simulated(self, local: Trace, less: int) -> Mapping[str, float]:
        if self.speeds is None:
            return {"device": 0.0, "host": 0.0, "busy": 0.0, "update": 0.0}
        run = [(name, times - less if name == NEXT else times) for name, times in local.schedule["steady_step"]]
        tasks = with_end(tasks_of(local, [(name, times) for name, times in run if times], self.speeds), self.speeds)
        host, tasks = freed(tasks)
        timeline = simulate(tasks, steps=2, drag=drags(tasks, self.speeds))
        waited = {axis: timeline.exposed.get(lane(axis), 0.0) for axis in AXES if lane(axis) in timeline.exposed}
        update = sum(task.seconds for task in tasks if task.phase == "update" and not task.resource.startswith(COLLECTIVES))
        return {"device": timeline.seconds, "host": host, "busy": timeline.busy[COMPUTE], "update": update, **waited}

    # ------------------------------------------------------------------ memory

    def peak(self, stage: Stage, accumulate: int, *, reserve: bool = True) -> Peak:
        key = (stage, accumulate, reserve)
        if key not in self._peaks:
            few = min(accumulate, FEW)
            local = self.lowered(stage.walked, few)
            deep = deepened(local, dict(zip(stage.walked.lasts(), stage.left, strict=True)), around_blocks)
            self._peaks[key] = replayed(_fed(deep, accumulate - few), self.works.prices.sizes, reserve=reserve)
        return self._peaks[key]


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
