"""What a sheet is made from: the ops of one block of each kind, and of what runs before and after the blocks.

    a keep trace   │ before │ F0 │ F1 │ … │ after, loss, after' │ … │ B1 │ B0 │ before' │
    pieces         before, one block of each kind, after: each with its forward and its backward

Two traces of unlike micro-batch give the pieces at any micro-batch, since every size is a straight line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from foretell.lower.batch import BatchMismatch, rebatch
from foretell.lower.blocks import blocks_of
from foretell.lower.fsdp.sharded import block_of, wide_of
from foretell.lower.fsdp.units import FsdpSharding, Storages, units_of
from foretell.trace import types
from foretell.trace.types import Op, Program, Storage, TensorSpec, Trace

BEFORE, AFTER = "before", "after"
_LATE = ("backward", "recompute")


@dataclass(frozen=True)
class Weights:
    """Parameters of a piece: whole shapes as compute sees them."""

    trained: tuple[TensorSpec, ...] = ()
    frozen: tuple[TensorSpec, ...] = ()
    experts: tuple[TensorSpec, ...] = ()
    """This rank's experts, trained; the ranks that hold the same ones shard them."""
    groups: int = 1
    """Ranks among which experts are spread."""

    @property
    def all(self) -> tuple[TensorSpec, ...]:
        return (*self.trained, *self.frozen)


@dataclass(frozen=True)
class Piece:
    """What one stretch of a micro-batch does."""

    forward: tuple[Op, ...]
    backward: tuple[Op, ...]
    outputs: frozenset[int]
    """Storages made in its forward that other pieces read."""


@dataclass(frozen=True)
class Material:
    """The pieces of a step at one micro-batch."""

    blocks: tuple[str, ...]
    kinds: tuple[int, ...]
    """Which kind each block is."""
    pieces: Mapping[str | int, Piece]
    """before, after, and one for each kind."""
    weights: Mapping[str | int, Weights]
    shared: tuple[TensorSpec, ...]
    """Parameters that both before and after use: there once, in `before`; on two stages of a pipeline twice."""
    storages: Mapping[int, Storage]
    inputs: int
    """Bytes of a micro-batch."""
    buffers: int
    parameters: int
    """How many tensors."""
    wide: Mapping[str, str]
    """Dtype of compute → dtype kept and trained, under sharding."""
    boundary: tuple[TensorSpec, ...]
    """What a block hands to the next."""
    slots: float
    """Bytes of optimizer state over those of the parameters it is for."""
    meta: Mapping[str, object] = field(default_factory=dict)


class PieceSource:
    """Traces of two micro-batches, cut to the pieces once; `at` gives any micro-batch."""

    def __init__(self, small: Trace, large: Trace | None, sizes: tuple[int, int]) -> None:
        self.sizes, self.trace = sizes, small
        self.first = cut(small)
        self._large = _shortened(large, self.first) if large is not None else None
        self._small = _mini(self.first)
        self._at: dict[int, Material] = {}
        self.known: dict[Any, Any] = {}
        """What is made of the pieces once for all devices."""

    @classmethod
    def from_minis(cls, first: Material, small: Trace, large: Trace | None, like: PieceSource) -> PieceSource:
        """From traces of the pieces alone."""
        found = cls.__new__(cls)
        found.sizes, found.trace, found.first = like.sizes, like.trace, first
        found._small, found._large, found._at, found.known = small, large, {}, {}
        return found

    @property
    def minis(self) -> tuple[Trace, Trace | None]:
        """Traces of the pieces alone, at both micro-batches."""
        return self._small, self._large

    def at(self, micro_batch: int) -> Material:
        """The pieces at a micro-batch; made once for all splits and devices."""
        if micro_batch not in self._at:
            self._at[micro_batch] = self._made(micro_batch)
        return self._at[micro_batch]

    def _made(self, micro_batch: int) -> Material:
        if micro_batch == self.sizes[0]:
            return self.first
        if self._large is None:
            raise BatchMismatch("only one micro-batch was traced")
        moved = rebatch(self._small, self._large, self.sizes, micro_batch)
        return of_mini(self.first, moved, micro_batch / self.sizes[0])


# ---------------------------------------------------------------------- cutting


def cut(trace: Trace) -> Material:
    """The pieces of a trace."""
    ops = trace.programs["micro_first"].ops
    blocks = blocks_of(trace)
    owner = owners(ops, blocks)
    kinds, chosen = kinds_of(ops, owner, blocks)
    names: dict[str | int, str] = {BEFORE: BEFORE, AFTER: AFTER, **{kind: blocks[i] for kind, i in enumerate(chosen)}}
    pieces: dict[str | int, Piece] = {}
    readers: dict[int, set[str]] = {}
    wanted: dict[str, list[Op]] = {name: [] for name in names.values()}
    for op, name in zip(ops, owner, strict=True):
        if name in wanted:
            wanted[name].append(op)
        if op.phase not in _LATE:
            for ref in op.inputs:
                readers.setdefault(ref.storage, set()).add(name)
    for key, name in names.items():
        mine = wanted[name]
        forward = tuple(op for op in mine if op.phase not in _LATE)
        born = {number for op in forward for number in op.allocates}
        outputs = frozenset(number for number in born if readers.get(number, set()) - {name})
        pieces[key] = Piece(forward, tuple(op for op in mine if op.phase in _LATE), outputs)
    weights, shared = _weights(trace, pieces, names)
    resident = [trace.storages[number] for number in trace.resident]
    return Material(
        blocks=blocks, kinds=kinds, pieces=pieces, weights=weights, shared=shared, storages=_touched(trace, pieces),
        inputs=sum(one.nbytes for one in resident if one.role == types.INPUT),
        buffers=sum(one.nbytes for one in resident if one.role == types.BUFFER),
        parameters=sum(1 for one in resident if one.role == types.PARAMETER), wide=wide_of(trace),
        boundary=_boundary(ops, owner, blocks), slots=_slots(trace, weights, kinds), meta=trace.meta,
    )  # fmt: skip


def _touched(trace: Trace, pieces: Mapping[str | int, Piece]) -> dict[int, Storage]:
    found: set[int] = set()
    for piece in pieces.values():
        for op in (*piece.forward, *piece.backward):
            found.update((*op.allocates, *op.frees, *(r.storage for r in op.inputs), *(r.storage for r in op.outputs)))
    return {number: trace.storages[number] for number in found}


def _slots(trace: Trace, weights: Mapping[str | int, Weights], kinds: Sequence[int]) -> float:
    states = (one for one in trace.storages.values() if one.role == types.OPTIMIZER and not one.host and one.nbytes > 8)
    times = {key: 1 if isinstance(key, str) else kinds.count(key) for key in weights}
    trained = sum(spec.nbytes * times[key] for key, one in weights.items() for spec in one.trained)
    return sum(one.nbytes for one in states) / trained if trained else 0.0


def owners(ops: Sequence[Op], blocks: Sequence[str]) -> list[str]:
    """The block of every op, `before` or `after`; what runs between two blocks goes with the one that ran last."""
    found = block_of(ops, blocks)
    start = next((i for i, op in enumerate(ops) if op.phase in _LATE), len(ops))
    for low, high, first, last in ((0, start, BEFORE, AFTER), (start, len(ops), AFTER, BEFORE)):
        inside = [i for i in range(low, high) if found[i]]
        ends = inside[-1] if inside else low - 1
        here = first if inside else AFTER
        for i in range(low, high):
            if i > ends and inside:
                here = last
            elif found[i]:
                here = found[i]
            found[i] = here
    return found


def kinds_of(ops: Sequence[Op], owner: Sequence[str], blocks: Sequence[str]) -> tuple[tuple[int, ...], list[int]]:
    """Kind of each block by its ops and their shapes; and of each kind, the block in the middle of its kin."""
    signs: dict[str, list[object]] = {block: [] for block in blocks}
    known: dict[object, int] = {}
    for op, name in zip(ops, owner, strict=True):
        if name in signs:
            sign = (op.name, op.phase, tuple([r.spec for r in op.inputs]), tuple([r.spec for r in op.outputs]), op.attrs)
            signs[name].append(known.setdefault(sign, len(known)))
    found: dict[tuple[object, ...], int] = {}
    kinds = tuple(found.setdefault(tuple(signs[block]), len(found)) for block in blocks)
    members: list[list[int]] = [[] for _ in found]
    for index, kind in enumerate(kinds):
        members[kind].append(index)
    return kinds, [same[len(same) // 2] for same in members]


def _weights(
    trace: Trace, pieces: Mapping[str | int, Piece], names: Mapping[str | int, str]
) -> tuple[dict[str | int, Weights], tuple[TensorSpec, ...]]:
    units = units_of(trace, FsdpSharding(ranks=2), Storages(trace.storages))
    found: dict[str | int, Weights] = {}
    for key, name in names.items():
        if key not in (BEFORE, AFTER):
            unit = units[name]
            mine = {piece.storage for piece in unit.trained}
            found[key] = Weights(
                tuple(piece.spec for piece in unit.trained),
                tuple(piece.spec for piece in unit.parameters if piece.storage not in mine),
            )
    read = {key: {ref.storage for op in (*pieces[key].forward, *pieces[key].backward) for ref in op.inputs} for key in (BEFORE, AFTER)}
    root = units[""]
    trained = {piece.storage for piece in root.trained}
    late = [piece for piece in root.parameters if piece.storage in read[AFTER] and piece.storage not in read[BEFORE]]
    early = [piece for piece in root.parameters if piece not in late]
    for key, mine_ in ((BEFORE, early), (AFTER, late)):
        found[key] = Weights(
            tuple(piece.spec for piece in mine_ if piece.storage in trained),
            tuple(piece.spec for piece in mine_ if piece.storage not in trained),
        )
    both = read[BEFORE] & read[AFTER]
    return found, tuple(piece.spec for piece in root.parameters if piece.storage in both)


def _boundary(ops: Sequence[Op], owner: Sequence[str], blocks: Sequence[str]) -> tuple[TensorSpec, ...]:
    """What is made before the middle of the stack, depends on parameters, and is read after it."""
    if len(blocks) < 2:
        return ()
    middle = len(blocks) // 2
    late = {*blocks[middle:], AFTER}
    made: dict[int, bool] = {}
    for op, name in zip(ops, owner, strict=True):
        if op.phase in _LATE:
            break
        inside = name not in (BEFORE, AFTER)
        for number in op.allocates:
            made[number] = name not in late and (inside or any(made.get(r.storage, True) for r in op.inputs))
    read: dict[int, TensorSpec] = {}
    for op, name in zip(ops, owner, strict=True):
        if op.phase in _LATE:
            break
        if name in late:
            for ref in op.inputs:
                if made.get(ref.storage):
                    read.setdefault(ref.storage, ref.spec)
    return tuple(read.values())


# ---------------------------------------------------------------------- other micro-batches


def _mini(found: Material) -> Trace:
    """A trace of the pieces alone."""
    programs = {}
    for key, piece in found.pieces.items():
        programs[f"{key} forward"] = Program("", piece.forward)
        programs[f"{key} backward"] = Program("", piece.backward)
    marks = tuple(Op("foretell.boundary", (), (types.Ref(-1, spec),), "", "", None) for spec in found.boundary)
    programs["boundary"] = Program("", marks)
    about = {"batch": found.meta.get("batch", [])}
    return Trace(programs=programs, schedule={}, storages=found.storages, resident=(), meta=about)


def _shortened(large: Trace, like: Material) -> Trace:
    """The same pieces of the other trace; its ops must be those of the first."""
    other = cut(large)
    if other.kinds != like.kinds or other.blocks != like.blocks:
        raise BatchMismatch("the traces have other blocks")
    return _mini(other)


def of_mini(like: Material, moved: Trace, share: float) -> Material:
    """The material with the pieces of another trace of them, and so many times the bytes of a micro-batch."""
    pieces = {
        key: replace(piece, forward=moved.programs[f"{key} forward"].ops, backward=moved.programs[f"{key} backward"].ops)
        for key, piece in like.pieces.items()
    }
    boundary = tuple(op.outputs[0].spec for op in moved.programs["boundary"].ops)
    return replace(
        like, pieces=pieces, storages=moved.storages, boundary=boundary, inputs=round(like.inputs * share),
        meta={**like.meta, "batch": moved.meta.get("batch", [])},
    )  # fmt: skip


# ---------------------------------------------------------------------- pieces with other ops


def settled(old: Piece, forward: Sequence[Op], backward: Sequence[Op]) -> Piece:
    """The piece with deaths where what it makes is last used; what it frees of others goes as before."""
    ops = (*forward, *backward)
    born = {number for op in ops for number in op.allocates}
    before = {number for op in (*old.forward, *old.backward) for number in op.allocates}
    mortal = {number for op in (*old.forward, *old.backward) for number in op.frees}
    dying: dict[int, list[int]] = {}
    last: dict[int, int] = {}
    let_go: dict[int, int] = {}
    for position, op in enumerate(ops):
        for number in (*op.allocates, *(ref.storage for ref in (*op.inputs, *op.outputs))):
            last[number] = position
        for number in op.frees:
            let_go[number] = position
            if number not in born and number not in before:
                dying.setdefault(position, []).append(number)
    for number in born:
        when = last[number]
        if (when < len(forward)) == (let_go.get(number, -1) < len(forward)):
            when = max(when, let_go.get(number, -1))
        if number in mortal or number not in before:
            dying.setdefault(when, []).append(number)
    done = [replace(op, frees=tuple(dying.get(position, ()))) for position, op in enumerate(ops)]
    return Piece(tuple(done[: len(forward)]), tuple(done[len(forward) :]), old.outputs)
