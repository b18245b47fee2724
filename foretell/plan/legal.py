"""What a plan may say: the one place that knows, with reasons for people and something to try.

Rules about PyTorch are those of its own source (2.11 and 2.13) or were found by running it; docs/plan.md says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from foretell.errors import UserError, near_names
from foretell.plan import blocks as stack
from foretell.plan import legal_axes, paths
from foretell.plan.facts import Complaint, Facts
from foretell.plan.mesh import OWN_RANKS, groups
from foretell.plan.precision import computes_in
from foretell.plan.recipe import known_blocks
from foretell.plan.types import AXES, COMPILES, FLOAT8, LOOPED, MASTER, MODES, PRECISIONS, SCHEDULES, Plan, Split
from foretell.trace.recipe import OPTIMIZERS

if TYPE_CHECKING:
    from foretell.hardware import Cluster

SPLIT_BACKWARD = {"zero-bubble", "zero-bubble-v"}
"""Schedules that compute the gradients of inputs first and those of weights later, in a second pass."""
IN_ROUNDS = {"interleaved-1f1b", "zero-bubble"}
"""Schedules that take micro-batches in equal rounds."""
LIBRARIES = {"cuda": "NCCL", "rocm": "RCCL", "cpu": "gloo", "mps": "none"}
"""Backend → what joins its devices; no group of ranks speaks two of them."""
CLOSE = {"tp": "tensor-parallel", "cp": "context-parallel"}
"""Axes that talk inside every block: on them a boundary between fabrics is refused, not only slow."""


def complaints(plan: Plan, facts: Facts | None = None) -> tuple[Complaint, ...]:
    """Everything that is wrong with a plan; none means that it may be run."""
    facts = facts or Facts()
    if facts.blocks is None:
        facts = replace(facts, blocks=known_blocks(plan))
    wrong = tuple(_amounts(plan))
    if wrong:  # nothing can be computed with these
        return wrong
    rules = (
        _names,
        _ranks,
        _placement,
        _libraries,
        _fabrics,
        _batch,
        _pipeline,
        _micro_batches,
        _split_backward,
        _tensor,
        _shares,
        _sharding,
        _residency,
        _compiled,
    )
    return tuple(complaint for rule in rules for complaint in rule(plan, facts))


def check(plan: Plan, facts: Facts | None = None) -> None:
    """Raise if a plan may not be run: the first complaint as the error, all of them as its detail."""
    found = complaints(plan, facts)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        problem = f"the plan cannot be run: {found[0].field}: {found[0].problem}{more}"
        raise UserError(problem, found[0].remedy, "\n".join(map(str, found)) if more else "")


# --- values ----------------------------------------------------------------------------------------------------------


def _amounts(plan: Plan) -> Iterator[Complaint]:
    for axis in AXES:
        yield from _whole(f"mesh.{axis}", getattr(plan.mesh, axis))
    yield from _whole("micro_batch", plan.micro_batch)
    yield from _whole("accumulate", plan.accumulate)
    yield from _whole("loss_chunks", plan.loss_chunks)
    if not isinstance(plan.reshard, bool):
        yield from _whole("reshard", plan.reshard)
    if plan.clip is not None and not 0 < plan.clip < float("inf"):
        yield Complaint(field="clip", problem=f"is {plan.clip}, not a number above 0", remedy="1.0, or null for none")


def _whole(field: str, value: object) -> Iterator[Complaint]:
    if type(value) is not int or value < 1:
        yield Complaint(field=field, problem=f"is {value!r}, not a whole number above 0", remedy="1")


def _names(plan: Plan, facts: Facts) -> Iterator[Complaint]:
    named: list[tuple[str, str, Iterable[str]]] = [
        ("precision", plan.precision, (*PRECISIONS, FLOAT8, MASTER)),
        ("optimizer", plan.optimizer, OPTIMIZERS),
        ("compile", plan.compile, COMPILES),
        *((_block(pattern), residency.mode, MODES) for pattern, residency in plan.blocks.items()),
    ]
    if plan.pipeline is not None:
        named.append(("pipeline.schedule", plan.pipeline.schedule, SCHEDULES))
    for field, value, known in named:
        if value in known:
            continue
        near = near_names(str(value), known)
        problem, remedy = f"'{value}' is not known", f"{' or '.join(near)}" if near else ", ".join(known)
        yield Complaint(field=field, problem=problem, remedy=remedy)
    dtype = computes_in(plan.precision)
    if facts.dtypes is not None and dtype not in ("float32", *facts.dtypes) and plan.precision != FLOAT8:
        remedy = "fp16-mixed, or fp32" if "float16" in facts.dtypes else "fp32"
        yield Complaint(field="precision", problem=f"the device does not compute in {dtype}", remedy=remedy)


# --- ranks and samples -----------------------------------------------------------------------------------------------


def _ranks(plan: Plan, facts: Facts) -> Iterator[Complaint]:
    world = plan.mesh.world
    shape = " × ".join(f"{axis} {getattr(plan.mesh, axis)}" for axis in OWN_RANKS if getattr(plan.mesh, axis) > 1)
    if facts.devices is not None and world > facts.devices:
        left = facts.devices * plan.mesh.data // world
        yield Complaint(
            field="mesh",
            problem=f"{shape} makes {_counted(world, 'rank')} and there {'is' if facts.devices == 1 else 'are'} {_counted(facts.devices, 'device')}",
            remedy=f"dp_replicate × dp_shard {left} instead of {plan.mesh.data}" if left else "a smaller pp or tp",
        )
    if facts.world is not None and world != facts.world:
        yield Complaint(
            field="mesh",
            problem=f"{shape or 'one rank'} makes {_counted(world, 'process')} and {_counted(facts.world, 'process')} started",
            remedy=launch(plan, facts.devices_per_node),
        )


def _placement(plan: Plan, facts: Facts) -> Iterator[Complaint]:
    world = plan.mesh.world
    if plan.placement and sorted(plan.placement) != list(range(world)):
        problem = f"it does not name each of the {_counted(world, 'device')} 0 to {world - 1} once"
        yield Complaint(field="placement", problem=problem, remedy="no placement, or one device for each rank")


def _devices_used(plan: Plan, facts: Facts) -> Cluster | None:
    """The cluster, where its groups matter to the plan."""
    cluster, world = facts.cluster, plan.mesh.world
    if cluster is None or world == 1 or world > cluster.count or any(_placement(plan, facts)):
        return None
    return cluster


def _libraries(plan: Plan, facts: Facts) -> Iterator[Complaint]:
    """All ranks of a plan are one process group: one library must reach them all."""
    cluster = _devices_used(plan, facts)
    if cluster is None:
        return
    counts: dict[str, int] = {}
    for rank in range(plan.mesh.world):
        device = cluster.part_of(plan.device_of(rank)).device
        counts[device.backend] = counts.get(device.backend, 0) + 1
    if len(counts) > 1:
        each = " and ".join(f"{_counted(number, 'rank')} of {LIBRARIES[name]}" for name, number in counts.items())
        most = max(counts, key=lambda name: counts[name])
        yield Complaint(
            field="mesh",
            problem=f"{each} cannot be one group: no library speaks to both",
            remedy=f"at most {_counted(counts[most], 'rank')}, all on {most} devices",
        )


def _fabrics(plan: Plan, facts: Facts) -> Iterator[Complaint]:
    """Groups of ranks that lie on two sides of a boundary between fabrics."""
    cluster = _devices_used(plan, facts)
    if cluster is None:
        return
    for axis in OWN_RANKS:
        if getattr(plan.mesh, axis) == 1 or (axis not in CLOSE and cluster.inter is not None):
            continue
        for group in groups(plan.mesh, axis):
            why = cluster.boundary(plan.device_of(rank) for rank in group)
            if why:
                among = CLOSE.get(axis, axis)
                yield Complaint(
                    field=f"mesh.{axis}",
                    problem=f"{among} ranks {group[0]} to {group[-1]} lie on both sides of a boundary: {why}",
                    remedy=_inside(axis, plan, cluster),
                )
                break


def _inside(axis: str, plan: Plan, cluster: Cluster) -> str:
    """The largest degree that no boundary splits."""
    degree = getattr(plan.mesh, axis)
    for less in range(degree - 1, 1, -1):
        smaller = replace(plan.mesh, **{axis: less, "dp_replicate": plan.mesh.dp_replicate * (degree // less)})
        whole = degree % less == 0 and not plan.placement
        if whole and not any(cluster.boundary(group) for group in groups(smaller, axis)):
            return f"{axis} {less} with dp_replicate {smaller.dp_replicate}"
    return f"{axis} 1, or pp between the groups"


def launch(plan: Plan, per_node: int | None = None, what: str = "run PLAN") -> str:
    """The command that starts as many processes as the plan has ranks; on each node where that takes several."""
    world = plan.mesh.world
    if world == 1:
        return f"foretell {what}"
    nodes = -(-world // per_node) if per_node else 1
    while world % nodes:
        nodes += 1
    several = f"--nnodes {nodes} " if nodes > 1 else ""
    return f"torchrun {several}--nproc-per-node {world // nodes} -m foretell {what}"


def _batch(plan: Plan, facts: Facts) -> Iterator[Complaint]:
    wanted, have = facts.global_batch, plan.global_batch
    if wanted is None or wanted == have:
        return
    once = plan.micro_batch * plan.mesh.data
    if wanted % once == 0:
        remedy = f"accumulate {wanted // once}"
    elif wanted % plan.mesh.data == 0:
        each = wanted // plan.mesh.data
        micro = max(size for size in range(1, plan.micro_batch + 1) if each % size == 0)
        remedy = f"micro_batch {micro} and accumulate {each // micro}"
    else:
        remedy = f"a global batch that {plan.mesh.data} data ranks divide"
    yield Complaint(
        field="accumulate",
        problem=f"micro_batch {plan.micro_batch} × accumulate {plan.accumulate} × {_counted(plan.mesh.data, 'data rank')}"
        f" makes {have} samples a step, not {wanted}",
        remedy=remedy,
    )


# --- pipelines -------------------------------------------------------------------------------------------------------


def _pipeline(plan: Plan, facts: Facts) -> Iterator[Complaint]:
    ranks, pipeline = plan.mesh.pp, plan.pipeline
    if pipeline is None or not pipeline.cuts:
        if ranks > 1:
            yield Complaint(
                field="pipeline",
                problem=f"mesh.pp is {ranks} and no cut says where a stage begins",
                remedy=_cuts(ranks, facts),
            )
        return
    if ranks == 1:
        problem = f"there are {pipeline.stages} stages and mesh.pp is 1"
        yield Complaint(field="pipeline", problem=problem, remedy="no pipeline, or a larger pp")
        return
    wanted = stages_allowed(pipeline.schedule, ranks)
    if wanted is not None and not wanted[0](pipeline.stages):
        yield Complaint(
            field="pipeline.cuts",
            problem=f"{len(pipeline.cuts)} cuts make {pipeline.stages} stages, and {pipeline.schedule} on {ranks} ranks wants {wanted[1]}",
            remedy=_cuts(wanted[2], facts),
        )
    yield from _cut_places(plan, facts)


def stages_allowed(schedule: str, ranks: int) -> tuple[Callable[[int], bool], str, int] | None:
    """Which numbers of stages a schedule takes, in words, and the least of them; None for an unknown schedule."""
    if schedule not in SCHEDULES:
        return None
    if schedule == "zero-bubble-v":
        return lambda stages: stages == 2 * ranks, f"two a rank, {2 * ranks}", 2 * ranks
    if schedule in LOOPED:
        return lambda stages: stages > 0 and stages % ranks == 0, f"a multiple of {ranks}", ranks
    return lambda stages: stages == ranks, f"one a rank, {ranks}", ranks


def _cut_places(plan: Plan, facts: Facts) -> Iterator[Complaint]:
    assert plan.pipeline is not None
    cuts, known = plan.pipeline.cuts, facts.blocks
    twice = sorted({cut for cut in cuts if cuts.count(cut) > 1})
    if twice:
        yield Complaint(field="pipeline.cuts", problem=f"{twice[0]} is cut twice", remedy="each cut at another block")
    if known is None:
        return
    missing = [cut for cut in cuts if cut not in known]
    if missing:
        near = near_names(missing[0], known)
        remedy = " or ".join(near) if near else f"a block: {', '.join(paths.fold_names(known)) or 'the model has none'}"
        yield Complaint(field="pipeline.cuts", problem=f"'{missing[0]}' is no block of the model", remedy=remedy)
        return
    places = [known.index(cut) for cut in cuts]
    if places != sorted(places):
        ordered = ", ".join(known[place] for place in sorted(set(places)))
        yield Complaint(field="pipeline.cuts", problem="they are not in the order the blocks run", remedy=ordered)
    if known[0] in cuts:
        problem = f"{known[0]} is the first block, so that the first stage would have none"
        yield Complaint(field="pipeline.cuts", problem=problem, remedy=_cuts(plan.pipeline.stages, facts))


def _cuts(stages: int, facts: Facts) -> str:
    if facts.blocks is None:
        return f"{stages - 1} cuts, each the block that begins a stage"
    if not facts.blocks:
        return "pp 1: the model has no repeated blocks to cut at"
    if len(facts.blocks) < stages:
        return f"at most {len(facts.blocks)} stages: the model has as many blocks"
    return f"cuts {', '.join(stack.even_cuts(facts.blocks, stages))}"


def micro_batches_allowed(schedule: str, ranks: int, micro_batches: int) -> bool:
    """Whether torch's schedule takes so many micro-batches: 1F1B at least one a stage, rounds of equal length."""
    if schedule == "1f1b":
        return micro_batches >= ranks
    if schedule in IN_ROUNDS:
        return micro_batches % max(1, micro_batches // ranks) == 0
    return micro_batches >= 1


def _micro_batches(plan: Plan, facts: Facts) -> Iterator[Complaint]:
    if plan.pipeline is None or plan.mesh.pp == 1:
        return
    schedule, ranks, have = plan.pipeline.schedule, plan.mesh.pp, plan.accumulate
    if micro_batches_allowed(schedule, ranks, have):
        return
    if schedule == "1f1b":
        problem = f"1f1b on {ranks} ranks wants at least {ranks} micro-batches and gets {have}"
        yield Complaint(field="accumulate", problem=problem, remedy=f"accumulate {ranks}, or the schedule gpipe")
        return
    fewer = next(less for less in range(have, 0, -1) if micro_batches_allowed(schedule, ranks, less))
    more = next(many for many in count(have) if micro_batches_allowed(schedule, ranks, many))
    yield Complaint(
        field="accumulate",
        problem=f"{schedule} on {ranks} ranks takes micro-batches in {have // ranks} rounds, and {have} do not make equal ones",
        remedy=f"accumulate {fewer} or {more}",
    )


def _split_backward(plan: Plan, facts: Facts) -> Iterator[Complaint]:
    """What a backward in two passes cannot do."""
    if plan.pipeline is None or plan.pipeline.schedule not in SPLIT_BACKWARD or plan.mesh.pp == 1:
        return
    schedule = plan.pipeline.schedule
    if plan.compile != "none":
        problem = f"{schedule} goes through a block's backward twice, which compiled blocks do not allow"
        yield Complaint(field="compile", problem=problem, remedy="compile none, or the schedule interleaved-1f1b")
    for pattern, residency in plan.blocks.items():
        if residency.mode == "selective":
            problem = f"{schedule} goes through a block's backward twice, which selective recompute does not allow"
        elif residency.mode == "recompute":
            problem = f"{schedule} takes a block's backward apart, and torch computes the whole block again for every part"
        else:
            continue
        yield Complaint(field=_block(pattern), problem=problem, remedy="keep, or the schedule interleaved-1f1b")
    if plan.mesh.spread > 1 and plan.reshard is not False:
        problem = f"under {schedule}, parameters given back after forward get no gradients"
        yield Complaint(field="reshard", problem=problem, remedy="reshard false")
    yield from _tied_in_a_stage(plan, facts)


def _tied_in_a_stage(plan: Plan, facts: Facts) -> Iterator[Complaint]:
    """A weight that one stage uses twice; the first stage does its backward in one pass, and may."""
    if facts.blocks is None or not facts.tied or any(_cut_places(plan, facts)):
        return
    assert plan.pipeline is not None
    for stage, blocks in enumerate(stack.stages_of(plan, facts.blocks)):
        for group in facts.tied if stage else ():
            inside = [name for name in group if any(name == block or name.startswith(f"{block}.") for block in blocks)]
            if len(inside) > 1:
                yield Complaint(
                    field="pipeline.schedule",
                    problem=f"{' and '.join(inside[:2])} are one tensor that stage {stage} uses twice, which {plan.pipeline.schedule} does not allow",
                    remedy="interleaved-1f1b or 1f1b",
                )


# --- tensors, shards, blocks -----------------------------------------------------------------------------------------


def _tensor(plan: Plan, facts: Facts) -> Iterator[Complaint]:
    degree = plan.mesh.tp
    if degree == 1:
        return
    for what, number in (("attention heads", facts.heads), ("key-value heads", facts.kv_heads)):
        if number is not None and number % degree:
            yield Complaint(
                field="mesh.tp",
                problem=f"{number} {what} cannot be split over {degree} ranks",
                remedy=_divisor(degree, facts),
            )
    if (plan.split or Split()).sequence and facts.seq is not None and facts.seq % degree:
        yield Complaint(
            field="split.sequence",
            problem=f"{facts.seq} tokens cannot be split evenly over {degree} ranks",
            remedy=f"a sequence of {facts.seq // degree * degree or degree} tokens, or split.sequence false",
        )


def _shares(plan: Plan, facts: Facts) -> Iterator[Complaint]:
    for field, problem, remedy in (
        *legal_axes.context(plan, facts.seq), *legal_axes.experts(plan), *legal_axes.float8(plan, facts.dtypes),
        *legal_axes.states(plan, facts.blocks), *legal_axes.activations(plan), *legal_axes.adapters(plan),
        *legal_axes.loss_chunks(plan), *legal_axes.kernels(plan), *legal_axes.sync(plan),
    ):  # fmt: skip
        yield Complaint(field=field, problem=problem, remedy=remedy)


def _divisor(degree: int, facts: Facts) -> str:
    heads = [number for number in (facts.heads, facts.kv_heads) if number is not None]
    return f"tp {max(less for less in range(1, degree) if all(number % less == 0 for number in heads))}"


def _sharding(plan: Plan, facts: Facts) -> Iterator[Complaint]:
    shards = plan.mesh.dp_shard * plan.mesh.cp
    if not isinstance(plan.reshard, bool) and shards % plan.reshard:
        axes = "dp_shard" if plan.mesh.cp == 1 else "dp_shard × cp"
        yield Complaint(
            field="reshard",
            problem=f"{plan.reshard} is no divisor of {axes}, which is {shards}",
            remedy="true, false, or a divisor",
        )


def _residency(plan: Plan, facts: Facts) -> Iterator[Complaint]:
    if facts.blocks is None:
        return
    folded = ", ".join(paths.fold_names(facts.blocks))
    for pattern in plan.blocks:
        unknown = stack.strangers(pattern, facts.blocks)
        if unknown:
            yield Complaint(
                field=_block(pattern),
                problem=f"{', '.join(unknown)} is no block of the model",
                remedy=f"within {folded}" if folded else "no residency: the model has no repeated blocks",
            )
    if plan.compile == "blocks" and not facts.blocks:
        yield Complaint(field="compile", problem="the model has no repeated blocks to compile", remedy="compile model")
    clash = stack.ambiguous(plan.blocks, facts.blocks)
    if clash:
        yield Complaint(
            field=_block(clash[1]),
            problem=f"it wants a block otherwise than {clash[0]}, and neither names fewer blocks",
            remedy="one residency for each block",
        )


def _compiled(plan: Plan, facts: Facts) -> Iterator[Complaint]:
    """What torch.compile cannot look through, and devices that it has no code for."""
    if plan.compile != "none" and facts.too_old:
        problem = f"is {plan.compile}, and the device's compute capability is below 7.0, which Triton needs"
        yield Complaint(field="compile", problem=problem, remedy="compile none")
    if plan.compile == "graphs" and plan.mesh.world > 1:
        problem = f"is graphs and the plan has {plan.mesh.world} ranks: launches are recorded on one device only"
        yield Complaint(field="compile", problem=problem, remedy="compile blocks, or model")
    if plan.compile == "graphs" and plan.accumulate > 1:
        problem = f"is graphs and accumulate is {plan.accumulate}: that gradients add up right over replays is not proven"
        yield Complaint(field="compile", problem=problem, remedy="compile model, or accumulate 1 with a larger micro_batch")
    if plan.compile == "model" and plan.mesh.pp > 1:
        problem = "a stage of a pipeline ends in the middle of forward, and cannot be compiled as a whole"
        yield Complaint(field="compile", problem=problem, remedy="compile blocks, or none")
    if plan.compile == "model" and plan.mesh.tp > 1:
        problem = (
            f"is model and mesh.tp is {plan.mesh.tp}: only blocks are compiled where every rank has a part of a tensor"
        )
        yield Complaint(field="compile", problem=problem, remedy="compile blocks, or none")


def _block(pattern: str) -> str:
    return f"blocks['{pattern}']"


def _counted(number: int, what: str) -> str:
    plural = f"{what}es" if what.endswith("s") else f"{what}s"
    return f"{number} {what if number == 1 else plural}"
