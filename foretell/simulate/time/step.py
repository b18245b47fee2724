"""How long a rank's step takes under a plan: its ops on one stream, collectives of each mesh axis on another.

What fully_shard gathers and scatters runs beside compute: a gather must be there before its copy-out, a scatter before
the update. What tensor parallelism sums or gathers is on the path: the op that comes next waits for it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from foretell.lower.fsdp.sharded import COLLECTIVES as TALKING
from foretell.lower.fsdp.sharded import DP_REPLICATE, DP_SHARD
from foretell.lower.offload.activations import COPIES
from foretell.lower.offload.states import NEED, StateUnit
from foretell.plan.types import Plan
from foretell.price.bands import HOST_BOUND, MOST_GUESSED, Evidence
from foretell.price.host import beside_device, in_host_memory, steady, watched_blocks, wholly_compiled
from foretell.price.kernels.irregular import FAMILY as IRREGULAR
from foretell.price.kernels.irregular import SIZED
from foretell.price.kernels.memory_bound import goes_by_data
from foretell.price.kernels.shapes import short
from foretell.price.network.overlap import LOST_OTHERS
from foretell.price.offload import Rates, load_of
from foretell.price.speeds import Speeds, axis_of
from foretell.price.time import (
    COMPUTE_KINDS,
    LONG_PROGRAM,
    MARKS,
    guessed,
    op_prices,
    shape_of,
    synchronises,
)
from foretell.quantities import ASSUMED, COLLECTIVES, COMPUTE, HOST, Task, Time
from foretell.simulate.offload.copies import told, with_copies
from foretell.simulate.offload.timing import marks_of, played
from foretell.simulate.time.laps import KEPT, Laps
from foretell.simulate.time.streams import LAUNCH_QUEUE, Timeline, simulate
from foretell.trace.cuda.versions import widening
from foretell.trace.fold.merged import MERGED, about
from foretell.trace.types import Op, Trace

BESIDE = (DP_SHARD, DP_REPLICATE)
"""Axes whose collectives run beside compute."""
COPIED_IN = 0.25
"""Part of memory bandwidth that copies of lists reach beside compute. About: 0.22 on an H200, 272 MB in 254 us in steps of a Llama over 8
ranks (one plan measured)."""


def plan_time(local: Trace, speeds: Speeds) -> tuple[Time, Timeline]:
    """Seconds of a steady step of one rank, and the timeline they come from; all ranks do the same."""
    kind = traits(local)
    if COPIES not in local.meta:
        return _timed(*folded_tasks(local, speeds), speeds, kind)
    tasks = step_tasks(local, speeds)
    kept, _ = _timed(tasks, None, speeds, kind)
    moved, timeline = _timed(with_copies(tasks, local, speeds.copies), None, speeds, kind)
    return told(moved, kept), timeline


def folded_tasks(local: Trace, speeds: Speeds) -> tuple[list[Task], Laps | None]:
    """The tasks of a steady step with a few rounds of the micro-batch it repeats, and where these are; or with all of them."""
    run = steady(local)
    repeated = [(name, times) for name, times in run if times > 1]
    if len(repeated) != 1:
        return step_tasks(local, speeds), None
    (name, count), = repeated
    kept = KEPT + math.ceil(2 * LAUNCH_QUEUE / max(1, len(local.programs[name].ops)))
    begun: list[int] = []
    tasks = with_end(tasks_of(local, run, speeds, most=kept, begun=begun), speeds)
    apart = {after - before for before, after in itertools.pairwise(begun)}
    if kept >= count:
        return tasks, None
    if len(apart) != 1 or 0 in apart:  # rounds of other lengths stand for nothing
        return step_tasks(local, speeds), None
    return tasks, Laps(begun[0], apart.pop(), kept, count)


def step_tasks(local: Trace, speeds: Speeds) -> list[Task]:
    """All tasks of a steady step, with what ranks tell each other at its end."""
    return with_end(tasks_of(local, steady(local), speeds), speeds)


def with_end(step: Iterable[Task], speeds: Speeds) -> list[Task]:
    """Tasks of a step, with what ranks tell each other at its end."""
    tasks = list(step)
    if speeds.sync_time:
        where = HOST if speeds.machine.serial else COMPUTE
        tasks.append(Task("foretell.all_reduce", where, speeds.sync_time * speeds.slowdown, (), 0.0, "all_reduce", "", "update"))
    return tasks


def traits(local: Trace) -> Evidence:
    """What a band depends on and tasks do not tell."""
    recipe = local.meta.get("recipe")
    fp32 = isinstance(recipe, Mapping) and recipe.get("precision") == "fp32"
    return Evidence(compiled="compiled" in local.meta, fp32=fp32, widening=widening(local.meta))


def _timed(tasks: Sequence[Task], laps: Laps | None, speeds: Speeds, kind: Evidence) -> tuple[Time, Timeline]:
    timeline = simulate(tasks, steps=1 if len(tasks) > LONG_PROGRAM else 2, drag=drags(tasks, speeds), laps=laps)
    return as_time(timeline, timeline.tasks, speeds, kind), timeline


def moved_time(local: Trace, plan: Plan, speeds: Speeds, units: Sequence[StateUnit], rates: Rates) -> tuple[Time, Timeline]:
    """The same where states, or weights, come and go beside the step."""
    plain = step_tasks(local, speeds)
    own = with_copies(plain, local, speeds.copies)
    timeline = simulate(own, steps=2, drag=drags(own, speeds))
    kind = traits(local)
    found = as_time(timeline, own, speeds, kind)
    if COPIES in local.meta:
        kept = as_time(simulate(plain, steps=2, drag=drags(plain, speeds)), plain, speeds, kind)
        found = told(found, kept)
    late = played(marks_of(timeline, [unit.path for unit in units]), units, load_of(plan), rates).waited
    found = replace(
        found, step_seconds=found.step_seconds + late, low_seconds=found.low_seconds + late, high_seconds=found.high_seconds + late
    )
    breakdown = {**found.breakdown, "waiting_for_states": late}
    breakdown["waiting_for_host"] = max(0.0, found.step_seconds - sum(v for k, v in breakdown.items() if k != "waiting_for_host"))
    binds = "link" if late > 0.25 * found.step_seconds else found.binds
    return replace(found, breakdown=breakdown, binds=binds), timeline


def drags(tasks: Sequence[Task], speeds: Speeds) -> Mapping[str, float] | None:
    """Lanes of collectives that compute runs beside, with the part of what that costs it (`price.network.overlap`) that is left there."""
    beside = {task.resource for task in tasks} & {lane(axis) for axis in BESIDE}
    return dict.fromkeys(beside, speeds.drag) or None


def lane(axis: str) -> str:
    """The stream on which an axis' collectives run one after the other."""
    return COLLECTIVES if axis == DP_SHARD else f"{COLLECTIVES} {axis}"


def tasks_of(
    trace: Trace, run: Sequence[tuple[str, int]], speeds: Speeds, *, around: bool = True, most: int | None = None,
    begun: list[int] | None = None,
) -> Iterator[Task]:  # fmt: skip
    """The tasks of a run of programs in the order the host asks for them; `around` counts what it does besides the ops.

    Of a program that is repeated at most `most` rounds are made; where each began is added to `begun`.
    """
    machine = speeds.machine
    prices = op_prices(trace, machine, speeds.reprice)
    besides = machine.host.around(trace, sum(times for _, times in run)) / max(1, len(run)) if around else 0.0
    watched = watched_blocks(trace)
    maker = _Maker(speeds, compiled=wholly_compiled(trace))
    here = in_host_memory(trace.storages) if not machine.serial else frozenset()
    for name, times in run:
        ops = trace.programs[name].ops
        issues = list(machine.host.issues(ops, compiled=maker.compiled, watched=watched))
        beside = [machine.host.handing(op) if beside_device(op, here) else None for op in ops] if here else [None] * len(ops)
        entering = machine.host.entering(trace, name)
        stood: object = None
        made: list[Task] = []
        for _ in range(times if most is None else min(times, most)):
            if begun is not None and times > 1:
                begun.append(maker.count)
            before, stood = stood, maker.stands()
            if stood == before:  # it waits for the same as the round before, so many tasks later
                made = maker.again(made)
                yield from made
                continue
            maker.pending, made = besides / times + entering, []
            for op, asking, handing in zip(ops, issues, beside, strict=True):
                maker.pending += asking
                if handing is not None:
                    maker.pending += handing
                    continue
                task = maker.task(op, prices)
                if task is not None:
                    made.append(task)
            yield from made


class _Maker:
    """Ops as tasks, with what each waits for."""

    def __init__(self, speeds: Speeds, *, compiled: bool) -> None:
        self.speeds, self.machine, self.compiled = speeds, speeds.machine, compiled
        self.made: dict[int, Task | None] = {}
        self.pending = 0.0
        self.count = 0
        self.latest = -1
        """The last task on the compute stream."""
        self.awaited: dict[str, int] = {}
        """Axis → the collective that nothing has waited for yet."""
        self.gathered = self.copied = -1
        """The last gather over data ranks, and the copying out of it: the next one waits for that and not for compute."""

    def stands(self) -> object:
        """Everything that tasks to come may wait for, counted back from the next; what was before all is not there."""
        at = (self.latest, self.gathered, self.copied, *self.awaited.values())
        return tuple(self.awaited), tuple(self.count - number if number >= 0 else None for number in at)

    def again(self, made: Sequence[Task]) -> list[Task]:
        """A round that begins as the one before did and does the same."""
        more = len(made)
        self.latest, self.gathered, self.copied = (n + more if n >= 0 else n for n in (self.latest, self.gathered, self.copied))
        self.awaited = {axis: number + more for axis, number in self.awaited.items()}
        self.count += more
        return [task._replace(after=tuple([one + more for one in task.after])) if task.after else task for task in made]

    def task(self, op: Op, prices: Mapping[int, tuple[str, float]]) -> Task | None:
        """The next task; None where the device has nothing to do."""
        if id(op) not in self.made:
            self.made[id(op)] = self._made(op, prices)
        made = self.made[id(op)]
        if made is None:
            return None
        if op.name in TALKING:
            return self._collective(op, made)
        if op.name == NEED and self.copied >= 0:  # what is gathered is gathered when it is new
            return self._issue(Task(op.name, lane(DP_SHARD), 0.0, (), 0.0, "need", op.module, op.phase), (self.copied,))
        return self._issue(made, self._after(op))

    def _made(self, op: Op, prices: Mapping[int, tuple[str, float]]) -> Task | None:
        """What is the same each time an op is run."""
        if op.name in MARKS or op.name.endswith("_wait"):
            return None
        factor = self.speeds.slowdown
        if op.name in TALKING:
            where = HOST if self.machine.serial else lane(axis_of(op))
            seconds = (self.speeds.comm_time(op) + self._copied_in(op)) * factor
            return Task(op.name, where, seconds, (), 0.0, op.name.removeprefix("foretell."), op.module, op.phase)
        family, seconds = prices[id(op)]
        awaited = synchronises(op, self.machine)
        if not seconds and not awaited and not op.name.startswith("foretell."):
            return None
        seconds += self.speeds.each_longer if seconds else 0.0
        if self.speeds.op_slowdown is not None:
            seconds *= self.speeds.op_slowdown(op)
        where = HOST if self.machine.serial else COMPUTE
        beside = about(op).slower if op.name == MERGED else self.machine.beside.get(shape_of(op), LOST_OTHERS)
        return Task(op.name, where, seconds * factor, (), 0.0, family, op.module, op.phase, awaited, beside)

    def _copied_in(self, op: Op) -> float:
        """Seconds until FSDP2 has cast a rank's shards and laid them side by side, on a stream beside compute; then it gathers them."""
        if self.machine.serial or op.name != "foretell.all_gather" or axis_of(op) not in BESIDE or not op.inputs:
            return 0.0
        (whole,) = op.outputs
        shards = op.bytes_written / next(int(str(attr).removeprefix("ranks:")) for attr in op.attrs if str(attr).startswith("ranks:"))
        cast = any(ref.spec.dtype != whole.spec.dtype for ref in op.inputs)
        moved = 2 * shards + (op.bytes_read + shards if cast else 0.0)
        return moved / (COPIED_IN * self.machine.ops.device.memory_bandwidth_bytes_per_second)

    def _after(self, op: Op) -> tuple[int, ...]:
        after = [self.awaited.pop(axis) for axis in list(self.awaited) if axis not in BESIDE or op.phase == "update"]
        if op.name.endswith("copy_out") and self.gathered >= 0:
            after.append(self.gathered)
        return tuple(after)

    def _collective(self, op: Op, made: Task) -> Task:
        if self.machine.serial:
            return self._issue(made, ())
        axis, gathers = axis_of(op), made.kind == "all_gather"
        after = tuple(number for number in (self.latest, self.awaited.get(DP_SHARD, -1)) if number >= 0)
        if gathers or axis not in BESIDE:
            after = after[:1] if self.latest >= 0 else ()
        if gathers and axis in BESIDE and self.copied >= 0:
            after = (self.copied,)
        task = self._issue(made, after)
        if gathers and axis in BESIDE:
            self.gathered = self.count - 1
        else:
            self.awaited[axis] = self.count - 1
        return task

    def _issue(self, made: Task, after: tuple[int, ...]) -> Task:
        name, where, seconds, _, _, kind, module, phase, awaited, slower = made
        asking = self.pending * self.speeds.host_slowdown * self.speeds.slowdown
        task = Task(name, where, seconds, after, asking, kind, module, phase, awaited, slower)
        self.pending = 0.0
        if where in (COMPUTE, HOST):
            self.latest = self.count
        if name.endswith("copy_out"):
            self.copied = self.count
        elif phase == "update":
            self.copied = -1  # the first gather of a step is of new weights
        self.count += 1
        return task


# ---------------------------------------------------------------------- the timeline as an answer


def as_time(timeline: Timeline, tasks: Sequence[Task], speeds: Speeds, about: Evidence | None = None) -> Time:
    exposed = exposed_communication(timeline)
    busy = [task for task in tasks if task.resource in (COMPUTE, HOST)]
    binds = _binds(timeline, busy, exposed)
    seconds, unmeasured = timeline.seconds, guessed(tasks, speeds.machine)
    low, high = speeds.band(_evidence(timeline, tasks, unmeasured, about or Evidence()))
    phases: dict[str, float] = {}
    kinds: dict[str, float] = {}
    for task in busy:
        phases[task.phase] = phases.get(task.phase, 0.0) + task.seconds
        kind = task.kind if task.kind in COMPUTE_KINDS else "communication" if task.name in TALKING else "memory"
        kinds[kind] = kinds.get(kind, 0.0) + task.seconds
    kinds["communication"] = kinds.get("communication", 0.0) + exposed
    kinds["waiting_for_host"] = max(0.0, seconds - sum(kinds.values()))
    unsure = not speeds.alone or unmeasured > MOST_GUESSED * seconds
    return Time(
        step_seconds=seconds, low_seconds=seconds * low, high_seconds=seconds * high, breakdown=kinds, phases=phases,
        binds=binds, provenance=ASSUMED if unsure else speeds.machine.provenance, device_seconds=sum(task.seconds for task in busy),
        host_seconds=timeline.busy.get(HOST, 0.0), exposed_communication_seconds=exposed,
        waiting_for_host_seconds=timeline.host_stall_seconds,
    )  # fmt: skip


def _evidence(timeline: Timeline, tasks: Sequence[Task], unmeasured: float, kind: Evidence) -> Evidence:
    whole = timeline.seconds or 1.0
    return replace(
        kind, host_share=timeline.host_stall_seconds / whole, guessed_share=unmeasured / whole,
        irregular_share=sum(task.seconds for task in tasks if task.kind == IRREGULAR) / whole,
        scattered_share=sum(task.seconds for task in tasks if task.seconds and goes_by_data(short(task.name))) / whole,
        data_dependent=any(task.synchronises and short(task.name) in SIZED for task in tasks),
    )  # fmt: skip


def exposed_communication(timeline: Timeline) -> float:
    """Seconds in which some collective ran and compute did not; lanes that overlap each other count once at most."""
    total = sum(seconds for name, seconds in timeline.exposed.items() if name.startswith(COLLECTIVES))
    return min(total, max(0.0, timeline.seconds - timeline.busy.get(COMPUTE, 0.0)))


def _binds(timeline: Timeline, busy: Sequence[Task], exposed: float) -> str:
    serial = any(task.resource == HOST for task in busy)
    if not serial and timeline.host_stall_seconds > HOST_BOUND * timeline.seconds:
        return "host"
    if exposed > 0.25 * timeline.seconds:
        return "network"
    product = sum(task.seconds for task in busy if task.kind in COMPUTE_KINDS)
    moved = sum(task.seconds for task in busy) - product
    if serial and timeline.seconds > 2 * (product + moved):
        return "host"
    return "compute" if product >= moved else "memory bandwidth"
