"""What costs of a plan are made of: the answer's types, and what follows from one rank's trace. Plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from foretell.hardware import overhead
from foretell.hardware.types import Cluster
from foretell.lower.context import all_ranks
from foretell.lower.fsdp.units import COLLECTIVES, RECEIVE, SEND
from foretell.plan.types import Plan
from foretell.price.host import steady
from foretell.price.speeds import Options, axis_of, far_apart, message
from foretell.quantities import ASSUMED, FITS, NO, TIGHT, Infeasible, Memory, Time
from foretell.simulate.memory.memory import (
    MemoryOutcome,
    careful_limit,
    predict_memory,
    run_order,
    sizes_for,
    tight_share,
)
from foretell.simulate.memory.replay import Replay
from foretell.simulate.time.streams import Timeline
from foretell.trace.cuda.versions import doubt, of, widening
from foretell.trace.recipe import changes_training
from foretell.trace.types import Op, Trace

if TYPE_CHECKING:
    from foretell.simulate.pipeline import Events
    from foretell.simulate.sync import SyncCost

TORCH = "2.11"
"""The torch with which op scratch and what a device holds beside the model were measured."""
_WORST = (FITS, TIGHT, NO)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A kind of message that one rank sends in a step."""

    name: str
    """all_gather, reduce_scatter, all_reduce, send, ..."""
    axis: str
    ranks: int
    nbytes: int
    """The larger buffer of one such message."""
    times: int
    """How often in a step."""


@dataclass(frozen=True, kw_only=True)
class RankCost:
    """One rank of the pipeline axis, the one of its group with most bytes."""

    rank: int
    stages: tuple[int, ...]
    verdict: str
    memory: Memory
    collectives: tuple[Collective, ...]
    seconds: float | None = None
    """In which this rank computes or communicates; the rest of the step it waits for others."""


@dataclass(frozen=True, kw_only=True)
class PlanCost:
    """What a plan is predicted to cost."""

    plan: Plan
    ranks: tuple[RankCost, ...]
    """One for each rank of the pipeline axis."""
    time: Time | None
    """None where nothing is known of the device's speed."""
    unit: str
    """tokens or samples."""
    per_step: int
    bubble: float = 0.0
    """Share of the step in which ranks wait for other stages, on average."""
    model_flops: int = 0
    """Of the whole model, one step, all ranks together, without recomputation."""
    recompute_flops: int = 0
    """The same of what is computed again."""
    watts: float | None = None
    """Of a device, on average over the step and the ranks; None where nothing is known of its power or speed."""
    notes: tuple[str, ...] = ()
    rounds: SyncCost | None = None
    """Of replicas that step alone: what joins them."""
    programs: tuple[Trace, ...] = field(default=(), repr=False, compare=False)
    """What each rank of the pipeline axis runs."""
    timeline: Timeline | None = field(default=None, repr=False, compare=False)
    """Of a rank's ops; with a pipeline, of the events of all its ranks. None where nothing is known of the device's speed."""
    events: tuple[Events, ...] = field(default=(), repr=False, compare=False)
    """With a pipeline: those of each rank."""
    kept_spans: Mapping[str, float] = field(default_factory=dict, repr=False, compare=False)
    """What `spans` said, of a cost that was kept without its timeline."""

    @property
    def worst(self) -> RankCost:
        return max(self.ranks, key=lambda rank: (_WORST.index(rank.verdict), rank.memory.device_bytes))

    @property
    def verdict(self) -> str:
        return self.worst.verdict

    @property
    def fits(self) -> bool:
        return self.verdict != NO

    @property
    def per_second(self) -> float | None:
        return self.per_step / self.time.step_seconds if self.time else None

    @property
    def joules(self) -> float | None:
        """Of a step on all devices."""
        return self.watts * self.time.step_seconds * self.plan.mesh.world if self.watts is not None and self.time else None

    def infeasible(self, device: str) -> Infeasible | None:
        worst = self.worst
        if self.fits:
            return None
        return Infeasible(device=device, bytes_short=-worst.memory.margin_bytes, holders=worst.memory.holders)

    def spans(self) -> dict[str, float]:
        """Forward with backward, and the update, each with its waits, as a run's clocks see them: together the step. Empty where no
        timeline has both, and where tensors move: what waits for them is not on the timeline."""
        if self.timeline is None:
            return dict(self.kept_spans)
        if self.time is None or not self.timeline.seconds or self.plan.offloads:
            return {}
        ends = {False: 0.0, True: 0.0}
        for task, finish in zip(self.timeline.tasks, self.timeline.finish, strict=True):
            update = "update" in (task.phase, task.name)
            ends[update] = max(ends[update], finish)
        if not ends[False] < ends[True]:
            return {}
        step = self.time.step_seconds
        if self.rounds is not None and self.rounds.alone_seconds is not None:  # the timeline is of a step by itself, rounds are updates
            first = min(step, ends[False] * self.rounds.alone_seconds / self.timeline.seconds)
            return {"backward": first, "update": step - first}
        first = min(step, ends[False] * step / self.timeline.seconds)
        return {"backward": first, "update": step - first}

    def predicted(self) -> dict[str, Any]:
        """What goes into a plan file."""
        worst, time = self.worst, self.time
        found: dict[str, Any] = {
            "verdict": self.verdict, "memory_bytes": worst.memory.device_bytes,
            "allocated_bytes": worst.memory.allocated_bytes, "reserved_bytes": worst.memory.reserved_bytes,
            "capacity_bytes": worst.memory.capacity_bytes,
            "memory_bytes_by_rank": [rank.memory.device_bytes for rank in self.ranks],
            "allocated_bytes_by_rank": [rank.memory.allocated_bytes for rank in self.ranks],
            "collectives": [asdict(one) for one in worst.collectives],
            "provenance": {"memory": worst.memory.provenance["allocated_bytes"]},
            **({} if self.rounds is None else {"sync": self.rounds.to_json()}),
        }  # fmt: skip
        if time is not None:
            found |= {
                "step_seconds": time.step_seconds, "low_seconds": time.low_seconds, "high_seconds": time.high_seconds,
                f"{self.unit}_per_second": self.per_second, f"{self.unit}_per_step": self.per_step,
                "binds": time.binds, "breakdown": dict(time.breakdown), "bubble": self.bubble, "phases": dict(time.phases),
                **({"spans": spans} if (spans := self.spans()) else {}),
                "flops_per_step": self.model_flops, **({} if self.joules is None else {"joules_per_step": self.joules}),
                "provenance": {**found["provenance"], "time": time.provenance},
            }  # fmt: skip
        return found


def memory_of(local: Trace, plan: Plan, cluster: Cluster, how: Options) -> MemoryOutcome:
    """Bytes of one rank on its device; communication buffers only where ranks talk."""
    world = plan.mesh.world
    used = cluster if world > 1 else replace(cluster, nodes=1, devices_per_node=1, groups=(), matrix=None)
    extra = overhead(cluster.device, of(local.meta) or TORCH)
    sharing = -(-world // cluster.nodes) if far_apart(cluster) else world
    return predict_memory(local, used, extra, expandable=how.expandable, ranks=sharing)


def memory_of_all(locals_: Sequence[Trace], plan: Plan, cluster: Cluster, how: Options) -> list[MemoryOutcome]:
    """The same of several ranks: in full of the one that needs most and those that may not fit, peaks of the others."""
    extra = overhead(cluster.device, TORCH)
    sizes = sizes_for(cluster, extra)
    beside = extra.context_bytes + extra.nccl_for(cluster)
    capacity = cluster.device.memory_bytes
    peaks = []
    for local in locals_:
        replay = Replay(local, sizes, expandable=how.expandable)
        replay.start()
        for run in run_order(local):
            replay.run(run)
        peaks.append((replay.allocator.peak_reserved, replay.allocator.peak_allocated))
    worst = max(range(len(peaks)), key=lambda number: peaks[number])
    full = memory_of(locals_[worst], plan, cluster, how)
    found = []
    for number, (reserved, allocated) in enumerate(peaks):
        if number == worst:
            found.append(full)
        elif reserved > careful_limit(locals_[number], capacity, beside):
            found.append(memory_of(locals_[number], plan, cluster, how))
        else:
            device = reserved + beside
            verdict = TIGHT if capacity - device < tight_share(locals_[number]) * capacity else FITS
            memory = replace(
                full.memory, allocated_bytes=allocated, reserved_bytes=reserved, device_bytes=device,
                margin_bytes=capacity - device, bands={}, categories={}, holders=(), phases=(),
            )  # fmt: skip
            found.append(MemoryOutcome(verdict, memory))
    return found


# ---------------------------------------------------------------------- what follows from a rank's trace


def collectives(trace: Trace) -> tuple[Collective, ...]:
    """The messages of a steady step, alike ones counted together, in the order they first come."""
    found: dict[tuple[str, str, int, int], int] = {}
    for name, times in trace.schedule.get("steady_step", ()):
        for op in trace.programs[name].ops:
            if op.name in (*COLLECTIVES, SEND, RECEIVE):
                key = (op.name.removeprefix("foretell."), *members(op), message(op))
                found[key] = found.get(key, 0) + times
    return tuple(
        Collective(name=name, axis=axis, ranks=ranks, nbytes=nbytes, times=times)
        for (name, axis, ranks, nbytes), times in found.items()
    )


def members(op: Op) -> tuple[str, int]:
    """Axis and number of ranks of a collective."""
    ranks = next(str(attr).removeprefix("ranks:") for attr in op.attrs if str(attr).startswith("ranks:"))
    return axis_of(op), int(ranks)


def throughput(trace: Trace, plan: Plan) -> tuple[str, int]:
    """Unit and amount of a step, all ranks together."""
    length = sequence_length(trace, plan.micro_batch)
    return ("tokens" if length else "samples"), plan.global_batch * (length or 1)


def sequence_length(trace: Trace, micro_batch: int) -> int | None:
    """Tokens of a sample: the batch's first table of integers with a row for every sample, or None."""
    batch = trace.meta.get("batch", [])
    assert isinstance(batch, list)
    for dtype, *shape in batch:
        if str(dtype).startswith("int") and len(shape) == 2 and shape[0] == micro_batch:
            return int(shape[1])
    return None


def flops_of(trace: Trace, plan: Plan) -> tuple[int, int]:
    """FLOPs of forward and backward on all ranks, and of what is computed again; `trace` has all micro-batches of a step."""
    found = {False: 0, True: 0}
    for name, times in steady(trace):
        for op in trace.programs[name].ops:
            if op.phase != "update":
                found[op.phase == "recompute"] += times * (op.flops or 0)
    ranks = plan.mesh.data * plan.mesh.tp * all_ranks(trace, plan.mesh.cp)
    return round(found[False] * ranks), round(found[True] * ranks)


def notes_of(trace: Trace, plan: Plan) -> Iterable[str]:
    if plan.sync is not None:
        yield changes_training(plan.sync)
    if widening(trace.meta) > 1:
        yield doubt(of(trace.meta))
    if plan.mesh.world > 1:
        yield f"collectives over {plan.mesh.world} ranks are {ASSUMED}: no link was measured"
    if plan.compile != "none" and plan.mesh.spread > 1:
        yield "torch.compile and sharding together follow the rules of each; the two were never measured together"
    missing = trace.ops_without_flop_rule
    if missing:
        yield f"no FLOP rule for {', '.join(missing)}: they count as unknown"
