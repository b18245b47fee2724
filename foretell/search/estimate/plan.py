"""The quick cost of a plan: the same lowering, timeline and allocator as any plan's, on a short stack of merged ops.

    Layout ─► runs of alike blocks ─► a few of each, their ops merged: a trace (short, coarse)
                                   ─► lowered, laid on the timeline, replayed; made deep (quick_step, depth)
                                   ─► pipeline: so for each kind of stage and rank (quick_stage, quick_pipeline)
                                   ─► Quick

Only how fine the trace is differs from `simulate.plan.predict_plan`. Tests hold the one against the other; the best few of
a search are costed by `predict_plan` itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from foretell.hardware.types import Cluster
from foretell.plan.blocks import compress
from foretell.plan.legal import SPLIT_BACKWARD
from foretell.plan.precision import in_recipe
from foretell.plan.types import LOOPED, Mesh, Pipeline, Plan, Residency
from foretell.price.energy import DeviceLoad
from foretell.price.speeds import Seconds, Speeds, message, on_gpu
from foretell.price.time import Machine
from foretell.search.block_costs.kept import Kept
from foretell.search.block_costs.ops import AFTER, BEFORE
from foretell.search.block_costs.sheet import Sheet, Works
from foretell.search.block_costs.work import Work
from foretell.search.estimate.depth import DeepStage, Depth, Peak, Run, runs_of, stage_of
from foretell.search.estimate.stage import Stages
from foretell.search.estimate.step import AXES, Steps
from foretell.simulate.memory.memory import CONTEXT_BAND_BYTES, careful_share
from foretell.trace.types import Op


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A candidate, before it is a plan."""

    mesh: Mesh
    micro_batch: int
    accumulate: int = 1
    schedule: str | None = None
    """None without a pipeline."""
    interleave: int = 1
    """Stages on each rank of the pipeline."""
    cuts: tuple[int, ...] = ()
    """Index of the first block of each later stage, in order; empty without a pipeline."""
    modes: tuple[str, ...] = ()
    """keep, selective or recompute for each block, in order; empty: all are kept."""
    precision: str = "bf16-mixed"
    compile: str = "none"
    reshard: bool | int = True
    placement: tuple[int, ...] = ()
    """Device of each rank; empty: its own number."""

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.accumulate * self.mesh.data


@dataclass(frozen=True, kw_only=True)
class Quick:
    """What a candidate costs, quickly."""

    seconds: float
    low: float
    high: float
    memory_bytes: int
    """Of the worst rank: reserved, context and communication buffers."""
    margin_bytes: int
    """Capacity less `memory_bytes` and what the prediction is uncertain by; below zero: it does not fit."""
    best_margin_bytes: int
    """The same with what is alive at once instead of what is reserved; below zero: it cannot fit."""
    stage_memory: tuple[int, ...]
    """The same as `memory_bytes` for each rank of the pipeline."""
    stage_seconds: tuple[float, ...]
    """In which each rank of the pipeline is busy."""
    joules: float | None = None
    """Of all devices, one step; None where nothing is known of power."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the busiest rank: compute, attention, memory, recompute, communication by axis, host, update, bubble."""
    binds: str = "compute"

    @property
    def fits(self) -> bool:
        return self.margin_bytes >= 0


def quick(layout: Layout, sheet: Sheet, cluster: Cluster, *, held: Depth = Depth.SHORT, recipe: str | None = None) -> Quick:
    """What a layout costs on a cluster; raises a UserError where the model cannot be split so.

    `held` says how its bytes are found: those alive at once in the events of a pipeline are a few percent less than what the
    allocator reserves, and come sooner. `recipe`: the precision under which its traces were made, if not the layout's own.
    """
    return composer(sheet, cluster, layout.mesh, layout.placement).cost(layout, works_of(layout, sheet, recipe), held)


def works_of(layout: Layout, sheet: Sheet, recipe: str | None = None) -> Works:
    """What the pieces cost at the layout's micro-batch and splits; a UserError where the model cannot be split so."""
    mesh = layout.mesh
    found = sheet.works(recipe or recipe_for(layout), layout.micro_batch, mesh.tp, layout.precision, cp=mesh.cp, ep=mesh.ep)
    return found.compiling(layout.compile)


def recipe_for(layout: Layout) -> str:
    """The precision under which the traces were made."""
    return in_recipe(layout.precision, layout.mesh.spread > 1)


def plan_of(layout: Layout, sheet: Sheet, about: Mapping[str, Any], hardware: str) -> Plan:
    """The layout as a plan; `about` says which model."""
    pipeline = None
    if layout.mesh.pp > 1:
        pipeline = Pipeline(schedule=layout.schedule or "1f1b", cuts=tuple(sheet.blocks[index] for index in layout.cuts))
    modes = {block: Residency(mode=mode) for block, mode in zip(sheet.blocks, layout.modes, strict=bool(layout.modes))}
    return Plan(
        model=about, hardware=hardware, mesh=layout.mesh, pipeline=pipeline, micro_batch=layout.micro_batch,
        accumulate=layout.accumulate, precision=layout.precision, optimizer=sheet.optimizer, clip=sheet.clip,
        state_format=sheet.state_format, blocks=compress(modes), reshard=layout.reshard, compile=layout.compile, placement=layout.placement,
    )  # fmt: skip


# ---------------------------------------------------------------------- composing


def composer(sheet: Sheet, cluster: Cluster, mesh: Mesh, placement: tuple[int, ...] = ()) -> Composer:
    key = (id(cluster), mesh, placement)
    found = sheet.known.get(key)
    if found is None or found.cluster is not cluster:
        found = sheet.known[key] = Composer(sheet, cluster, mesh, placement)
    return found


class Ops(NamedTuple):
    """Sums over the ops of a rank, without what lowering adds."""

    device: float = 0.0
    product: float = 0.0
    attention: float = 0.0
    again: float = 0.0
    flops: float = 0.0
    moved: float = 0.0

    def times(self, count: float) -> Ops:
        return Ops(*[count * value for value in self])


class Composer:
    """Quick costs of one mesh on one cluster."""

    def __init__(self, sheet: Sheet, cluster: Cluster, mesh: Mesh, placement: tuple[int, ...] = ()) -> None:
        self.sheet, self.cluster, self.mesh = sheet, cluster, mesh
        self.placement = placement
        self.machine: Machine | None = sheet.machine
        self.known: dict[Any, Any] = {}
        nccl = sheet.extra.nccl_for(cluster) if mesh.world > 1 else 0
        self.beside = sheet.extra.context_bytes + nccl
        share = careful_share(sheet.fitted, split=mesh.world > 1, moved=False)
        wider = sheet.memory_widening
        self.careful = int((cluster.device.memory_bytes - self.beside - CONTEXT_BAND_BYTES // 4 * wider) * (1 - share * wider))

    def speeds(self, reshard: bool | int = True) -> Speeds | None:
        """What prices a rank's tasks; each message is priced once."""
        key = ("speeds", 0 if isinstance(reshard, bool) else reshard)
        if key not in self.known:
            plan = Plan(model={}, hardware="", mesh=self.mesh, placement=self.placement, reshard=reshard)
            found = on_gpu(plan, self.cluster, self.machine) if self.machine is not None else None
            self.known[key] = replace(found, comm_time=_remembered(found.comm_time)) if found is not None else None
        known: Speeds | None = self.known[key]
        return known

    def plan(self, layout: Layout) -> Plan:
        """What lowering asks of a plan."""
        pipeline = Pipeline(schedule=layout.schedule or "1f1b", cuts=("",) * len(layout.cuts)) if layout.mesh.pp > 1 else None
        return Plan(
            model={}, hardware="", mesh=self.mesh, pipeline=pipeline, precision=layout.precision, reshard=layout.reshard,
            placement=self.placement,
        )  # fmt: skip

    def stages(self, layout: Layout, works: Works) -> Stages:
        key = ("stages", id(works), layout.reshard, layout.schedule)
        if key not in self.known:
            self.known[key] = Stages(works, self.plan(layout), self.speeds(layout.reshard), self.kept(layout, works))
        found: Stages = self.known[key]
        return found

    def kept(self, layout: Layout, works: Works) -> Kept:
        """What is kept of short stacks under such a plan."""
        piped = (layout.schedule in SPLIT_BACKWARD, layout.schedule in LOOPED)
        return Kept(self.sheet.costs, repr((works.about, works.way, self.mesh, piped, layout.precision, layout.reshard, self.placement)))

    def steps(self, layout: Layout, works: Works) -> Steps:
        key = ("steps", id(works), layout.reshard)
        if key not in self.known:
            self.known[key] = Steps(works, self.plan(layout), self.speeds(layout.reshard), self.kept(layout, works))
        found: Steps = self.known[key]
        return found

    # ------------------------------------------------------------------ one layout

    def cost(self, layout: Layout, works: Works, held: Depth = Depth.SHORT) -> Quick:
        modes = layout.modes or ("keep",) * len(self.sheet.blocks)
        if layout.mesh.pp > 1:
            from foretell.search.estimate.pipeline import Pipe

            return Pipe(self, layout, works, modes).cost(held)
        stage = stage_of(runs_of(self.sheet.kinds, modes), works.taken)
        steps = self.steps(layout, works)
        ops = self.ops_of(works, stage.every).times(layout.accumulate)
        memory = steps.peak(stage, layout.accumulate)
        if held == Depth.WHOLE:  # bytes and seconds: what two blocks expose of their messages is not what eighty do
            stage = DeepStage(runs_of(self.sheet.kinds, modes), whole=True)
            memory = steps.used(stage, layout.accumulate, self.cluster.device.memory_bytes, self.beside)
        if held == Depth.ALIVE and memory.reserved > self.careful:  # how long it would take does not matter
            return self.bound(ops, [memory], layout)
        found = steps.seconds(stage, layout.accumulate)
        waited = {axis: found[axis] for axis in AXES if found.get(axis, 0.0) > 0}
        seconds = found["seconds"]
        return self.answer(
            seconds=seconds, ops=[ops], worst=0, busy=found["busy"] - found["update"], waited=waited, update=found["update"],
            updates=[found["update"]], bubble=0.0, memories=[memory], stage_seconds=(seconds,),
        )  # fmt: skip

    def ops(self, works: Works, modes: Sequence[str]) -> Ops:
        return self.ops_of(works, runs_of(self.sheet.kinds, modes))

    def ops_of(self, works: Works, runs: Iterable[Run], *, first: bool = True, last: bool = True) -> Ops:
        """Sums over the ops of some blocks, and of what is before and after them, for one micro-batch."""
        wanted: list[tuple[str | int, str, int]] = [(kind, mode, count) for kind, mode, count in runs]
        wanted += [(BEFORE, "keep", 1)] * first + [(AFTER, "keep", 1)] * last
        found = [0.0] * len(Ops._fields)
        for key, mode, count in wanted:
            one = works.known.get((Ops, key, mode))
            if one is None:
                one = works.known[Ops, key, mode] = _ops_of(works.work(key, mode))
            for place, value in enumerate(one):
                found[place] += count * value
        return Ops(*found)

    # ------------------------------------------------------------------ the answer

    def bound(self, ops: Ops, memories: Sequence[Peak], layout: Layout) -> Quick:
        """Of a layout that does not fit: its bytes, and seconds that it cannot go below."""
        least = ops.device / layout.mesh.pp
        return self.answer(
            seconds=least, ops=[ops.times(1 / layout.mesh.pp)], worst=0, busy=least, waited={}, update=0.0, updates=[0.0], bubble=0.0,
            memories=memories, stage_seconds=(least,) * layout.mesh.pp,
        )  # fmt: skip

    def answer(
        self, *, seconds: float, ops: Sequence[Ops], worst: int, busy: float, waited: Mapping[str, float], update: float,
        updates: Sequence[float], bubble: float, memories: Sequence[Peak], stage_seconds: tuple[float, ...],
    ) -> Quick:  # fmt: skip
        """`busy`: seconds in which the busiest rank computes, its update aside."""
        mine = ops[worst]
        parts = {
            "compute": mine.product, "attention": mine.attention,
            "memory": max(0.0, busy - mine.product - mine.attention), "recompute": mine.again,
            **{f"{axis} communication": value for axis, value in waited.items()},
            "update": update, "bubble": bubble,
        }  # fmt: skip
        known = sum(value for name, value in parts.items() if name != "recompute")
        parts["host"] = max(0.0, seconds - known)
        binds = _binds(parts, seconds)
        low, high = (1.0, 1.0) if self.machine is None else self.machine.band.get(binds) or self.machine.band.get("", (0.7, 1.5))
        low, high = low**self.sheet.widening, high**self.sheet.widening
        most = max(memories, key=lambda one: one.reserved)
        least = max(one.allocated for one in memories)
        return Quick(
            seconds=seconds, low=seconds * low, high=seconds * high, memory_bytes=most.reserved + self.beside,
            margin_bytes=self.careful - most.reserved, best_margin_bytes=self.careful - least,
            stage_memory=tuple(one.reserved + self.beside for one in memories),
            stage_seconds=stage_seconds, joules=self.joules_of(list(zip(ops, updates, strict=True)), seconds), parts=parts, binds=binds,
        )  # fmt: skip

    def joules_of(self, loads: Sequence[tuple[Ops, float]], seconds: float) -> float | None:
        if self.machine is None or self.machine.power is None or not seconds:
            return None
        bandwidth = self.cluster.device.memory_bandwidth_bytes_per_second
        watts = 0.0
        for one, update in loads:
            load = DeviceLoad(
                min(1.0, (one.device + update) / seconds), min(1.0, one.flops / seconds),
                min(1.0, (one.moved / bandwidth + update) / seconds),
            )  # fmt: skip
            watts += self.machine.power.watts(load) / len(loads)
        return watts * seconds * self.mesh.world


def _ops_of(work: Work) -> Ops:
    ahead, back = work.forward, work.backward
    return Ops(
        ahead.seconds + back.seconds, ahead.product + back.product, ahead.attention + back.attention, work.again,
        ahead.flops + back.flops, ahead.moved + back.moved,
    )  # fmt: skip


def _remembered(comm_time: Seconds) -> Seconds:
    """The same, worked out once for each message."""
    known: dict[object, float] = {}

    def seconds(op: Op) -> float:
        key = (op.name, op.attrs, message(op))
        if key not in known:
            known[key] = comm_time(op)
        return known[key]

    return seconds


def _binds(parts: Mapping[str, float], seconds: float) -> str:
    if parts["host"] > 0.25 * seconds:
        return "host"
    if sum(value for name, value in parts.items() if name.endswith("communication")) > 0.25 * seconds:
        return "network"
    return "compute" if parts["compute"] + parts["attention"] >= parts["memory"] else "memory bandwidth"


__all__ = ["Layout", "Quick", "plan_of", "quick", "recipe_for"]
