"""What a pipeline costs: bytes of every rank, and when each of its events runs.

    rank 0   │ F0 │ F1 │ F2 │ F3 │      │ B0 │ B1 │ B2 │ B3 │ update │
    rank 1        │ F0 │ B0 │ F1 │ B1 │ F2 │ B2 │ F3 │ B3 │     update │
             a message takes its time on the link between two ranks; an event waits for what it is sent

An event's seconds are those of its ops on one rank, with the collectives of its other axes. What a rank does not spend
on events it waits: the bubble.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foretell.hardware.types import Cluster
from foretell.lower.fsdp.units import RECEIVE, SEND
from foretell.lower.pipeline.order import Event, in_turn, needs, target
from foretell.lower.pipeline.rank import STEP, RankTrace, rank_traces
from foretell.lower.steps import repeated
from foretell.plan.types import Plan
from foretell.price.bands import Evidence
from foretell.price.heterogeneous import smallest_seen
from foretell.price.speeds import Options, Speeds, message, speeds_of
from foretell.quantities import ASSUMED, Task, Time
from foretell.simulate.parts import (
    PlanCost,
    RankCost,
    collectives,
    flops_of,
    memory_of,
    memory_of_all,
    notes_of,
    throughput,
)
from foretell.simulate.time.step import as_time, drags, tasks_of
from foretell.simulate.time.streams import Timeline, simulate
from foretell.trace.cuda.versions import widening
from foretell.trace.types import Op, Program, Trace

WAITING = "waiting_for_ranks"


def predict_pipeline(whole: Trace, plan: Plan, cluster: Cluster, how: Options) -> PlanCost:
    """What every rank of the pipeline axis allocates and sends, and how long a step takes."""
    ranks = rank_traces(whole, plan, holds_sends=cluster.device.backend != "cpu")
    if cluster.groups or cluster.device.backend == "cpu":
        outcomes = [memory_of(one.trace, plan, smallest_seen(plan, cluster, one.rank), how) for one in ranks]
    else:
        outcomes = memory_of_all([one.trace for one in ranks], plan, cluster, how)
    costs = [
        RankCost(
            rank=one.rank, stages=one.stages, verdict=outcome.verdict, memory=outcome.memory,
            collectives=collectives(one.trace),
        )
        for one, outcome in zip(ranks, outcomes, strict=True)
    ]  # fmt: skip
    found = pipeline_time(ranks, plan, cluster, how)
    unit, per_step = throughput(whole, plan)
    if found is not None:
        costs = [replace(cost, seconds=one.busy) for cost, one in zip(costs, found.events, strict=True)]
    flops, again = flops_of(repeated(whole, plan.accumulate), plan)
    return PlanCost(
        plan=plan, ranks=tuple(costs), time=found.time if found else None, unit=unit, per_step=per_step,
        bubble=1 - sum(one.busy for one in found.events) / len(ranks) / found.time.step_seconds if found else 0.0,
        model_flops=flops, recompute_flops=again, notes=tuple(notes_of(whole, plan)),
        programs=tuple(one.trace for one in ranks), timeline=found.timeline if found else None, events=found.events if found else (),
    )  # fmt: skip


# ---------------------------------------------------------------------- time


@dataclass(frozen=True)
class PipelineStep:
    """A step of all ranks of a pipeline."""

    time: Time
    timeline: Timeline
    events: tuple[Events, ...]


def pipeline_time(ranks: Sequence[RankTrace], plan: Plan, cluster: Cluster, how: Options) -> PipelineStep | None:
    """The step and what each rank does in it; None where nothing is known of the device's speed."""
    speeds = [speeds_of(plan, cluster, how, one.rank) for one in ranks]
    known = [one for one in speeds if one is not None]
    if len(known) < len(ranks):
        return None
    events = tuple(Events(one, each) for one, each in zip(ranks, known, strict=True))
    timeline = together(events, plan)
    return PipelineStep(_as_time(max(events, key=lambda one: one.busy), timeline.seconds), timeline, events)


HALVES = {"I": 1.0, "W": 1.8}
"""Half of a backward → host seconds as a share of those of the whole: torch walks the graph in Python for each. Measured in stages of two
blocks, on a CPU and on the host of an H200 (benchmarks/halves.py); in stages of eight the second takes 2.5 to 3.5."""

class Events:
    """Seconds of the events of one rank."""

    def __init__(self, rank: RankTrace, speeds: Speeds) -> None:
        self.rank, self.speeds = rank, speeds
        self.parts: dict[object, tuple[Timeline, list[Task]]] = {}
        ops = rank.trace.programs[STEP].ops
        self.whole: dict[int, float] = {}
        """Stage → host seconds of its backward, where that comes in two halves."""
        seen: set[tuple[int, str]] = set()
        for event, start, end in rank.events:
            half = (event.stage, event.kind)
            if event.kind in HALVES and event.stage and half not in seen:  # of the first stage nobody waits for a half
                seen.add(half)
                self.whole[event.stage] = self.whole.get(event.stage, 0.0) + sum(task.host_seconds for task in self._tasks(ops[start:end]))
        self.seconds = [self._of((event.kind, event.stage), ops[start:end]) for event, start, end in rank.events]
        self.sent = [_messages(ops[start:end]) for _, start, end in rank.events]
        self.update = self._of("update", rank.trace.programs["update"].ops)
        self.busy = sum(self.seconds) + self.update

    def _of(self, what: object, ops: Sequence[Op]) -> float:
        """Seconds of some ops, the same for events that run the same."""
        key = (what, len(ops), sum(len(op.outputs) for op in ops))
        if key not in self.parts:
            tasks = self._tasks(ops, around=what == "update")
            if tasks and isinstance(what, tuple) and what[0] in HALVES and what[1] in self.whole:
                more = HALVES[what[0]] * self.whole[what[1]] - sum(task.host_seconds for task in tasks)
                tasks[0] = tasks[0]._replace(host_seconds=tasks[0].host_seconds + max(0.0, more))
            self.parts[key] = simulate(tasks, steps=2, drag=drags(tasks, self.speeds)), tasks
        return self.parts[key][0].seconds

    def _tasks(self, ops: Sequence[Op], *, around: bool = False) -> list[Task]:
        ops = tuple(op for op in ops if op.name not in (SEND, RECEIVE))
        trace = replace(self.rank.trace, programs={"event": Program("event", ops)}, schedule={"steady_step": (("event", 1),)})
        return list(tasks_of(trace, (("event", 1),), self.speeds, around=around))

    def times(self) -> list[tuple[Timeline, list[Task], int]]:
        """Each kind of event with how often it runs."""
        ops = self.rank.trace.programs[STEP].ops
        counts: dict[object, int] = {}
        for event, start, end in self.rank.events:
            key = ((event.kind, event.stage), end - start, sum(len(op.outputs) for op in ops[start:end]))
            counts[key] = counts.get(key, 0) + 1
        return [(*part, counts.get(key, 1)) for key, part in self.parts.items()]


def _messages(ops: Sequence[Op]) -> int:
    """Bytes that an event sends on."""
    return sum(message(op) for op in ops if op.name == SEND)


def together(events: Sequence[Events], plan: Plan) -> Timeline:
    """All ranks at once: an event begins when its rank is free and what it waits for has arrived."""
    tasks: list[Task] = []
    done: dict[Event, int] = {}
    """Event → the task after which others may use its result."""
    places = [0] * len(events)
    assert plan.pipeline is not None
    last = plan.pipeline.stages - 1
    orders = [[event for event, _, _ in one.rank.events] for one in events]
    where = {event.stage: events[number].rank.rank for number, mine in enumerate(orders) for event in mine}
    for number, event in in_turn(orders, last):
        one, place, need = events[number], places[number], needs(event, last)
        after = () if need is None else (done[need],)
        tasks.append(Task(event.kind, f"rank {one.rank.rank}", one.seconds[place], after))
        to, size = target(event, last), one.sent[place]
        if to is not None and size and where[to] != one.rank.rank:
            lane = f"{one.rank.rank} to {where[to]}"
            tasks.append(Task("send", lane, one.speeds.p2p_time(size) * one.speeds.slowdown, (len(tasks) - 1,)))
        done[event] = len(tasks) - 1
        places[number] += 1
    for one in events:
        tasks.append(Task("update", f"rank {one.rank.rank}", one.update))
    return simulate(tasks)


def _as_time(worst: Events, step: float) -> Time:
    """The busiest rank's seconds, and what it waits for."""
    breakdown: dict[str, float] = {}
    phases: dict[str, float] = {}
    binds: dict[str, float] = {}
    device = host = exposed = 0.0
    for timeline, tasks, times in worst.times():
        part = as_time(timeline, tasks, worst.speeds)
        for name, value in part.breakdown.items():
            breakdown[name] = breakdown.get(name, 0.0) + value * times
        for name, value in part.phases.items():
            phases[name] = phases.get(name, 0.0) + value * times
        binds[part.binds] = binds.get(part.binds, 0.0) + part.step_seconds * times
        device += part.device_seconds * times
        host += part.host_seconds * times
        exposed += part.exposed_communication_seconds * times
    breakdown[WAITING] = max(0.0, step - sum(breakdown.values()))
    bound = max(binds, key=lambda name: binds[name])
    low, high = worst.speeds.band(Evidence(widening=widening(worst.rank.trace.meta)))
    return Time(
        step_seconds=step, low_seconds=step * low, high_seconds=step * high, breakdown=breakdown, phases=phases,
        binds=bound, provenance=ASSUMED, device_seconds=device, host_seconds=host,
        exposed_communication_seconds=exposed,
    )  # fmt: skip

