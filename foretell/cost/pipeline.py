"""What a pipeline costs: bytes of every rank, and when each of its events runs.

    rank 0   │ F0 │ F1 │ F2 │ F3 │      │ B0 │ B1 │ B2 │ B3 │ update │
    rank 1        │ F0 │ B0 │ F1 │ B1 │ F2 │ B2 │ F3 │ B3 │     update │
             a message takes its time on the link between two ranks; an event waits for what it is sent

An event's seconds are those of its ops on one rank, with the collectives of its other axes. What a rank does not spend
on events it waits: the bubble.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from foretell.cost import plan_cpu
from foretell.cost.collectives import P2P, Fabric, collective
from foretell.cost.machine import machine
from foretell.cost.pipeline_order import Event
from foretell.cost.pipeline_rank import STEP, RankTrace, rank_traces
from foretell.cost.plan_parts import (
    Options,
    PlanCost,
    RankCost,
    collectives,
    memory_of,
    memory_of_all,
    model_flops,
    notes_of,
    profile_for,
    throughput,
)
from foretell.cost.plan_time import Seconds, as_time, drags, fabrics_for, message, talk_over, tasks_of
from foretell.cost.prediction import ASSUMED, Time
from foretell.cost.sharded_units import RECEIVE, SEND
from foretell.cost.streams import Task, Timeline, simulate
from foretell.cost.time import Machine
from foretell.cost.unlike import slowest_seen, smallest_seen
from foretell.hardware.types import Cluster
from foretell.plan.types import Plan
from foretell.trace.types import Op, Program, Trace

WAITING = "waiting_for_ranks"


def predict_pipeline(whole: Trace, plan: Plan, cluster: Cluster, how: Options) -> PlanCost:
    """What every rank of the pipeline axis allocates and sends, and how long a step takes."""
    on_cpu = cluster.device.backend == "cpu"
    ranks = rank_traces(whole, plan, holds_sends=not on_cpu)
    if on_cpu:
        outcomes = [plan_cpu.predict_memory(one.trace, plan, cluster) for one in ranks]
    elif cluster.groups:
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
        costs = [replace(cost, seconds=busy) for cost, busy in zip(costs, found[1], strict=True)]
    return PlanCost(
        plan=plan, ranks=tuple(costs), time=found[0] if found else None, unit=unit, per_step=per_step,
        bubble=1 - sum(found[1]) / len(ranks) / found[0].step_seconds if found else 0.0,
        model_flops=model_flops(whole, plan), notes=tuple(notes_of(whole, plan)),
    )  # fmt: skip


# ---------------------------------------------------------------------- time


def pipeline_time(
    ranks: Sequence[RankTrace], plan: Plan, cluster: Cluster, how: Options
) -> tuple[Time, list[float]] | None:
    """The step, and the seconds each rank is busy in it; None where nothing is known of the device's speed."""
    seen = [slowest_seen(plan, cluster, one.rank) for one in ranks]
    machines = [machine(one.device, profile_for(one, how.profile_of)) for one in seen]
    known = [one for one in machines if one is not None]
    if len(known) < len(ranks):
        return None
    on_cpu = cluster.device.backend == "cpu"
    fabrics = {} if on_cpu else fabrics_for(plan, cluster)
    talk = plan_cpu.talk if on_cpu else talk_over(fabrics)
    slower = plan_cpu.slower(plan, cluster) if on_cpu else None
    events = [Events(one, device, talk, slower) for one, device in zip(ranks, known, strict=True)]
    scale = how.pace if on_cpu else 1.0
    step = together(events, plan, None if on_cpu else fabrics["pp"]).seconds * scale
    worst = max(events, key=lambda one: one.busy)
    time = _as_time(worst, step, scale, worst.known)
    return time, [one.busy * scale for one in events]


class Events:
    """Seconds of the events of one rank."""

    def __init__(self, rank: RankTrace, known: Machine, talk: Seconds, slower: Seconds | None) -> None:
        self.rank, self.known, self.talk, self.slower = rank, known, talk, slower
        self.parts: dict[object, tuple[Timeline, list[Task]]] = {}
        ops = rank.trace.programs[STEP].ops
        self.seconds = [self._of((event.kind, event.stage), ops[start:end]) for event, start, end in rank.events]
        self.sent = [_messages(ops[start:end]) for _, start, end in rank.events]
        self.update = self._of("update", rank.trace.programs["update"].ops)
        self.busy = sum(self.seconds) + self.update

    def _of(self, what: object, ops: Sequence[Op]) -> float:
        """Seconds of some ops, the same for events that run the same."""
        key = (what, len(ops), sum(len(op.outputs) for op in ops))
        if key not in self.parts:
            ops = tuple(op for op in ops if op.name not in (SEND, RECEIVE))
            trace = replace(self.rank.trace, programs={"event": Program("event", ops)}, schedule={"steady_step": (("event", 1),)})
            around = what == "update"
            tasks = list(tasks_of(trace, (("event", 1),), self.known, self.talk, self.slower, around=around))
            self.parts[key] = simulate(tasks, steps=2, drag=drags(tasks)), tasks
        return self.parts[key][0].seconds

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


def together(events: Sequence[Events], plan: Plan, link: Fabric | None) -> Timeline:
    """All ranks at once: an event begins when its rank is free and what it waits for has arrived."""
    tasks: list[Task] = []
    done: dict[Event, int] = {}
    """Event → the task after which others may use its result."""
    places = [0] * len(events)
    assert plan.pipeline is not None
    last = plan.pipeline.stages - 1
    where = {event.stage: one.rank.rank for one in events for event, _, _ in one.rank.events}
    while any(place < len(one.rank.events) for place, one in zip(places, events, strict=True)):
        moved = False
        for number, one in enumerate(events):
            while places[number] < len(one.rank.events):
                event = one.rank.events[places[number]][0]
                needs = _needs(event, last)
                if any(need not in done for need in needs):
                    break
                after = tuple(done[need] for need in needs)
                tasks.append(Task(event.kind, f"rank {one.rank.rank}", one.seconds[places[number]], after))
                finished = len(tasks) - 1
                target = _target(event, last)
                size = one.sent[places[number]]
                if target is not None and size and where[target] != one.rank.rank:
                    seconds = collective(P2P, size, link).seconds if link is not None else plan_cpu.message_seconds(size)
                    lane = f"{one.rank.rank} to {where[target]}"
                    tasks.append(Task("send", lane, seconds, (finished,)))
                    finished = len(tasks) - 1
                done[event] = finished
                places[number] += 1
                moved = True
        if not moved:
            raise ValueError(f"the schedule {plan.pipeline.schedule} waits for itself")
    for one in events:
        tasks.append(Task("update", f"rank {one.rank.rank}", one.update))
    return simulate(tasks)


def _needs(event: Event, last: int) -> tuple[Event, ...]:
    """Events that must have ended, and sent, before this one."""
    kind, stage, micro = event
    if kind == "F":
        return (Event("F", stage - 1, micro),) if stage else ()
    if kind == "W":
        return (Event("I", stage, micro),)
    return (Event(kind, stage + 1, micro),) if stage < last else (Event("F", stage, micro),)


def _target(event: Event, last: int) -> int | None:
    """The stage that an event sends to."""
    if event.kind == "F":
        return event.stage + 1 if event.stage < last else None
    return event.stage - 1 if event.kind in "BI" and event.stage else None


def _as_time(worst: Events, step: float, scale: float, known: Machine) -> Time:
    """The busiest rank's seconds, and what it waits for."""
    breakdown: dict[str, float] = {}
    phases: dict[str, float] = {}
    binds: dict[str, float] = {}
    device = host = exposed = 0.0
    for timeline, tasks, times in worst.times():
        part = as_time(timeline, tasks, known)
        for name, value in part.breakdown.items():
            breakdown[name] = breakdown.get(name, 0.0) + value * times * scale
        for name, value in part.phases.items():
            phases[name] = phases.get(name, 0.0) + value * times * scale
        binds[part.binds] = binds.get(part.binds, 0.0) + part.step_seconds * times
        device += part.device_seconds * times * scale
        host += part.host_seconds * times * scale
        exposed += part.exposed_communication_seconds * times * scale
    breakdown[WAITING] = max(0.0, step - sum(breakdown.values()))
    bound = max(binds, key=lambda name: binds[name])
    low, high = known.band.get(bound) or known.band.get("", (0.7, 1.5))
    return Time(
        step_seconds=step, low_seconds=step * low, high_seconds=step * high, breakdown=breakdown, phases=phases,
        binds=bound, provenance=ASSUMED, device_seconds=device, host_seconds=host,
        exposed_communication_seconds=exposed,
    )  # fmt: skip

