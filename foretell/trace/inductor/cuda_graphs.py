"""CUDA graphs around compiled code: recorded once, then replayed with one call. Plain data, no torch.

    copy what moves ─► foretell.replay ─► kernels, asked for by nobody ─► foretell.replayed

What a graph allocates lies in memory that only graphs use (a stream number of its own for the allocator), since the
addresses are part of the recording. Parameters and buffers stay where they are; any other tensor that the graph reads
and did not make itself (the batch, the gradient of the loss) is copied to where the recording expects it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from foretell.trace import types
from foretell.trace.inductor.rules import SAME, VIEWS, base_name
from foretell.trace.types import Op, Ref, Storage

POOL = 9
"""Stream number that stands for the graphs' own memory."""
REPLAY, REPLAYED = "foretell.replay", "foretell.replayed"
_STAYS = (types.PARAMETER, types.BUFFER)


def replayed(ops: Sequence[Op], storages: dict[int, Storage]) -> list[Op]:
    """The ops of one graph as they are when replayed; the storages they allocate move to the graphs' pool."""
    if not ops:
        return []
    born = {number for op in ops for number in op.allocates}
    for number in born:
        storages[number] = storages[number]._replace(stream=POOL)
    moving: dict[int, Ref] = {}
    for op in ops:
        for ref in op.inputs:
            held = storages[ref.storage]
            if ref.storage not in born and held.role not in _STAYS and held.stream != POOL:
                moving.setdefault(ref.storage, ref)
    phase, copies, copied = ops[0].phase, [], dict[int, int]()
    for ref in moving.values():
        number = max(storages) + 1
        storages[number] = storages[ref.storage]._replace(stream=POOL, nbytes=ref.spec.nbytes)
        there = ref._replace(storage=number)
        copied[ref.storage] = number
        copies.append(Op("aten.clone.default", (ref,), (there,), "", phase, 0, allocates=(number,)))
    kernels = sum(base_name(op.name) not in {*SAME, *VIEWS} for op in ops)
    start = Op(REPLAY, (), (), "", phase, 0, attrs=(kernels,))
    end = Op(REPLAYED, (), (), "", phase, 0, frees=tuple(copied.values()))
    return [*copies, start, *(_moved(op, copied) for op in ops), end]


def _moved(op: Op, copied: Mapping[int, int]) -> Op:
    """An op that reads the copies."""
    if not any(ref.storage in copied for ref in op.inputs):
        return op
    return replace(op, inputs=tuple(ref._replace(storage=copied.get(ref.storage, ref.storage)) for ref in op.inputs))
