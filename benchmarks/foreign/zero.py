"""Data parallelism that FSDP2 does not have: replicas with buckets, ZeRO-1 and ZeRO-2, reduction after the last backward.

    early   │ forward │ block 1' │ block 0' │ update │        late   │ forward │ backward │ reduce │ update │ gather │
                          └ reduce 1 ─┘└ reduce 0 ─┘
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.foreign.plan import REPLICAS, ZERO3, ForeignPlan
from foretell.lower.fsdp.sharded import shard
from foretell.trace import types
from foretell.trace.types import Op, Program, Ref, TensorSpec, Trace
from foretell.units import DTYPE_BYTES

DATA, DATA_BESIDE = "dp", "dp_replicate"
"""Axis whose collectives stop compute; axis whose collectives run beside it."""
_WIDE = {"bfloat16": "float32", "float16": "float32"}


def block_of(module: str) -> str:
    """The block that a module lies in; empty for what is in none. Models of published runs have one stack of `blocks`."""
    return ".".join(module.split(".")[:2]) if module.startswith("blocks.") else ""


def sharded(trace: Trace, how: ForeignPlan) -> Trace:
    """The program of a rank whose parameters are sharded by unit: FSDP's own, in this software's dtype of reduction."""
    mesh = how.plan.mesh
    reduce = "float32" if how.stack.reduce_bytes == 4 else None
    return shard(trace, mesh.dp_shard * mesh.cp, replicate=mesh.dp_replicate, reshard=how.data == ZERO3, reduce=reduce)


def reduction(how: ForeignPlan) -> str:
    whole = how.data == REPLICAS or how.stack.all_reduce
    return "foretell.all_reduce" if whole else "foretell.reduce_scatter"


def message(name: str, nbytes: int, ranks: int, axis: str, phase: str, module: str = "") -> Op:
    """A collective whose larger buffer has so many bytes; it allocates nothing that is counted here."""
    ref = Ref(-1, TensorSpec((nbytes,), "uint8"))
    return Op(name, (ref,), (ref,), module, phase, 0, attrs=(f"axis:{axis}", f"ranks:{ranks}"))


def reducing(ops: Sequence[Op], trace: Trace, how: ForeignPlan) -> Iterator[Op]:
    """The ops of a micro-batch's backward, each block's gradients reduced over data ranks as soon as they are there."""
    waiting, size = 0, how.stack.reduce_bytes
    block = ""
    for op in ops:
        mine = block_of(op.module)
        if mine != block and waiting:
            yield message(reduction(how), waiting, how.dp, DATA_BESIDE, "backward", block)
            waiting = 0
        block = mine
        yield op
        waiting += sum(gradient_elements(op, trace)) * size if op.allocates else 0
    if waiting:
        yield message(reduction(how), waiting, how.dp, DATA_BESIDE, "backward", block)


def gradient_elements(op: Op, trace: Trace) -> Iterator[int]:
    """Elements of parameter gradients that are born in an op."""
    for number in op.allocates:
        storage = trace.storages[number]
        if storage.role == types.GRADIENT:
            yield storage.nbytes // width(trace)


def width(trace: Trace) -> int:
    """Bytes of an element of the parameters: 4 under autocast, 2 where they are computed with as they are."""
    return max(
        (DTYPE_BYTES[ref.spec.dtype] for op in trace.programs["update"].ops for ref in op.inputs
         if ref.storage in trace.storages and trace.storages[ref.storage].role == types.PARAMETER), default=2,
    )  # fmt: skip


def updating(trace: Trace) -> Trace:
    """The update on fp32 master weights, moments and gradients, from that of a 16-bit trace."""
    ops = tuple(
        replace(op, inputs=tuple(map(_widened, op.inputs)), outputs=tuple(map(_widened, op.outputs)))
        for op in trace.programs["update"].ops
    )
    return replace(trace, programs={**trace.programs, "update": Program("update", ops)})


def _widened(ref: Ref) -> Ref:
    return Ref(ref.storage, TensorSpec(ref.spec.shape, _WIDE.get(ref.spec.dtype, ref.spec.dtype)))


def parameters(trace: Trace) -> tuple[int, int]:
    """Elements of one block's parameters and of those outside the blocks, on a rank."""
    size = width(trace)
    held = [trace.storages[number] for number in trace.resident if trace.storages[number].role == types.PARAMETER]
    inside = [one for one in held if block_of(one.module)]
    blocks = {block_of(one.module) for one in inside}
    return sum(one.nbytes for one in inside) // size // max(1, len(blocks)), sum(one.nbytes for one in held if one not in inside) // size
