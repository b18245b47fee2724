"""Bytes of a rank of other training software, from short stacks of the model.

Where parameters are sharded by unit, the program of a rank is replayed through the caching allocator as for any plan. Else
states are counted per parameter (`Stack.state_bytes`), and what forward leaves for backward is read off the program: live
bytes when forward ends, times the micro-batches that the schedule has in flight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.foreign import zero
from benchmarks.foreign.plan import REPLICAS, ZERO2, ZERO3, ForeignPlan
from benchmarks.foreign.schedule import GPIPE, ZB_1P, ZB_2P, ZB_V, partition
from benchmarks.foreign.stacks import ALTERNATE, ATTENTION, LAYERS, PRODUCTS_ALONE
from benchmarks.foreign.step import PRODUCTS, line, of_loss, takes_fused_softmax
from foretell.hardware.types import Cluster
from foretell.lower.steps import FIRST, repeated
from foretell.price.speeds import Options
from foretell.simulate.parts import memory_of
from foretell.trace import types
from foretell.trace.types import Op, Trace

BESIDE_BYTES = 2.0e9
"""What nvidia-smi shows of a process beside its tensors: a CUDA context, communicators, workspaces."""
_OWN = (types.PARAMETER, types.GRADIENT, types.OPTIMIZER, types.BUFFER)


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes of the fullest rank of the pipeline; `device` of the first one."""

    allocated: float
    reserved: float
    device: float

    def reported(self, sense: str) -> float:
        return {"allocated": self.allocated, "reserved": self.reserved, "device": self.device}[sense]


def foreign_memory(traces: Mapping[int, Trace], how: ForeignPlan, cluster: Cluster, options: Options) -> StepMemory:
    """What tensors take, what the allocator holds for them, what the device shows."""
    limit = float(cluster.device.memory_bytes)
    if how.sharded_units and how.plan.mesh.pp == 1:
        return _replayed(traces, how, cluster, options)
    ranks = [_counted(traces, how, rank) for rank in range(how.plan.mesh.pp)]
    worst = max(ranks)
    shown = ranks[0] * (1 + _SLACK) + BESIDE_BYTES + min(how.stack.buffer_bytes, 2 * 2 * _held(traces, how, 0))
    return StepMemory(allocated=worst, reserved=min(worst * (1 + _SLACK), limit), device=min(shown, limit))


_SLACK = 0.03
"""Of what tensors take, what the allocator holds beyond it: rounding and split blocks; assumed where nothing is replayed."""


def _replayed(traces: Mapping[int, Trace], how: ForeignPlan, cluster: Cluster, options: Options) -> StepMemory:
    micros = min(2, how.plan.accumulate)
    found = {}
    for depth, trace in traces.items():
        local = zero.sharded(repeated(_with_fused_loss(trace) if how.stack.fuses_loss else trace, micros), how)
        found[depth] = memory_of(local, how.plan, cluster, options).memory
    deepest = found[max(found)]
    allocated = line({depth: float(one.allocated_bytes) for depth, one in found.items()}, how.layers)
    further = allocated - deepest.allocated_bytes  # a further layer takes what it holds; short stacks fill holes that deep ones do not have
    reserved, device = deepest.reserved_bytes + further, deepest.device_bytes + further
    dropped = how.layers * _dropped(traces[min(traces)], how)
    allocated, reserved, device = allocated - dropped, reserved - dropped, device - dropped
    limit = float(cluster.device.memory_bytes)
    return StepMemory(allocated=min(allocated, limit), reserved=min(reserved, limit), device=min(device, limit))


# ---------------------------------------------------------------- counted


def _counted(traces: Mapping[int, Trace], how: ForeignPlan, rank: int) -> float:
    pp = how.plan.mesh.pp
    layers = sum(partition(how.layers, pp * how.chunks)[rank::pp])
    trace = traces[min(traces)]
    if how.stack.spelled and takes_fused_softmax(trace, how):
        trace = _with_fused_softmax(trace)
    kept, before = _kept(trace, how)
    working = max(0.0, _peak(trace) - before - 2 * kept) if rank == pp - 1 else _within(trace)
    sent = _entry(how) if how.stack.keeps_sent and rank < pp - 1 else 0.0
    return _states(how) * _held(traces, how, rank) + (layers * kept + sent) * in_flight(how, rank) + working


def _held(traces: Mapping[int, Trace], how: ForeignPlan, rank: int) -> float:
    """Parameters of a rank; two buckets of 16-bit gradients hold no more than theirs."""
    pp = how.plan.mesh.pp
    layers = sum(partition(how.layers, pp * how.chunks)[rank::pp])
    share = 1.0 if pp == 1 else (0.5 if not how.stack.tied else 1.0) * (rank in (0, pp - 1))
    layer, outside = zero.parameters(traces[min(traces)])
    return layers * layer + outside * share


def _states(how: ForeignPlan) -> float:
    """Bytes per parameter."""
    whole, spread = how.stack.state_bytes
    if how.data == REPLICAS:
        return whole + spread
    if how.data == ZERO3:
        return (whole + spread) / how.sharing
    return (2 if how.data == ZERO2 else whole) + (spread + (whole - 2 if how.data == ZERO2 else 0)) / how.sharing


def in_flight(how: ForeignPlan, rank: int) -> float:
    """Micro-batches whose activations a rank holds at once, counted in whole ranks (all its parts)."""
    pp, micros, chunks = how.plan.mesh.pp, how.plan.accumulate, how.chunks
    if pp == 1:
        return 1.0
    if how.schedule == GPIPE:
        return float(micros)
    if how.schedule == ZB_2P:
        return float(min(micros, 2 * pp - 1))
    if how.schedule in (ZB_1P, ZB_V):
        return float(min(micros, pp))
    if chunks > 1:
        ahead = (chunks - 1) * pp + 2 * (pp - 1 - rank) + 1
        return min(micros * chunks, ahead) / chunks
    return float(min(micros, pp - rank))


def _live(trace: Trace, ops: Sequence[Op]) -> list[float]:
    """Bytes of activations and temporaries after each op, parameters and their gradients left out."""
    found, now = [], 0.0
    for op in ops:
        now += sum(trace.storages[number].nbytes for number in op.allocates if trace.storages[number].role not in _OWN)
        found.append(now)
        now -= sum(trace.storages[number].nbytes for number in op.frees if trace.storages[number].role not in _OWN)
    return found


def _kept(trace: Trace, how: ForeignPlan) -> tuple[float, float]:
    """What one block's forward leaves for backward; live bytes when the first block begins."""
    ops = trace.programs[FIRST].ops
    live = _live(trace, ops)
    entry = _entry(how)
    ends = {op.module.split(".")[1]: number for number, op in enumerate(ops) if op.phase == "forward" and op.module.startswith("blocks.")}
    places = list(ends.values())
    first = next(number for number, op in enumerate(ops) if op.phase == "forward" and op.module.startswith("blocks."))
    own = live[places[-1]] - live[places[-2]]
    if how.recompute == "selective" and how.stack.selective == ATTENTION and how.stack.spelled:
        own -= _scores(trace) / len(places)
    if how.recompute == "full":  # software that recomputes a block keeps what goes into it, and nothing else
        own = entry
    elif how.recompute == "selective" and how.stack.selective == LAYERS:
        own = (own + entry) / 2
    return max(0.0, own), live[max(0, first - 1)]


def _entry(how: ForeignPlan) -> float:
    """What goes into a block, and from one stage to the next."""
    return how.tokens * how.hidden * 2.0 / (how.plan.mesh.tp if how.plan.split is not None and how.plan.split.sequence else 1)


def _dropped(trace: Trace, how: ForeignPlan) -> float:
    """What a block keeps in the trace and not in the software: results of every second product, of attention where those are not kept, and
    where blocks are compiled, of the last product, which backward does not ask for."""
    if how.recompute != "selective" or how.stack.selective not in (ALTERNATE, PRODUCTS_ALONE):
        return 0.0
    last = max(op.module.split(".")[1] for op in trace.programs[FIRST].ops if op.module.startswith("blocks."))
    made = [
        op for op in trace.programs[FIRST].ops
        if op.phase == "forward" and op.name in PRODUCTS and op.module.startswith(f"blocks.{last}.")
    ]  # fmt: skip
    found = float(sum(op.bytes_written for op in (made[1::2] + made[-1:] if how.stack.compile != "none" else made[1::2])))
    if how.stack.selective == PRODUCTS_ALONE:
        kernels = [op for op in trace.programs[FIRST].ops if op.phase == "forward" and "attention" in op.name]
        found += sum(op.bytes_written for op in kernels if op.module.startswith(f"blocks.{last}."))
    return found


def _with_fused_loss(trace: Trace) -> Trace:
    """The trace with a compiled loss: it keeps the 16-bit logits for backward, which makes their 16-bit gradient from them."""
    storages = dict(trace.storages)
    for program in trace.programs.values():
        for op in program.ops:
            wide = bool(op.outputs) and op.outputs[0].spec.dtype == "float32"
            for number in op.allocates if wide and of_loss(op) else ():
                kept = storages[number].nbytes // 2 if op.name == "aten._log_softmax.default" else 0
                storages[number] = storages[number]._replace(nbytes=kept)
    return replace(trace, storages=storages)


def _with_fused_softmax(trace: Trace) -> Trace:
    """The trace with scaling, mask and softmax of spelled-out attention in one kernel, which takes and makes 16 bits and turns the gradient
    of its result into that of its input in place."""
    storages = dict(trace.storages)
    backward_gone = ("aten._to_copy.default", "aten._softmax_backward_data.default", "aten.masked_fill.Scalar")
    for op in trace.programs[FIRST].ops:
        shape = op.outputs[0].spec.shape if op.outputs else ()
        if not op.module.endswith(".attention") or len(shape) != 4 or shape[-1] != shape[-2]:
            continue
        if op.phase == "backward":
            gone = op.name in backward_gone
        else:
            gone = op.name in ("aten.mul.Tensor", "aten._to_copy.default")
        for number in op.allocates:
            if gone:
                storages[number] = storages[number]._replace(nbytes=0)
            elif op.name == "aten._softmax.default" and op.outputs[0].spec.dtype == "float32":
                storages[number] = storages[number]._replace(nbytes=storages[number].nbytes // 2)
    return replace(trace, storages=storages)


def _scores(trace: Trace) -> float:
    """What spelled-out attention keeps of its scores."""
    ops = trace.programs[FIRST].ops
    forward = [op for op in ops if op.phase == "forward"]
    gone = {number for op in forward for number in op.frees}
    inside = [op for op in forward if op.module.endswith(".attention") and op.module.startswith("blocks.")]
    return float(
        sum(
            trace.storages[ref.storage].nbytes
            for op in inside for ref in op.outputs
            if ref.storage in op.allocates and ref.storage not in gone and len(ref.spec.shape) == 4 and ref.spec.shape[-1] == ref.spec.shape[-2]
        )
    )  # fmt: skip


def _peak(trace: Trace) -> float:
    return max(_live(trace, trace.programs[FIRST].ops))


def _within(trace: Trace) -> float:
    """What one block's backward needs beside what was kept."""
    ops = trace.programs[FIRST].ops
    live = _live(trace, ops)
    backward = [number for number, op in enumerate(ops) if op.phase in ("backward", "recompute") and op.module.startswith("blocks.")]
    if not backward:
        return 0.0
    return max(0.0, max(live[number] for number in backward) - live[backward[0]])
