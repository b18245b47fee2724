"""How long a step takes: every op on its stream, asked for by a host that takes its own time.

    trace ─► seconds of each op (measured ops, learned) ─► tasks on compute and collectives, issued by the host
          ─► one timeline: step, what the device does in it, what it waits for
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from foretell.cost.collectives import Fabric, collective, fabric
from foretell.cost.energy import PowerModel
from foretell.cost.features import Shape, describe
from foretell.cost.host import HostModel, steady, watched_blocks, wholly_compiled
from foretell.cost.ops import OpModel
from foretell.cost.prediction import ASSUMED, MEASURED, Time
from foretell.cost.rare import ASKED, FAMILY, called, unmeasured, waits
from foretell.cost.shapes import short
from foretell.cost.streams import COLLECTIVES, COMPUTE, HOST, Task, Timeline, simulate
from foretell.hardware.types import Cluster
from foretell.trace.compiled_blocks import ENTER, LEAVE
from foretell.trace.compiled_graphs import REPLAY, REPLAYED
from foretell.trace.types import Op, Trace

GATHER, SCATTER = "foretell.all_gather", "foretell.reduce_scatter"
MARKS = frozenset({"foretell.begin", "foretell.model_end", "foretell.reshard", ENTER, LEAVE, REPLAY, REPLAYED})
"""Ops that only mark a place."""
COMPUTE_KINDS = frozenset({"gemm", "attention", "convolution", "recurrent"})
LONG_PROGRAM = 20_000
"""Ops above which one step is simulated instead of two: the device is far behind the host there anyway."""
MOST_GUESSED = 0.05
"""Share of a step in ops that were never measured above which the whole counts as assumed."""
CLOSER = 1.0e-6
"""Seconds between two kernels that a CUDA graph saves; from replayed steps on an H200."""
DRAG = {COLLECTIVES: 0.85}
"""How much longer compute takes while a collective runs beside it; from published FSDP runs, see `stack`."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What is known of one device and its host."""

    ops: OpModel
    host: HostModel
    in_step: Mapping[str, float] = field(default_factory=dict)
    """compute, memory → how much longer such ops take inside a step than alone: clocks are lower, caches cold."""
    provenance: str = MEASURED
    slower: Mapping[str, float] = field(default_factory=dict)
    """Family of ops → factor on its seconds, where efficiencies come from another device."""
    serial: bool = False
    """The host itself computes, op by op: a CPU."""
    band: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """What binds → the factors between which nine of ten steps fall."""
    power: PowerModel | None = None
    notes: tuple[str, ...] = ()
    """Sentences on where these figures come from."""


def shape_of(op: Op) -> Shape:
    return Shape(op.name, tuple([ref.spec for ref in op.inputs]), tuple([ref.spec for ref in op.outputs]), op.attrs)


def predict_time(trace: Trace, machine: Machine, cluster: Cluster) -> tuple[Time, Timeline]:
    """Seconds of a steady step on the worst rank, and the timeline they come from."""
    tasks = list(step_tasks(trace, machine, fabric(cluster) if cluster.count > 1 else None))
    drag = DRAG if cluster.count > 1 else None
    timeline = simulate(tasks, steps=1 if len(tasks) > LONG_PROGRAM else 2, drag=drag)
    binds, provenance = _binds(timeline, tasks), machine.provenance
    if cluster.count > 1 or guessed(tasks, machine) > MOST_GUESSED * timeline.seconds:
        provenance = ASSUMED
    low, high = machine.band.get(binds) or machine.band.get("", (0.7, 1.5))
    seconds = timeline.seconds
    return (
        Time(
            step_seconds=seconds, low_seconds=seconds * low, high_seconds=seconds * high,
            breakdown=_breakdown(timeline, tasks), phases=_phases(tasks), binds=binds, provenance=provenance,
            device_seconds=sum(task.seconds for task in tasks if task.resource != COLLECTIVES), host_seconds=timeline.busy.get("host", 0.0),
            exposed_communication_seconds=timeline.exposed_communication,
            waiting_for_host_seconds=timeline.host_stall_seconds,
        ),
        timeline,
    )  # fmt: skip


def guessed(tasks: Sequence[Task], machine: Machine) -> float:
    """Seconds of a step in ops that the machine's profile was measured without."""
    return sum(task.seconds for task in tasks if task.kind == FAMILY) if FAMILY not in machine.ops.families else 0.0


def unmeasured_ops(trace: Trace, machine: Machine) -> tuple[str, ...]:
    """Names of a step's ops that the machine's profile was measured without."""
    every = {shape_of(op) for name, _ in steady(trace) for op in trace.programs[name].ops if short(op.name) in ASKED}
    return unmeasured(every, machine.ops.families)


def step_tasks(trace: Trace, machine: Machine, group: Fabric | None) -> Iterator[Task]:
    """The tasks of a steady step in the order the host asks for them."""
    runs = steady(trace)
    prices = op_prices(trace, machine)
    around = machine.host.around(trace, sum(times for _, times in runs)) / max(1, len(runs))
    position, gathered, scattered, copied = 0, -1, -1, -1
    where = HOST if machine.serial else COMPUTE
    compiled, watched = wholly_compiled(trace), watched_blocks(trace)
    for name, times in runs:
        for _ in range(times):
            pending = around / times
            ops = trace.programs[name].ops
            for op, asking in zip(ops, machine.host.issues(ops, compiled=compiled, watched=watched), strict=True):
                pending += asking
                if op.name in MARKS:
                    continue
                if op.name.startswith("foretell."):
                    kind, seconds = _own(op, prices, group)
                    if kind == "wait":
                        continue
                    if kind in (GATHER, SCATTER):
                        before = copied if kind == GATHER and copied >= 0 else position - 1
                        yield Task(op.name, COLLECTIVES, seconds, (before,) if position else (), pending, kind, op.module, op.phase)
                        gathered, scattered = (position, scattered) if kind == GATHER else (gathered, position)
                        position, pending = position + 1, 0.0
                        continue
                    after = (gathered,) if op.name.endswith("copy_out") and gathered >= 0 else ()
                    yield Task(op.name, COMPUTE, seconds, after, pending, kind, op.module, op.phase)
                    copied = position if op.name.endswith("all_gather_copy_out") else copied
                    position, pending = position + 1, 0.0
                    continue
                family, seconds = prices[id(op)]
                awaited = synchronises(op, machine)
                if not seconds and not awaited:
                    continue
                after = (scattered,) if op.phase == "update" and scattered >= 0 else ()
                yield Task(op.name, where, seconds, after, pending, family, op.module, op.phase, awaited)
                if after:
                    scattered = -1
                if op.phase == "update":
                    copied = -1  # the next step gathers new weights
                position, pending = position + 1, 0.0


def synchronises(op: Op, machine: Machine) -> bool:
    """Whether the host waits for an op's result: as its profile has seen it, or else as such ops are known to be."""
    name = short(op.name)
    if name not in ASKED:
        return False
    shape = shape_of(op)
    return machine.host.waits.get(called(name, shape), waits(name, shape))


def _own(op: Op, prices: Mapping[int, tuple[str, float]], group: Fabric | None) -> tuple[str, float]:
    """Kind and seconds of an op that foretell itself put into the trace."""
    if op.name.endswith("_wait"):
        return "wait", 0.0
    if op.name in (GATHER, SCATTER) and group is not None:
        larger = max(sum(r.spec.nbytes for r in op.inputs), sum(r.spec.nbytes for r in op.outputs))
        return op.name, collective(op.name.removeprefix("foretell."), larger, group).seconds
    return prices[id(op)]


def op_prices(trace: Trace, machine: Machine) -> dict[int, tuple[str, float]]:
    """Of every op of a steady step: its family and its device seconds."""
    known: dict[Shape, tuple[str, float]] = {}
    found: dict[int, Shape] = {}
    for name, _ in steady(trace):
        for op in trace.programs[name].ops:
            found[id(op)] = shape_of(op)
    distinct = dict.fromkeys(found.values())
    seconds = machine.ops.seconds(distinct)
    for shape in distinct:
        described = describe(shape, machine.ops.device)
        family = described.family if described else ""
        around = machine.in_step.get("compute" if family in COMPUTE_KINDS else "memory", 1.0)
        known[shape] = (family, seconds[shape] * around * machine.slower.get(family, 1.0))
    prices = {number: known[shape] for number, shape in found.items()}
    for name, _ in steady(trace):
        replaying = False
        for op in trace.programs[name].ops:
            replaying = op.name != REPLAYED and (replaying or op.name == REPLAY)
            if replaying and prices[id(op)][1]:
                family, alone = prices[id(op)]
                prices[id(op)] = (family, max(alone - CLOSER, alone / 3))
            if op.name == "aten.copy_.default" and len(op.inputs) > 1 and op.inputs[0] == op.inputs[1]:
                prices[id(op)] = ("", 0.0)  # onto itself, as `x[a:] += y` asks for: torch returns at once
    return prices


def _breakdown(timeline: Timeline, tasks: list[Task]) -> dict[str, float]:
    """Seconds of a step by what the device does, and what it waits for; they add up to the step."""
    found: dict[str, float] = {}
    for task in tasks:
        if task.resource != COLLECTIVES:
            kind = task.kind if task.kind in COMPUTE_KINDS else "memory"
            found[kind] = found.get(kind, 0.0) + task.seconds
    found["communication"] = timeline.exposed_communication
    found["waiting_for_host"] = max(0.0, timeline.seconds - sum(found.values()))
    return found


def _phases(tasks: list[Task]) -> dict[str, float]:
    found: dict[str, float] = {}
    for task in tasks:
        if task.resource != COLLECTIVES:
            found[task.phase] = found.get(task.phase, 0.0) + task.seconds
    return found


def _binds(timeline: Timeline, tasks: list[Task]) -> str:
    """compute, memory bandwidth, host or network: what most of the longest chain is."""
    serial = any(task.resource == HOST for task in tasks)
    if not serial and timeline.host_stall_seconds > 0.25 * timeline.seconds:
        return "host"
    if timeline.exposed_communication > 0.25 * timeline.seconds:
        return "network"
    product = sum(task.seconds for task in tasks if task.kind in COMPUTE_KINDS)
    moved = sum(task.seconds for task in tasks if task.resource != COLLECTIVES) - product
    if serial and timeline.seconds > 2 * (product + moved):
        return "host"
    return "compute" if product >= moved else "memory bandwidth"
