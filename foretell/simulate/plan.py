"""What a plan costs: bytes on every rank, collectives with their bytes, seconds of a step. Plain data, no torch.

A plan is costed from traces of one device; nothing is traced here, so that thousands of plans take seconds.

    traces of one device, one for each residency (keep, recompute, selective)        trace.capture
      │   with tensor parallelism: of one rank's part, traced under a fake process group (search.traces)
      ▼ compose     every block its own residency                                    lower.blocks
      ▼ repeated    so many micro-batches a step                                     lower.steps
      ▼ compile     blocks or the whole model                                        trace.compiled
      ▼ cut         pipeline: the ops of each stage, what it receives and sends      lower.pipeline
      ▼ shard       dp_shard and dp_replicate: gather, scatter, sum                  lower.fsdp
      ▼ join        replicas that step alone: a round every so many steps            lower.sync
      ▼ arrange     pipeline: the schedule's events, micro-batches in flight         lower.pipeline
      one trace for each rank of the pipeline
      ├─► memory: replayed through the caching allocator; the worst rank decides     memory
      └─► time: every op on its stream; with a pipeline, ranks wait for each other   price, time, pipeline

Every arrow is a function Trace → Trace, in the order in which `runtime` applies the same things to the real model.
Ranks along dp_replicate, dp_shard and tp hold the same number of bytes, but for uneven rows: rank 0 has the largest
shards and stands for all. Ranks along pp differ, and each is costed.

What is exact, in tests, against PyTorch's own dry run with a fake process group: bytes kept, the highest point of each
phase, and the list of collectives with their bytes, for fully_shard (any reshard policy, replicas, precision). What is
not: buffers of the communication library beside the allocator (a constant, from `overheads.toml`), and time, which
for several devices is "assumed" until links are measured.

Mesh axes lie as in `plan.types.AXES`: tp innermost, so its groups are side by side; pp outermost. Which links a group
uses follows from that (`collectives.fabric` with a stride).

A CPU is a machine with other values: its tensors are live bytes (there is no caching allocator) plus a process, against
RAM that all ranks share (memory); its seconds come from its profile, with cores shared by the ranks (speeds).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from foretell.errors import UserError
from foretell.hardware.types import Cluster
from foretell.lower.blocks import KEEP, blocks_of, compose
from foretell.lower.compiling import compiled
from foretell.lower.expert import experts_of, experts_sharded
from foretell.lower.fsdp.sharded import shard
from foretell.lower.offload import activations, states
from foretell.lower.spread import spread, spread_of
from foretell.lower.steps import whole_step
from foretell.lower.sync import joined
from foretell.plan.blocks import expand
from foretell.plan.default import default_plan, mode_of
from foretell.plan.precision import MIXED
from foretell.plan.types import FLOAT8, MASTER, Plan, computed
from foretell.price import offload
from foretell.price.energy import load_of
from foretell.price.heterogeneous import slowest_seen, smallest_seen
from foretell.price.machine import machine
from foretell.price.speeds import Options, alone, profile_for, speeds_of
from foretell.quantities import Memory, Time
from foretell.simulate.parts import (
    Collective,
    PlanCost,
    RankCost,
    collectives,
    flops_of,
    memory_of,
    notes_of,
    throughput,
)
from foretell.simulate.sync import averaged, round_cost
from foretell.simulate.time.step import moved_time, plan_time
from foretell.simulate.time.streams import Timeline
from foretell.trace.recipe import Recipe
from foretell.trace.types import Trace

__all__ = ["KEEP", "Collective", "Options", "PlanCost", "RankCost", "collectives", "predict_plan", "predict_step"]


def predict_plan(
    trace: Trace | Mapping[str, Trace], plan: Plan, cluster: Cluster, options: Options | None = None
) -> PlanCost:
    """What every rank of a plan allocates and sends, and how long a step takes.

    `trace` is one device's step at the plan's micro-batch and precision, with tp > 1 that of one rank's part; where
    blocks differ in residency, one trace for each: keep, recompute, selective.
    """
    how = options or Options()
    found = _predicted(trace, plan, cluster, how)
    return replace(found, watts=_watts(found, cluster, how))


def _predicted(trace: Trace | Mapping[str, Trace], plan: Plan, cluster: Cluster, how: Options) -> PlanCost:
    traces = trace if isinstance(trace, Mapping) else {KEEP: trace}
    _check(plan, cluster)
    mixed = composed(traces, plan)
    _check_trace(mixed, plan)
    if plan.mesh.pp > 1:
        from foretell.simulate.pipeline import predict_pipeline

        found = predict_pipeline(mixed, plan, cluster, how)
        return found if plan.compile == "none" else _quickened(found, mixed, cluster, how)
    whole = whole_step(mixed, plan.accumulate)
    local = sharded(compiled(whole, plan.compile), plan)
    beside = activations.host_bytes(local, plan) if activations.moves(plan) else 0
    if beside:
        local = activations.away(local, plan)
    local = joined(local, plan) if plan.sync is not None else local
    time, timeline, rank = (_moved if plan.offloads else _cost)(local, plan, cluster, how)
    rounds = round_cost(local, plan, speeds_of(plan, cluster, how), time) if plan.sync is not None else None
    time = averaged(time, rounds) if time is not None and rounds is not None else time
    rank = replace(rank, memory=replace(rank.memory, host_bytes=rank.memory.host_bytes + beside))
    unit, per_step = throughput(mixed, plan)
    flops, again = flops_of(whole, plan)
    return PlanCost(
        plan=plan, ranks=(rank,), time=time, unit=unit, per_step=per_step, model_flops=flops, recompute_flops=again,
        notes=tuple(notes_of(local, plan)), programs=(local,), timeline=timeline, rounds=rounds,
    )  # fmt: skip


def predict_step(trace: Trace, recipe: Recipe, cluster: Cluster, options: Options | None = None, *, micro_batch: int = 1) -> PlanCost:
    """What a recipe's own plan costs, from one trace of it; `trace` has one micro-batch, or all of them where it says so."""
    blocks = blocks_of(trace)
    plan = default_plan(recipe, {}, cluster.device.name, micro_batch=micro_batch, blocks=blocks)
    return predict_plan({mode_of(recipe) if blocks else KEEP: trace}, plan, cluster, options)


def _watts(cost: PlanCost, cluster: Cluster, how: Options) -> float | None:
    """Of a device, on average over what the ranks of the pipeline axis run, each on devices of its own kind."""
    found, time = [], cost.time
    for index, local in enumerate(cost.programs):
        part = cluster.part_of(index * cost.plan.mesh.world // len(cost.programs)) if cluster.groups else cluster
        known = machine(part.device, profile_for(part, how.profile_of))
        if time is None or known is None or known.power is None:
            return None
        found.append(known.power.watts(load_of(local, part.device, time.step_seconds, time.device_seconds)))
    return sum(found) / len(found) if found else None


def _quickened(found: PlanCost, mixed: Trace, cluster: Cluster, how: Options) -> PlanCost:
    """A pipeline of compiled blocks: as much quicker as the same micro-batch on one device."""
    known = machine(cluster.device, profile_for(cluster, how.profile_of))
    if found.time is None or known is None or cluster.device.backend == "cpu":
        return found
    plain, quick = (plan_time(compiled(mixed, way), alone(known))[0].step_seconds for way in ("none", "model"))
    share = min(1.0, quick / plain)
    time = found.time
    return replace(
        found,
        time=replace(
            time, step_seconds=time.step_seconds * share, low_seconds=time.low_seconds * share,
            high_seconds=time.high_seconds * share,
            breakdown={name: value * share for name, value in time.breakdown.items()},
        ),
        notes=(*found.notes, "compiled stages are taken to be as much quicker as the whole step on one device"),
    )  # fmt: skip


def _cost(local: Trace, plan: Plan, cluster: Cluster, how: Options) -> tuple[Time | None, Timeline | None, RankCost]:
    outcome = memory_of(local, plan, smallest_seen(plan, cluster), how)
    speeds = speeds_of(plan, cluster, how)
    time, timeline = plan_time(local, speeds) if speeds is not None and speeds.copies_priced(local) else (None, None)
    return time, timeline, _rank(local, outcome.verdict, outcome.memory, time)


def _moved(local: Trace, plan: Plan, cluster: Cluster, how: Options) -> tuple[Time | None, Timeline | None, RankCost]:
    """The same where optimizer states are elsewhere, and perhaps weights."""
    changed, units = states.moved(local, plan), states.units_of(local, plan)
    outcome = memory_of(changed, plan, smallest_seen(plan, cluster), how)
    steady = next((phase.host_bytes for phase in outcome.memory.phases if phase.name == "steady_step"), outcome.memory.host_bytes)
    memory = replace(outcome.memory, host_bytes=steady + states.host_bytes(local, plan))
    slow, speeds = slowest_seen(plan, cluster), speeds_of(plan, cluster, how)
    profile = profile_for(slow, how.profile_of)
    rates = offload.rates(profile, slow.device, offload.neighbours(plan.mesh, slow)) if profile is not None else None
    priced = rates is not None and offload.priced(units, plan, rates) and speeds is not None and speeds.copies_priced(local)
    time, timeline = moved_time(changed, plan, speeds, units, rates) if priced and speeds and rates else (None, None)
    return time, timeline, _rank(local, outcome.verdict, memory, time)


def _rank(local: Trace, verdict: str, memory: Memory, time: Time | None) -> RankCost:
    return RankCost(
        rank=0, stages=(0,), verdict=verdict, memory=memory, collectives=collectives(local),
        seconds=time.step_seconds if time else None,
    )  # fmt: skip


def _check(plan: Plan, cluster: Cluster) -> None:
    if plan.mesh.world > cluster.count and cluster.device.backend != "cpu":
        raise UserError(
            f"the plan has {plan.mesh.world} ranks and {cluster.device.name} is there {cluster.count} times",
            "give more devices, or a smaller mesh",
        )
    if plan.precision == FLOAT8:
        raise UserError("the plan has precision float8, which cannot be predicted yet", "use bf16-mixed")
    if plan.offloads and cluster.device.backend == "cpu":
        raise UserError("the plan moves optimizer states, which is not predicted where host and device are one", "leave out states")
    if activations.moves(plan) and cluster.device.backend == "cpu":
        raise UserError("the plan moves activations, which is not predicted where host and device are one", "keep them")
    if plan.mesh.ep > 1 and plan.mesh.pp > 1:
        raise UserError(f"the plan has ep {plan.mesh.ep} and pp {plan.mesh.pp}, which cannot be predicted together yet", "use pp 1")


def _check_trace(trace: Trace, plan: Plan) -> None:
    """A trace of whole samples, or of all experts, says nothing of ranks that share them."""
    for axis in ("cp", "ep"):
        known, asked = trace.meta.get(axis, 1), getattr(plan.mesh, axis)
        if known != asked:
            raise UserError(f"the plan has {axis} {asked} and the trace is of a rank with {axis} {known}", f"trace it with {axis} {asked}")


# ---------------------------------------------------------------------- one device to one rank


def modes_of(plan: Plan, blocks: Sequence[str]) -> dict[str, str]:
    """Block → its residency, one of `plan.types.MODES`."""
    return {block: residency.mode for block, residency in expand(plan.blocks, blocks).items()}


def composed(traces: Mapping[str, Trace], plan: Plan) -> Trace:
    """One trace in which every block has its residency; what is moved is computed as it says."""
    traces = {computed(mode): trace for mode, trace in traces.items()}
    any_trace = next(iter(traces.values()))
    modes = {block: computed(mode) for block, mode in modes_of(plan, blocks_of(any_trace)).items()}
    wanted = set(modes.values()) or {KEEP}
    if len(wanted) == 1 and wanted <= traces.keys():
        return traces[wanted.pop()]
    missing = {KEEP, *wanted} - traces.keys()
    if missing:
        raise UserError(f"no trace of residency {', '.join(sorted(missing))} is given", "trace each residency the plan has")
    return compose(traces, modes)


def sharded(trace: Trace, plan: Plan) -> Trace:
    """With what fully_shard does over the data axes, and over that of positions."""
    mesh, own = plan.together, spread_of(trace)
    if own is not None:
        return spread(trace, own)
    if mesh.spread == 1:
        return trace if plan.mesh.world == 1 else replace(trace, meta={**trace.meta, "ranks": plan.mesh.world})
    reduce = "float32" if plan.precision in (*MIXED, MASTER) else None
    left: list[str] = []
    if mesh.ep > 1:
        trace, left = experts_sharded(trace, plan, reduce), experts_of(trace)
    ranks = mesh.dp_shard * mesh.cp
    return shard(trace, ranks, replicate=mesh.dp_replicate, reshard=plan.reshard, reduce=reduce, left=left)
