"""What a report shows beyond the files: the plan costed once more from its trace, moment by moment and block by block.

    traces (of the run folder, else kept on disk, else traced) ─► one rank's step ─► bytes by category over the step
                                                         ─► seconds and bytes of every block
                                                         ─► a timeline, and with a pipeline when each event runs

Without a trace (no torch, a model file that is elsewhere) a report has what the files say, and the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from foretell.errors import UserError
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.hardware.profile import Profile
from foretell.hardware.types import Cluster, Device
from foretell.lower.blocks import KEEP, TraceMismatch, blocks_of
from foretell.plan.default import mode_of
from foretell.plan.recipe import known_blocks, recipe_of
from foretell.plan.types import Plan, computed
from foretell.price import energy as watts
from foretell.price.machine import machine
from foretell.price.speeds import profile_for
from foretell.price.time import Machine
from foretell.quantities import COLLECTIVES, Energy
from foretell.report.html.memory import AROUND, MemoryCurve, block_named, memory_curve
from foretell.simulate.pipeline import Events
from foretell.simulate.plan import Options, PlanCost, modes_of, predict_plan
from foretell.simulate.time.streams import Timeline
from foretell.trace.sandbox.process import TIME_LIMIT
from foretell.trace.types import Trace


@dataclass(frozen=True, kw_only=True)
class BlockCost:
    """One block, or what lies around them: seconds of a step on its rank, bytes at the peak there."""

    name: str
    mode: str
    """keep, recompute or selective; empty around the blocks."""
    seconds: Mapping[str, float]
    """forward, backward, recompute, update."""
    bytes: Mapping[str, int]
    """Category → held at the peak; none for ranks that the curve is not of."""


@dataclass(frozen=True, kw_only=True)
class EventSlot:
    """One event of a pipeline."""

    rank: int
    kind: str
    """F forward, B backward, I gradients of inputs, W gradients of weights, update, send."""
    stage: int
    micro: int
    start: float
    finish: float


@dataclass(frozen=True, kw_only=True)
class Detail:
    """A plan, costed for a report."""

    cost: PlanCost
    curve: MemoryCurve
    """Of the rank that needs most."""
    blocks: tuple[BlockCost, ...] = ()
    slots: tuple[EventSlot, ...] = ()
    """Empty without a pipeline."""
    timeline: Timeline | None = None
    """None where nothing is known of the device's speed."""
    energy: Energy | None = None
    device: Device | None = None
    """That it was costed for."""
    notes: tuple[str, ...] = ()


def of_plan(plan: Plan, run: Path | None = None, *, time_limit: float = TIME_LIMIT) -> Detail:
    """Take the traces of a run folder, or those kept on disk, else trace the plan's model; and cost it."""
    from foretell.search.traces import file as traces_file
    from foretell.search.traces.needed import Traces

    cluster = _cluster(plan)
    step = traces_file.read_step(run / traces_file.STEP) if run is not None else None
    if step is not None:
        return of_traces({mode_of(recipe_of(plan)) if blocks_of(step) else KEEP: step}, plan, cluster, _options(plan, cluster))
    own = traces_file.read(run / traces_file.NAME) if run is not None else {}
    traces = Traces(capability=_capability(cluster), own=own, time_limit=time_limit)
    try:
        return of_traces(traces.of(plan, _modes(plan)), plan, cluster, _options(plan, cluster))
    except TraceMismatch as error:
        raise UserError(f"the traces of the plan's residencies do not match: {error}", "use one residency for all blocks") from None


def keep_traces(plan: Plan, run: Path) -> None:
    """Put what is stored of a plan's traces into its run folder, so that its report needs neither the cache nor the model."""
    from foretell.search.traces import file as traces_file
    from foretell.search.traces.needed import Traces

    found = Traces(capability=_capability(_cluster(plan))).kept(plan, _modes(plan))
    if found:
        traces_file.write(run / traces_file.NAME, found)


def _capability(cluster: Cluster) -> tuple[int, int] | None:
    return None if cluster.device.backend == "cpu" else cluster.device.compute_capability or (9, 0)


def _cluster(plan: Plan) -> Cluster:
    cluster = parse(plan.hardware)
    named = plan.predicted.get("device")
    if plan.hardware.strip().casefold().startswith("auto") and isinstance(named, str) and named != cluster.device.name:
        raise UserError(f"the plan is for the {named} of the machine it was made on, and this is another", "make the report there")
    return cluster


def _options(plan: Plan, cluster: Cluster) -> Options:
    """The profile of this CPU where the plan is for it, and the pace it had when the plan was made."""
    reported = None
    if cluster.device.backend == "cpu":
        from foretell.hardware.probe.machine import cpu_name

        reported = cpu_name()

    def profile_of(name: str) -> Profile | None:
        return find_profile(name, reported_as=reported)

    pace = plan.predicted.get("pace")
    return Options(profile_of=profile_of, pace=float(pace) if isinstance(pace, int | float) and pace > 0 else 1.0)


def _modes(plan: Plan) -> tuple[str, ...]:
    """Residencies to trace: those of the blocks, and `keep` where they differ."""
    known = known_blocks(plan)
    modes = {computed(mode) for mode in (modes_of(plan, known).values() if known else (one.mode for one in plan.blocks.values()))}
    return tuple(modes) if known and len(modes) == 1 else tuple(sorted(modes | {"keep"}))


def of_traces(traces: Mapping[str, Trace], plan: Plan, cluster: Cluster, how: Options) -> Detail:
    """The same from traces of one device, as `simulate.plan.predict_plan` takes them."""
    cost = predict_plan(traces, plan, cluster, how)
    known = machine(cluster.device, profile_for(cluster, how.profile_of))
    blocks = blocks_of(next(iter(traces.values())))
    seen = _seen(cost)
    scale = cost.time.step_seconds / seen.timeline.seconds if cost.time and seen.timeline and seen.timeline.seconds else 1.0
    curve = memory_curve(seen.local, cluster, blocks, known, rank=seen.rank).over(cost.time.step_seconds if cost.time else None)
    seconds: dict[str, dict[str, float]] = {}
    for part, times in seen.parts:
        for name, phase, value in _by_block(part, blocks):
            into = seconds.setdefault(name, {})
            into[phase] = into.get(phase, 0.0) + value * times * scale
    slots = tuple(replace(slot, start=slot.start * scale, finish=slot.finish * scale) for slot in seen.slots)
    return Detail(
        cost=cost, curve=curve, slots=slots, timeline=_stretched(seen.timeline, scale) if seen.timeline else None,
        blocks=tuple(_blocks(blocks, modes_of(plan, blocks), seconds, curve)),
        energy=_energy(cost, cluster, known), device=cluster.device, notes=known.notes if known else (),
    )  # fmt: skip


def _stretched(timeline: Timeline, scale: float) -> Timeline:
    """As long as the step is predicted to take: states that move, and torch.compile in a pipeline, are told of the whole."""
    start, finish = ([moment * scale for moment in moments] for moments in (timeline.start, timeline.finish))
    return replace(timeline, start=start, finish=finish, seconds=timeline.seconds * scale)


@dataclass(frozen=True, kw_only=True)
class _RankStep:
    """One rank's step, and the timelines it comes from."""

    rank: int
    local: Trace
    """Of the rank that needs most memory."""
    timeline: Timeline | None = None
    parts: tuple[tuple[Timeline, int], ...] = ()
    """Timelines of ops, and how often each runs in a step."""
    slots: tuple[EventSlot, ...] = ()


def _seen(cost: PlanCost) -> _RankStep:
    """Of the rank that needs most memory."""
    place = max(range(len(cost.ranks)), key=lambda number: cost.ranks[number].memory.device_bytes)
    rank, timeline = cost.ranks[place].rank, cost.timeline
    if not cost.events:
        return _RankStep(rank=rank, local=cost.programs[place], timeline=timeline, parts=((timeline, 1),) if timeline else ())
    assert timeline is not None
    parts = tuple((part, times) for one in cost.events for part, _, times in one.times())
    return _RankStep(rank=rank, local=cost.programs[place], timeline=timeline, parts=parts, slots=tuple(_slots(cost.events, timeline)))


def _slots(events: Sequence[Events], timeline: Timeline) -> Iterator[EventSlot]:
    """Events of all ranks with their times: the tasks of a rank are in the order of its events, the update last."""
    waiting = {one.rank.rank: iter([event for event, _, _ in one.rank.events]) for one in events}
    for task, start, finish in zip(timeline.tasks, timeline.start, timeline.finish, strict=True):
        if not task.resource.startswith("rank "):
            continue
        rank = int(task.resource.removeprefix("rank "))
        event = next(waiting[rank], None)
        stage, micro = (event.stage, event.micro) if event is not None else (-1, -1)
        yield EventSlot(rank=rank, kind=task.name, stage=stage, micro=micro, start=start, finish=finish)


def _by_block(timeline: Timeline, blocks: Sequence[str]) -> Iterator[tuple[str, str, float]]:
    """Block, phase and seconds of every task that computes."""
    where: dict[str, str] = {}
    known = set(blocks)
    for task in timeline.tasks:
        if task.resource.startswith(COLLECTIVES):
            continue
        if task.module not in where:
            where[task.module] = block_named(task.module, known)
        yield where[task.module], task.phase, task.seconds


def _blocks(
    names: Sequence[str], modes: Mapping[str, str], seconds: Mapping[str, Mapping[str, float]], curve: MemoryCurve
) -> Iterator[BlockCost]:
    for name in (*names, AROUND):
        yield BlockCost(name=name, mode=modes.get(name, ""), seconds=seconds.get(name, {}), bytes=curve.held.get(name, {}))


def _energy(cost: PlanCost, cluster: Cluster, known: Machine | None) -> Energy | None:
    if known is None or known.power is None or cost.time is None or cost.watts is None or cluster.device.backend == "cpu":
        return None
    return watts.energy(cost.time, cost.watts, known.power, cost.plan.mesh.world, None)
