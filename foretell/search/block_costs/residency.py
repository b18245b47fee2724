"""A block's ops under each residency, from those it runs when everything is kept.

    keep         forward                                │ backward
    recompute    forward, keeping its result alone      │ forward again, up to what backward needs │ backward
    selective    … and the results of products          │ the rest of forward again               │ backward
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

from foretell.lower.blocks import blocks_of
from foretell.search.block_costs.ops import Piece, owners
from foretell.trace import types
from foretell.trace.types import Op, Storage, Trace

KEEP, SELECTIVE, RECOMPUTE = "keep", "selective", "recompute"
MODES = (KEEP, SELECTIVE, RECOMPUTE)
KEPT = frozenset(
    f"aten.{name}.default" for name in (
        "mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    )
)  # fmt: skip
"""Ops whose results selective recomputation keeps, as `trace.record.step` does."""
CAST = "aten._to_copy.default"


@dataclass(frozen=True)
class Phases:
    """What a piece runs in one residency."""

    forward: tuple[Op, ...]
    again: tuple[Op, ...]
    backward: tuple[Op, ...]
    lingering: frozenset[int] = frozenset()
    """Casts of weights that go when all of forward has ended."""
    cached: int = 0
    """Results that selective recomputation puts aside."""


def takes_selective(forward: Iterable[Op]) -> bool:
    """Whether nothing changes a result in place that selective recomputation keeps: PyTorch refuses such a block."""
    kept: set[int] = set()
    for op in forward:
        name = op.name.split(".")[1]
        if name.endswith("_") and not name.endswith("__") and any(ref.storage in kept for ref in op.outputs):
            return False
        if op.name in KEPT:
            kept.update(ref.storage for ref in op.outputs)
    return True


def modes_of(trace: Trace) -> tuple[str, ...]:
    """Residencies that the blocks of a traced step can be in."""
    blocks = blocks_of(trace)
    for program in trace.programs.values():
        ops = [op for op in program.ops if op.phase == "forward"]
        for _, mine in groupby(zip(owners(ops, blocks), ops, strict=True), key=itemgetter(0)):
            if not takes_selective(op for owner, op in mine if owner in blocks):
                return KEEP, RECOMPUTE
    return MODES


def in_mode(piece: Piece, mode: str, storages: Mapping[int, Storage]) -> Phases:
    """The piece with its own results kept, or computed again."""
    if mode == KEEP:
        return Phases(piece.forward, (), piece.backward)
    born = {number for op in piece.forward for number in op.allocates}
    saved = {number for op in piece.forward if mode == SELECTIVE and op.name in KEPT for number in op.allocates}
    casts = _casts(piece.forward, storages) - saved
    start = _entering(piece.forward, storages)
    given = {number for op in piece.forward[:start] for number in op.allocates}
    staying = saved | piece.outputs | casts | given
    forward = _dying_early(piece.forward, born, staying)
    stop = _last_needed(piece, born - piece.outputs)
    again = [
        replace(op, phase="recompute", allocates=tuple(n for n in op.allocates if n not in piece.outputs),
                frees=tuple(n for n in op.frees if n in born))
        for op in piece.forward[start : stop + 1] if not (mode == SELECTIVE and op.name in KEPT)
    ]  # fmt: skip
    made = {number for op in again for number in op.allocates} | saved | given
    gone = {number for op in (*again, *piece.backward) for number in op.frees}
    backward = _ending(piece.backward, sorted(made - gone - piece.outputs))
    return Phases(forward, tuple(again), backward, frozenset(casts & born), len(saved))


def _entering(ops: Sequence[Op], storages: Mapping[int, Storage]) -> int:
    """How many ops come before a checkpoint: casts of what a block is given, which are then held as its inputs."""
    for position, op in enumerate(ops):
        if op.name != CAST or storages[op.inputs[0].storage].role == types.PARAMETER:
            return position
    return len(ops)


def _casts(ops: Sequence[Op], storages: Mapping[int, Storage]) -> set[int]:
    """Copies of parameters in another dtype, as autocast makes and holds them."""
    return {
        number for op in ops
        if op.name == CAST and op.inputs and storages[op.inputs[0].storage].role == types.PARAMETER
        for number in op.allocates
    }  # fmt: skip


def _dying_early(ops: Sequence[Op], born: set[int], staying: set[int] | frozenset[int]) -> tuple[Op, ...]:
    """Forward in which all that does not stay goes with its last use."""
    last: dict[int, int] = {}
    freed: dict[int, int] = {}
    for position, op in enumerate(ops):
        for number in (*op.allocates, *(r.storage for r in op.inputs), *(r.storage for r in op.outputs)):
            last[number] = position
        freed.update((number, position) for number in op.frees)
    dying: dict[int, list[int]] = {}
    for number in born - set(staying):
        dying.setdefault(freed.get(number, last[number]), []).append(number)
    return tuple(
        replace(op, frees=(*(n for n in op.frees if n not in born), *dying.get(position, ())))
        for position, op in enumerate(ops)
    )


def _last_needed(piece: Piece, born: Iterable[int]) -> int:
    """The last op of forward that makes something backward reads."""
    wanted = set(born)
    read = {ref.storage for op in piece.backward for ref in op.inputs} & wanted
    found = -1
    for position, op in enumerate(piece.forward):
        if any(ref.storage in read for ref in op.outputs):
            found = position
    return found


def _ending(ops: Sequence[Op], dying: Sequence[int]) -> tuple[Op, ...]:
    if not ops or not dying:
        return tuple(ops)
    return (*ops[:-1], replace(ops[-1], frees=(*ops[-1].frees, *dying)))
