"""Seconds of a step of other training software, from short stacks of the model: the same lowering, prices and timeline.

    two short stacks ──fuse, 8 bits──► program of a rank ──tasks──► simulate ──► seconds of each piece ──extend──► the step
                                                                                 forward, backward, update

A uniform stack costs so much more for each further layer and micro-batch. With fully sharded parameters whole steps are
simulated, since gathers run beside compute; otherwise forward, backward and update each, and a pipeline plays them in its
schedule's order. What differs between stacks is data (`stacks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.foreign import attention, float8, zero
from benchmarks.foreign.plan import REPLICAS, ForeignPlan
from benchmarks.foreign.schedule import StageSeconds, partition, run_through
from benchmarks.foreign.stacks import ALTERNATE, ATTENTION, EARLY, LAYERS, PRODUCTS_ALONE
from foretell.errors import UserError
from foretell.hardware.types import Cluster, Device
from foretell.lower.compiling import compiled
from foretell.lower.steps import FIRST, NEXT, repeated
from foretell.price.analytic import FAMILIES, family
from foretell.price.network.collectives import ALL_TO_ALL, P2P, Fabric, collective, fabric, reached
from foretell.price.network.overlap import slower
from foretell.price.speeds import Options, Speeds, axis_of, comm_time_over, fabrics_of, speeds_of
from foretell.price.time import Reprice
from foretell.quantities import Task
from foretell.simulate.time.step import drags, step_tasks, tasks_of
from foretell.simulate.time.streams import simulate
from foretell.trace.types import Op, Program, Trace

_DATA_SHARD = "dp_shard"
_LATE = ("backward", "recompute")
_LOSS = ("aten._log_softmax", "aten.nll_loss", "aten._to_copy")
PRODUCTS = ("aten.mm.default", "aten.addmm.default")


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """A step of other software."""

    seconds: float
    bubble: float = 0.0
    exposed_seconds: float = 0.0
    """Gradients and parameters that travel while nothing is computed."""
    notes: tuple[str, ...] = ()


def predict_foreign(traces: Mapping[int, Trace], how: ForeignPlan, cluster: Cluster, options: Options) -> StepCost:
    """Seconds of a step; `traces` are of one rank's micro-batch, by the depth of the stack."""
    speeds = _speeds(how, cluster, options)
    notes = (how.mark,) if how.mark else ()
    if how.sharded_units and how.plan.mesh.pp == 1:
        return StepCost(seconds=_sharded_step(traces, how, speeds), notes=notes)
    pieces = _pieces(traces[min(traces)], how, cluster, speeds)
    if how.layer_alone:
        return StepCost(seconds=pieces.layer.total * how.layers, notes=notes)
    if how.plan.mesh.pp == 1:
        micros = how.plan.accumulate
        seconds = pieces.stage(how.layers, first=True, last=True).total * micros + pieces.after(how.layers, True, True)
        return StepCost(seconds=seconds, exposed_seconds=pieces.exposed(how.layers, True, True), notes=notes)
    return replace(_pipeline(pieces, how, cluster), notes=notes)


# ---------------------------------------------------------------- prices


def _speeds(how: ForeignPlan, cluster: Cluster, options: Options) -> Speeds:
    found = speeds_of(how.plan, cluster, options)
    if found is None:
        raise UserError(f"nothing is known of the speed of {cluster.device.name}", "measure it with `foretell probe`")
    fabrics = fabrics_of(how.plan.mesh, cluster)
    if zero.DATA_BESIDE in fabrics:
        fabrics[zero.DATA] = fabrics[zero.DATA_BESIDE]
    plain = comm_time_over(fabrics)
    shown = 1 - (max(how.stack.hidden, 0.5) if how.hides_tensor else how.stack.hidden)

    def comm_time(op: Op) -> float:
        axis = axis_of(op)
        seconds = plain(op)
        if axis == _DATA_SHARD and how.narrow_gathers and op.name.endswith("all_gather"):
            seconds /= 2
        if axis == "tp" and how.float8 and how.stack.narrow_tensor and op.name.endswith("all_gather"):
            seconds /= 2
        if axis == "tp" and how.stack.hides_backward and op.phase == "backward" and op.name.endswith(("all_reduce", "reduce_scatter")):
            beside = slower("gemm", USUAL_WAVES)
            seconds *= beside / (1 + beside)  # what the product beside it takes longer
        return seconds * shown if axis == "tp" else seconds

    data = fabrics.get(_DATA_SHARD) or fabrics.get(zero.DATA_BESIDE)
    drag = network_drag(data) if data is not None and data.local == 1 else 1.0
    waits = how.stack.fit("blocking_seconds", 0.0) if how.stack.blocking else 0.0
    return replace(found, comm_time=comm_time, reprice=repriced(how, cluster.device), drag=drag, each_longer=waits)


def repriced(how: ForeignPlan, device: Device) -> Reprice:
    """Seconds of an op in this software, from those in PyTorch. An attention kernel that reaches less of the peak than products do draws as
    much less of the watts that products add."""
    stack = how.stack
    moved = stack.fit("memory_bound", 1.0)
    narrow = _narrow_rate(how, device)
    cp = how.plan.mesh.cp
    share = cp / (2 * cp - 1) if stack.balanced else 1.0
    ring = 1 + stack.fit("ring_loss", 0.0) * (cp - 1)

    def seconds(op: Op, family: str, found: float) -> tuple[float, float]:
        heat = 1.0
        if not found:
            return 0.0, heat
        if family == "attention":
            heat = attention.heat(stack.kernel, device, backward="backward" in op.name) if stack.kernel else heat
            found = attention_seconds(op, stack.kernel, device) if stack.kernel else found * share
            found *= ring
        elif family == "gemm":
            found = found / narrow if float8.MARK in op.attrs else found
        elif op.phase != "update":
            found *= stack.loss if of_loss(op) else moved
        return found, heat

    return seconds


def of_loss(op: Op) -> bool:
    """Whether an op is the loss's own."""
    return not op.module and op.name.startswith(_LOSS)


def _narrow_rate(how: ForeignPlan, device: Device) -> float:
    """How many times faster 8-bit products are than 16-bit ones."""
    if not how.float8:
        return 1.0
    kin = FAMILIES[family(device)]
    peaks = device.peak_flops_per_second
    wide = peaks.get("bfloat16") or peaks.get("float16") or 1.0
    eight = next((rate for name, rate in peaks.items() if "float8" in name), wide)
    return max(1.0, eight * kin.product8 / (wide * kin.product) * float8.RECIPES[how.float8].rate)


def attention_seconds(op: Op, kernel: str, device: Device) -> float:
    """A fused attention by a named kernel, whichever PyTorch would have picked. Of ranks that share positions, one with
    an equal share of the causal half."""
    backward = "backward" in op.name
    first = 1 if backward else 0
    batch, heads, queries, size = op.inputs[first].spec.shape
    keys = op.inputs[first + 1].spec.shape[2]
    return attention.seconds_of(
        batch=batch, heads=heads, queries=queries, keys=keys, head_dim=size, device=device, kernel=kernel,
        causal=True in op.attrs, backward=backward,
    )  # fmt: skip


# ---------------------------------------------------------------- fully sharded parameters: whole steps


def _sharded_step(traces: Mapping[int, Trace], how: ForeignPlan, speeds: Speeds) -> float:
    """Bilinear in layers and micro-batches."""
    micros = how.plan.accumulate
    few = (1,) if micros == 1 else (1, 2)
    found = {(depth, count): _whole_step(trace, count, how, speeds) for depth, trace in traces.items() for count in few}
    by_micros = {count: line({depth: found[depth, count] for depth in traces}, how.layers) for count in few}
    return line(by_micros, micros)


def line(points: Mapping[int, float], place: int) -> float:
    """The value at a place on the line through two points; of a single one, its own."""
    (one, first), *others = sorted(points.items())
    if not others:
        return first
    two, second = others[-1]
    return first + (second - first) / (two - one) * (place - one)


def _whole_step(trace: Trace, micros: int, how: ForeignPlan, speeds: Speeds) -> float:
    fused = _ready(trace, micros, how)
    tasks = step_tasks(zero.sharded(fused, how), speeds)
    seconds = simulate(tasks, steps=2, drag=drags(tasks, speeds)).seconds
    return seconds + micros * sum(recomputed(fused, how, speeds).values()) * len(_blocks(trace))


def _ready(trace: Trace, micros: int, how: ForeignPlan) -> Trace:
    """Several micro-batches with the software's own kernels; the same for rows that differ in mesh and device alone."""
    key = (id(trace), micros, how.stack.compile, how.stack.spelled, how.stack.fused_keys, how.float8)
    if key not in _KNOWN:
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[key] = trace, float8.with_float8(fused_trace(repeated(trace, micros), how), how.float8)
    return _KNOWN[key][1]


_KNOWN: dict[tuple[object, ...], tuple[Trace, Trace]] = {}
"""By the identity of the trace, which is kept so that no other takes its place."""
_MOST_KNOWN = 256


def fused_trace(trace: Trace, how: ForeignPlan) -> Trace:
    """With the kernels that the software fuses."""
    return compiled(trace, how.stack.compile) if takes_fused_softmax(trace, how) or not how.stack.spelled else trace


def takes_fused_softmax(trace: Trace, how: ForeignPlan) -> bool:
    """Whether rows of spelled-out scores are short enough for the software's fused softmax."""
    rows = [op.inputs[0].spec.shape[-1] for op in trace.programs[FIRST].ops if op.name == "aten._softmax.default"]
    return not how.stack.fused_keys or max(rows, default=0) <= how.stack.fused_keys


def _blocks(trace: Trace) -> list[str]:
    return sorted({zero.block_of(op.module) for op in trace.programs[FIRST].ops} - {""})


def recomputed(trace: Trace, how: ForeignPlan, speeds: Speeds) -> dict[str, float]:
    """Seconds in which one block's backward computes again what the trace does not show."""
    stack, block = how.stack, _blocks(trace)[-1]
    forward = [op for op in trace.programs[FIRST].ops if op.phase == "forward" and zero.block_of(op.module) == block]
    if how.recompute == "full" and stack.whole_blocks:
        last = [op for op in forward if op.module.endswith(("mlp.down", "experts"))]
        return {"last product": _seconds(trace, last, speeds)}
    if how.recompute == "selective" and stack.selective in (ALTERNATE, PRODUCTS_ALONE):
        products = [op for op in forward if op.name in PRODUCTS]
        kernels = [op for op in forward if "attention" in op.name] if stack.selective == PRODUCTS_ALONE else []
        return {"every second product": _seconds(trace, products[1::2], speeds), "attention": _seconds(trace, kernels, speeds)}
    if how.recompute == "selective" and stack.selective == LAYERS:
        return {"every second layer": _seconds(trace, forward, speeds) / 2}
    if how.recompute == "selective" and stack.selective == ATTENTION and stack.spelled:
        return {"attention": _seconds(trace, [op for op in forward if op.module.endswith(".attention")], speeds)}
    return {}


# ---------------------------------------------------------------- pieces of a step


def _seconds(trace: Trace, ops: Sequence[Op], speeds: Speeds, *, around: bool = False) -> float:
    """Some ops of a trace by themselves, one after the other."""
    piece = replace(trace, programs={"piece": Program("piece", tuple(ops))}, schedule={"steady_step": (("piece", 1),)})
    tasks: list[Task] = list(tasks_of(piece, (("piece", 1),), speeds, around=around))
    return simulate(tasks, steps=2, drag=drags(tasks, speeds)).seconds if tasks else 0.0


USUAL_WAVES = 8.0
"""Of the products of large layers, which messages of a backward run beside. Assumed."""


def network_drag(group: Fabric) -> float:
    """Part of the drag on compute that is left where every rank of a ring is on a node of its own: that of the bytes per second which the ring
    moves through a device, over those of a ring inside a node."""
    inside = reached(group.intra) if group.intra is not None else 0.0
    return min(1.0, group.across() / inside) if inside else 1.0


@dataclass(frozen=True, kw_only=True)
class LayerSeconds:
    """Seconds of forward and backward of a layer and of both ends of the model, of the update, and of gradients."""

    layer: StageSeconds
    first: StageSeconds
    last: StageSeconds
    update: Callable[[int, float], float]
    """Layers and share of what lies outside them → seconds of the update."""
    traffic: Callable[[int, float], float]
    """The same for gradients and parameters that travel while nothing is computed."""

    def stage(self, layers: int, *, first: bool, last: bool) -> StageSeconds:
        parts = [StageSeconds(*(value * layers for value in self.layer))]
        parts += [self.first] * first + [self.last] * last
        return StageSeconds(*(sum(values) for values in zip(*parts, strict=True)))

    def exposed(self, layers: int, first: bool, last: bool) -> float:
        return self.traffic(layers, (first + last) / 2)

    def after(self, layers: int, first: bool, last: bool) -> float:
        """What follows the last backward."""
        return self.update(layers, (first + last) / 2) + self.exposed(layers, first, last)


def _pieces(trace: Trace, how: ForeignPlan, cluster: Cluster, speeds: Speeds) -> LayerSeconds:
    """From one short stack: its last block stands for every layer, what lies around the blocks for the ends."""
    more = how.plan.accumulate > 1
    ready = _ready(trace, 2 if more else 1, how)
    parts = _parts(ready.programs[NEXT if more else FIRST].ops)
    before, layer, after = (_stage(ready, forward, backward, how, speeds) for forward, backward in parts)
    again = sum(recomputed(ready, how, speeds).values())
    there = expert_seconds(how, cluster)
    layer = layer._replace(forward=layer.forward + there, inputs=layer.inputs + again + there * (2 if how.recompute == "full" else 1))
    return LayerSeconds(
        layer=layer, first=before, last=after, update=_update(ready, how, speeds), traffic=_traffic(ready, trace, how, speeds)
    )


def _parts(ops: Sequence[Op]) -> tuple[tuple[list[Op], list[Op]], ...]:
    """Forward and backward of what comes before the blocks, of the last block, and of what comes after."""
    passes = [op for op in ops if op.phase == "forward"], [op for op in ops if op.phase in _LATE]
    last = max((zero.block_of(op.module) for op in ops if zero.block_of(op.module)), default="")
    found = []
    for one in passes:
        inside = [number for number, op in enumerate(one) if zero.block_of(op.module)] or [0]
        found.append((one[: inside[0]], [op for op in one if zero.block_of(op.module) == last], one[inside[-1] + 1 :]))
    forward, backward = found
    return (forward[0], backward[2]), (forward[1], backward[1]), (forward[2], backward[0])


def _stage(trace: Trace, forward: Sequence[Op], backward: Sequence[Op], how: ForeignPlan, speeds: Speeds) -> StageSeconds:
    total = _seconds(trace, backward, speeds)
    weights = [op for op in backward if _makes_gradient(op, trace)] if how.schedule.startswith("zb") else []
    later = _seconds(trace, weights, speeds)
    return StageSeconds(_seconds(trace, forward, speeds), total - later, later)


def _makes_gradient(op: Op, trace: Trace) -> bool:
    return op.phase == "backward" and op.name in ("aten.mm.default", "aten.bmm.default") and any(zero.gradient_elements(op, trace))


def expert_seconds(how: ForeignPlan, cluster: Cluster) -> float:
    """Tokens that travel to their experts and back, in one pass of a layer."""
    if how.ep < 2:
        return 0.0
    group = fabric(cluster, how.ep, stride=1)
    return 2 * collective(ALL_TO_ALL, how.tokens * how.topk * how.hidden * 2, group).seconds


def _update(ready: Trace, how: ForeignPlan, speeds: Speeds) -> Callable[[int, float], float]:
    """Of a rank with so many layers; states that data ranks share are updated by one of them."""
    seconds = _seconds(zero.updating(ready), zero.updating(ready).programs["update"].ops, speeds, around=True)
    layer, ends = zero.parameters(ready)
    whole = len(_blocks(ready)) * layer + ends
    return lambda layers, share: seconds * (layers * layer + ends * share) / whole / how.sharing


def _traffic(ready: Trace, trace: Trace, how: ForeignPlan, speeds: Speeds) -> Callable[[int, float], float]:
    """Gradients over data ranks, and parameters of ZeRO-1 and 2: what compute does not hide."""
    if how.dp == 1:
        return lambda layers, share: 0.0
    layer, ends = zero.parameters(trace)

    def seconds(layers: int, share: float) -> float:
        held = layers * layer + ends * share
        if how.stack.reduces == EARLY:
            found = _late(ready, layers, how, speeds)
        else:
            op = zero.message(zero.reduction(how), round(held * how.stack.reduce_bytes), how.dp, zero.DATA, "update")
            found = speeds.comm_time(op)
        if how.data != REPLICAS:
            found += speeds.comm_time(zero.message("foretell.all_gather", round(2 * held), how.dp, zero.DATA, "update"))
        return found

    return seconds


def _late(trace: Trace, layers: int, how: ForeignPlan, speeds: Speeds) -> float:
    """How much longer a last backward takes whose gradients are reduced as they come."""
    (_, ending), (_, block), (_, starting) = _parts(trace.programs[FIRST].ops)
    backward = [*starting, *(block * max(1, layers)), *ending]
    pieces = [starting, *([block] * max(1, layers)), ending]
    with_messages = [op for piece in pieces for op in zero.reducing(piece, trace, how)]
    end = Op("foretell.update", (), (), "", "update", 0)
    return max(0.0, _seconds(trace, [*with_messages, end], speeds) - _seconds(trace, backward, speeds))


# ---------------------------------------------------------------- pipelines


def _pipeline(pieces: LayerSeconds, how: ForeignPlan, cluster: Cluster) -> StepCost:
    ranks, count = how.plan.mesh.pp, how.plan.mesh.pp * how.chunks
    layers = partition(how.layers, count)
    stages = [pieces.stage(mine, first=place == 0, last=place == count - 1) for place, mine in enumerate(layers)]
    message = _send(how, cluster)
    if how.stack.waits_for_messages:
        stages = [stage._replace(forward=stage.forward + message, inputs=stage.inputs + message) for stage in stages]
        message = 0.0
    messages = [message] * (count - 1)
    micros = how.plan.accumulate
    through = run_through(stages, messages, micros=micros, ranks=ranks, schedule=how.schedule)
    after = max(
        pieces.after(sum(layers[rank::ranks]), rank == 0, rank == ranks - 1) for rank in range(ranks)
    )
    busy = micros * sum(stage.total for stage in stages) / ranks
    return StepCost(seconds=through + after, bubble=1 - busy / (through + after), exposed_seconds=after)


def _send(how: ForeignPlan, cluster: Cluster) -> float:
    """One activation from a stage to the next."""
    mesh = how.plan.mesh
    nbytes = how.tokens * how.hidden * 2 / (mesh.tp if how.stack.splits_messages else 1)
    group: Fabric = fabric(cluster, mesh.pp, stride=mesh.tp * mesh.cp * mesh.data)
    return collective(P2P, nbytes, group).seconds

