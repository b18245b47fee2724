"""The quick cost of a plan: what a sheet says of its blocks, put together by rule. Plain numbers, no torch.

    Layout ─► runs of alike blocks ─► seconds of a micro-batch, bytes of a rank (quick_stage, quick_memory)
                                   ─► pipeline: events of all ranks (quick_pipeline)
                                   ─► Quick

It follows `simulate.plan.predict_plan` in what it counts and leaves the order of single ops aside. Tests hold the one
against the other; the best few of a search are costed by `predict_plan` itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from foretell.hardware.types import Cluster
from foretell.plan.blocks import compress
from foretell.plan.precision import in_recipe
from foretell.plan.types import Mesh, Pipeline, Plan, Residency
from foretell.price.collectives import ALL_REDUCE, Fabric, collective, fabric
from foretell.price.energy import Load
from foretell.price.speeds import REDUCTION_AT_END_BYTES as AT_END
from foretell.price.speeds import fabrics_for, fabrics_of
from foretell.price.time import Machine
from foretell.search.quick_memory import Bytes, Keeper
from foretell.search.quick_reserve import shortened, slack
from foretell.search.quick_stage import Seconds, Stage, Timer, Way, keys_of
from foretell.search.sheet import Sheet, Works
from foretell.simulate.memory.memory import CONTEXT_BAND_BYTES, RESERVED_BAND
from foretell.trace.types import Op

CAREFUL = 1.02
"""Where nothing is sharded, or stages follow each other, reserved bytes come out up to 4 % low or 10 % high."""


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


def quick(layout: Layout, sheet: Sheet, cluster: Cluster, *, reserve: bool = True, recipe: str | None = None) -> Quick:
    """What a layout costs on a cluster; raises a UserError where the model cannot be split so.

    Without `reserve`, `memory_bytes` leaves out what the caching allocator holds beside (a few percent, up to a third where
    logits are most of it) and the answer comes sooner: what does not fit then does not fit at all. `recipe`: the precision
    under which its traces were made, if not the layout's own.
    """
    works = works_of(layout, sheet, recipe)
    mine = composer(sheet, cluster, layout.mesh, layout.placement)
    mine.reserves = reserve
    return mine.cost(layout, works)


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
        blocks=compress(modes), reshard=layout.reshard, compile=layout.compile, placement=layout.placement,
    )  # fmt: skip


def way_of(layout: Layout) -> Way:
    """How parameters are shared by ranks: those along dp_shard and cp hold them together."""
    return Way(layout.mesh.dp_shard * layout.mesh.cp, layout.mesh.dp_replicate, layout.reshard)


# ---------------------------------------------------------------------- composing


def composer(sheet: Sheet, cluster: Cluster, mesh: Mesh, placement: tuple[int, ...] = ()) -> Composer:
    key = (id(cluster), mesh, placement)
    found = sheet.known.get(key)
    if found is None or found.cluster is not cluster:
        found = sheet.known[key] = Composer(sheet, cluster, mesh, placement)
    return found


class Composer:
    """Quick costs of one mesh on one cluster."""

    def __init__(self, sheet: Sheet, cluster: Cluster, mesh: Mesh, placement: tuple[int, ...] = ()) -> None:
        self.sheet, self.cluster, self.mesh = sheet, cluster, mesh
        self.machine: Machine | None = sheet.machine
        unlike = placement or cluster.groups or cluster.matrix is not None
        alone = Plan(model={}, hardware="", mesh=mesh, placement=placement)
        self.fabrics = fabrics_for(alone, cluster) if unlike else fabrics_of(mesh, cluster)
        self.talks: dict[tuple[str, str, float], float] = {}
        self.issues: dict[str, float] = {}
        self.stages: dict[Any, Any] = {}
        self.reserves = True
        self.ids: dict[Stage, Stage] = {}
        world = fabric(cluster, mesh.world) if mesh.world > 1 else None
        self.at_end = collective(ALL_REDUCE, AT_END, world).seconds if world is not None else 0.0
        nccl = sheet.extra.nccl_for(cluster) if mesh.world > 1 else 0
        self.beside = sheet.extra.context_bytes + nccl
        share = RESERVED_BAND if mesh.world > 1 else RESERVED_BAND / 2
        self.careful = int((cluster.device.memory_bytes - self.beside - CONTEXT_BAND_BYTES // 4) * (1 - share))

    def talk(self, axis: str, kind: str, nbytes: float) -> float:
        key = (axis, kind, nbytes)
        found = self.talks.get(key)
        if found is None:
            group: Fabric | None = self.fabrics.get(axis)
            if ":" in axis and group is None:  # parameters that fewer ranks gather again
                group = fabric(self.cluster, int(axis.partition(":")[2]), stride=self.mesh.tp)
            found = self.talks[key] = collective(kind, nbytes, group).seconds if group is not None else 0.0
        return found

    def issue(self, name: str) -> float:
        """Host seconds of one op that sharding adds."""
        found = self.issues.get(name)
        if found is None:
            op = Op(name, (), (), "", "backward", 0)
            found = self.issues[name] = self.machine.host.issue(op) if self.machine is not None else 0.0
        return found

    # ------------------------------------------------------------------ one layout

    def cost(self, layout: Layout, works: Works) -> Quick:
        modes = layout.modes or ("keep",) * len(self.sheet.blocks)
        if layout.mesh.pp > 1:
            from foretell.search.quick_pipeline import pipeline_cost

            return pipeline_cost(self, layout, works, modes)
        stage = Stage(runs_of(self.sheet.kinds, modes))
        way = way_of(layout)
        key = (stage, layout.reshard, id(works), layout.accumulate > 1)
        found = self.stages.get(key)
        if found is None:
            found = self.stages[key] = self._micro(stage, way, works, layout)
        micro, last = found
        held = self._memory(stage, way, works, layout.accumulate)
        total = Seconds()
        total.plus(micro, layout.accumulate - 1)
        total.plus(last)
        if not way.data and layout.accumulate > 1:
            self._added(total, works, stage, layout.accumulate - 1)
        update = self.update(works, [(stage, "root")], way)
        programs = 3 + (layout.accumulate > 1) * (1 + (way.replicas > 1))
        host = total.host + self.around(works, layout.accumulate + 2, 1.0, (programs - 1) / programs)
        device = total.total + update + self.at_end
        seconds = device + host if self.machine is not None and self.machine.serial else max(device, host)
        return self.answer(
            seconds=seconds, total=total, update=update, host=host, bubble=0.0, memories=[held],
            stage_seconds=(seconds,), loads=[(total, update)],
        )  # fmt: skip

    def _micro(self, stage: Stage, way: Way, works: Works, layout: Layout) -> tuple[Seconds, Seconds]:
        timer = Timer(works, way, self.talk, self.issue)
        last = timer.forward(stage, "root")
        every = replace(last, waited=dict(last.waited))
        last.plus(timer.backward(stage, "root"))
        if layout.accumulate == 1 or way.replicas == 1:
            return last, last
        every.plus(timer.backward(stage, "root", sums=False))
        return every, last

    def _added(self, total: Seconds, works: Works, stage: Stage, times: int) -> None:
        """Whole gradients of later micro-batches are added to those that are there."""
        units = [(works.unit(key, 1, data=False), count) for key, count in keys_of(stage)]
        seconds = times * sum(unit.adding * count for unit, count in units)
        total.total += seconds
        total.device += seconds
        more = self.issue("aten.add_.Tensor") - self.issue("aten.detach.default")
        total.host += times * more * sum(unit.trained * count for unit, count in units)

    def _memory(self, stage: Stage, way: Way, works: Works, accumulate: int) -> Bytes:
        key = ("memory", stage, way.reshard, id(works), accumulate, self.reserves)
        found = self.stages.get(key)
        if found is None:
            found = Keeper(works, way, accumulate).alone(stage)
            slack = self.slack(works, way, stage, "root", accumulate) if self.reserves else 0
            share = 1.0 if way.shards > 1 else CAREFUL
            found = self.stages[key] = replace(found, reserved=round(found.reserved * share) + slack)
        return found

    def slack(self, works: Works, way: Way, stage: Stage, root: str, accumulate: int, *, piped: bool = False) -> int:
        """Bytes that the caching allocator reserves beside; the same for stacks of any depth."""
        key = ("slack", shortened(stage), root, way.reshard, id(works), accumulate > 1, piped)
        found = self.sheet.known.get((key, way.shards, way.data))
        if found is None:
            found = self.sheet.known[key, way.shards, way.data] = slack(works, way, stage, root, accumulate, piped=piped)
        return int(found)

    def update(self, works: Works, stages: Sequence[tuple[Stage, str]], way: Way) -> float:
        """Seconds of the update of what some stages hold."""
        mine = sum(works.unit(key, 1, data=False).whole_gradient * n for stage, root in stages for key, n in keys_of(stage, root))
        every = self._every(works)
        return works.update(mine / every / way.shards, data=way.data) if every else 0.0

    def _every(self, works: Works) -> int:
        found = self.stages.get(("every", id(works)))
        if found is None:
            whole = Stage(runs_of(self.sheet.kinds, ("keep",) * len(self.sheet.kinds)))
            found = sum(works.unit(key, 1, data=False).whole_gradient * n for key, n in keys_of(whole))
            self.stages["every", id(works)] = found
        return int(found)

    def around(self, works: Works, programs: int, share: float, seen: float = 1.0) -> float:
        """Host seconds that belong to no op of forward or backward: the update, walking over parameters.

        `seen`: the part of the latter that falls before some op of the step."""
        if self.machine is None:
            return 0.0
        host = self.machine.host
        key = ("around", id(works))
        if key not in self.stages:
            each = self.issue("aten.linalg_vector_norm.default") + self.issue("aten.mul_.Tensor")
            apart = works.material.parameters * each * works.derived  # norms and clips one by one
            update, counting = works.material.update, works.material.counting
            counted = self.sheet.prices.host(counting) + sum(map(host.handing, counting))
            self.stages[key] = self.sheet.prices.host(update) + counted + apart
        per = works.material.parameters * host.weights["parameter"] * share + programs * host.weights["program"]
        return float(self.stages[key]) * share + per * seen

    # ------------------------------------------------------------------ the answer

    def answer(
        self, *, seconds: float, total: Seconds, update: float, host: float, bubble: float, memories: Sequence[Bytes],
        stage_seconds: tuple[float, ...], loads: Sequence[tuple[Seconds, float]],
    ) -> Quick:  # fmt: skip
        parts = {
            "compute": total.product, "attention": total.attention,
            "memory": max(0.0, total.device - total.product - total.attention), "recompute": total.again,
            **{f"{axis} communication": value for axis, value in total.waited.items()},
            "update": update, "bubble": bubble,
        }  # fmt: skip
        known = sum(value for name, value in parts.items() if name != "recompute")
        parts["host"] = max(0.0, seconds - known)
        binds = _binds(parts, seconds)
        low, high = (1.0, 1.0) if self.machine is None else self.machine.band.get(binds) or self.machine.band.get("", (0.7, 1.5))
        worst = max(memories, key=lambda one: one.reserved)
        least = max(one.least for one in memories)
        return Quick(
            seconds=seconds, low=seconds * low, high=seconds * high, memory_bytes=worst.reserved + self.beside,
            margin_bytes=self.careful - worst.reserved, best_margin_bytes=self.careful - least,
            stage_memory=tuple(one.reserved + self.beside for one in memories),
            stage_seconds=stage_seconds, joules=self.joules_of(loads, seconds), parts=parts, binds=binds,
        )  # fmt: skip

    def joules_of(self, loads: Sequence[tuple[Seconds, float]], seconds: float) -> float | None:
        if self.machine is None or self.machine.power is None or not seconds:
            return None
        bandwidth = self.cluster.device.memory_bandwidth_bytes_per_second
        watts = 0.0
        for one, update in loads:
            load = Load(
                min(1.0, (one.device + update) / seconds), min(1.0, one.flops / seconds),
                min(1.0, (one.moved / bandwidth + update) / seconds),
            )  # fmt: skip
            watts += self.machine.power.watts(load) / len(loads)
        return watts * seconds * self.mesh.world


def _binds(parts: Mapping[str, float], seconds: float) -> str:
    if parts["host"] > 0.25 * seconds:
        return "host"
    if sum(value for name, value in parts.items() if name.endswith("communication")) > 0.25 * seconds:
        return "network"
    return "compute" if parts["compute"] + parts["attention"] >= parts["memory"] else "memory bandwidth"


def runs_of(kinds: Sequence[int], modes: Sequence[str]) -> tuple[tuple[int, str, int], ...]:
    """Blocks as runs of alike ones."""
    return tuple(
        (kind, mode, sum(1 for _ in same)) for (kind, mode), same in groupby(zip(kinds, modes, strict=True))
    )


__all__ = ["Layout", "Quick", "plan_of", "quick", "recipe_for"]
