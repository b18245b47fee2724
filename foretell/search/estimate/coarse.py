"""A piece of a step in few ops: neighbours are merged as long as that hides no bytes.

    forward    │ norm │ qkv │ attention │ out │ add │ norm │ up │ act │ down │ add │
    merged     │ ──────────────────── 1 ──────────────────────────────── │ ─ 2 ─ │

A merged op makes what outlives it, holds beside that what was there at its highest point, and frees what died in it. So it
may only seem to hold more than its ops did, never less. Ops go together while, with what came before, that is at most
`TOLERANCE` of the piece's own bytes above the piece's highest point. Messages between ranks stay ops of their own. So do,
where backward is to be run in two passes, ops for gradients of inputs, of weights, and of both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from foretell.price.kernels.shapes import short
from foretell.price.time import COMPUTE_KINDS, hungry, shape_of
from foretell.search.block_costs.residency import Phases
from foretell.search.block_costs.work import DETACH, Prices, Work, rounded
from foretell.simulate.memory.replay import BIASED, GEMMS
from foretell.trace import types
from foretell.trace.fold.merged import BIASED_PRODUCT, MERGED, NO_PRODUCT, PRODUCT, Merged, merged
from foretell.trace.types import Op, Ref, Storage, TensorSpec

TOLERANCE = 0.01
"""Share of the bytes that a piece makes."""
SMALL = 1 << 20
"""The allocator has a pool of its own for tensors up to this size."""
BUNDLED = 64 << 20
"""Tensors up to this size that come and go together are one."""


@dataclass(frozen=True)
class Coarse:
    """A piece of a step in one residency."""

    forward: tuple[Op, ...]
    backward: tuple[Op, ...]
    storages: Mapping[int, Storage]
    """Of all that its ops speak of."""
    lingering: frozenset[int]
    """Made in forward, and gone when all of the step's forward has ended."""
    outgoing: tuple[int, ...]
    """What backward hands to the piece before: made there and not freed, or handed on."""


def coarse(
    phases: Phases, storages: Mapping[int, Storage], prices: Prices, work: Work, *, merges: bool = True,
    kept: float = 1.0, apart: Sequence[str] = (),
) -> Coarse:  # fmt: skip
    """A piece in few ops; `work` says what its seconds add up to. `merges`: or in all of them; `kept`: what a compiler leaves of
    the bytes that forward keeps; `apart`: modules whose ops are not merged with others."""

    def within(ops: Sequence[Op]) -> list[str]:
        return [next((path for path in apart if f"{op.module}.".startswith(f"{path}.")), "") for op in ops]

    again, backward, known = _renamed(phases, storages)
    if kept != 1.0:
        gone = {number for op in phases.forward for number in op.frees}
        for number in (n for op in phases.forward for n in op.allocates if n not in gone):
            known[number] = known[number]._replace(nbytes=round(known[number].nbytes * kept))
    late = (*again, *backward)
    side = _Side(known, prices)
    if merges:
        first = side.merged(phases.forward, work.forward.host, work.forward.seconds, within(phases.forward))
        second = side.merged(late, work.backward.host, work.backward.seconds, within(late))
        done = side.summed([*first, *second])
    else:
        first = side.plain(phases.forward, work.forward.host)
        done = [*first, *side.plain(late, work.backward.host)]
    return Coarse(tuple(done[: len(first)]), tuple(done[len(first) :]), side.storages, phases.lingering, _outgoing(backward, known))


def _renamed(phases: Phases, storages: Mapping[int, Storage]) -> tuple[list[Op], list[Op], dict[int, Storage]]:
    """What is computed again has storages of its own, apart from those of forward."""
    known = dict(storages)
    made = dict.fromkeys(number for op in phases.again for number in op.allocates)
    names = dict(zip(made, itertools.count(max(known, default=0) + 1), strict=False))
    known |= {name: known[number] for number, name in names.items()}
    if not names:
        return list(phases.again), list(phases.backward), known

    def renamed(op: Op) -> Op:
        def of(refs: Iterable[Ref]) -> tuple[Ref, ...]:
            return tuple([Ref(names.get(ref.storage, ref.storage), ref.spec) for ref in refs])

        numbers = [tuple([names.get(number, number) for number in found]) for found in (op.allocates, op.frees)]
        return replace(op, inputs=of(op.inputs), outputs=of(op.outputs), allocates=numbers[0], frees=numbers[1])

    return [renamed(op) for op in phases.again], [renamed(op) for op in phases.backward], known


def _outgoing(ops: Sequence[Op], storages: Mapping[int, Storage]) -> tuple[int, ...]:
    gone = {number for op in ops for number in op.frees}
    written = [number for op in ops for number in (*op.allocates, *(ref.storage for ref in op.outputs))]
    fixed = (types.GRADIENT, types.PARAMETER, types.BUFFER, types.INPUT)
    return tuple(number for number in dict.fromkeys(written) if number not in gone and storages[number].role not in fixed)


class _MergedOps:
    """Ops that become one: what is alive of theirs, and their highest point."""

    def __init__(self, base: int = 0, mark: str = "") -> None:
        self.ops: list[Op] = []
        self.base, self.mark = base, mark
        self.live = self.peak = 0
        """Bytes above `base`: now, and most."""
        self.alive: dict[int, int] = {}
        """Made here and not freed → bytes."""
        self.at_peak: dict[int, int] = {}
        self.beside: tuple[int, ...] = ()
        """What the op at the highest point held besides."""

    def added(self, op: Op, size: Callable[[int], int], beside: tuple[int, ...]) -> _MergedOps:
        """The group with one more op."""
        found = _MergedOps(self.base, self.mark)
        found.ops, found.alive = [*self.ops, op], dict(self.alive)
        found.live, found.peak, found.at_peak, found.beside = self.live, self.peak, self.at_peak, self.beside
        for number in op.allocates:
            found.alive[number] = size(number)
            found.live += found.alive[number]
        if found.live + sum(beside) > found.peak or not self.ops:
            found.peak, found.at_peak, found.beside = found.live + sum(beside), dict(found.alive), beside
        for number in op.frees:
            gone = found.alive.pop(number, None)
            found.live -= size(number) if gone is None else gone
        return found

    @property
    def held(self) -> tuple[int, ...]:
        """Sizes of what is there at the highest point and dies in the group."""
        return (*(size for number, size in self.at_peak.items() if number not in self.alive and size), *self.beside)

    @property
    def seems(self) -> int:
        """The highest point if all of it were one op."""
        return self.base + sum(self.alive.values()) + sum(self.held)


class _Side:
    """Merges the ops of one half of a piece."""

    def __init__(self, storages: dict[int, Storage], prices: Prices) -> None:
        self.storages, self.prices = storages, prices
        self.next = max(storages, default=0) + 1

    def plain(self, ops: Sequence[Op], host: float) -> list[Op]:
        """The ops as they are; what the host has to do besides comes as one more."""
        rest = host - self.prices.host(ops)
        if not ops or rest <= 0:
            return list(ops)
        return [*ops, merged(Merged(0.0, rest, "memory"), (), (), ops[-1].module, ops[-1].phase, 0, (), ())]

    def merged(self, ops: Sequence[Op], host: float, seconds: float, marks: Sequence[str]) -> list[Op]:
        apart = [op for op in ops if _alone(op)]
        known = self.prices.of((ops,))
        counted = sum(known[id(op)][1] for op in ops if not _alone(op))
        asked = self.prices.host([op for op in ops if not _alone(op)])
        rest = max(0.0, host - sum(self.prices.host([op]) for op in apart))
        factors = seconds / counted if counted else 1.0, rest / asked if asked else 1.0
        found: list[Op] = []
        for group in self._grouped(ops, marks):
            single = len(group.ops) == 1 and _alone(group.ops[0])
            found += group.ops if single else self._one(group, known, factors)
        return found

    # ------------------------------------------------------------------ which go together

    def _grouped(self, ops: Sequence[Op], marks: Sequence[str]) -> Iterator[_MergedOps]:
        """Greedily: as many as stay below the highest point of all of them."""
        peak, _ = self.prices.walk(ops, self.storages)
        made = sum(self._size(number) for op in ops for number in op.allocates)
        limit = peak + TOLERANCE * made
        group = _MergedOps()
        for op, mark in zip(ops, marks, strict=True):
            alone = _alone(op)
            beside = self._beside(op)
            more = group.added(op, self._size, beside)
            if group.ops and (alone or mark != group.mark or op.phase != group.ops[0].phase or more.seems > limit):
                yield group
                more = _MergedOps(group.base + group.live, mark).added(op, self._size, beside)
            more.mark, group = mark, more
            if alone:
                yield group
                group = _MergedOps(group.base + group.live)
        if group.ops:
            yield group

    def _size(self, number: int) -> int:
        storage = self.storages[number]
        return 0 if storage.host else rounded(storage.nbytes)

    def _beside(self, op: Op) -> tuple[int, ...]:
        """What an op holds besides its outputs, at most."""
        stages, extra = self.prices.sizes.scratch(op)
        most: tuple[int, ...] = max(stages, key=sum, default=())
        return (*map(rounded, most), *((rounded(extra),) if extra else ()))

    # ------------------------------------------------------------------ one op for several

    def _one(self, group: _MergedOps, known: Mapping[int, tuple[str, float]], factors: tuple[float, float]) -> Iterator[Op]:
        ops = group.ops
        born = [number for op in ops for number in op.allocates]
        gone = {number for op in ops for number in op.frees}
        mine = set(born)
        survive = [number for number in born if number not in gone]
        read: dict[int, Ref] = {}
        made: dict[int, Ref] = {}
        for op in ops:
            for ref in op.inputs:
                if ref.storage not in mine:
                    read.setdefault(ref.storage, ref)
            for ref in op.outputs:
                if ref.storage not in gone or ref.storage not in mine:
                    made.setdefault(ref.storage, ref)
        written = [ref for number, ref in made.items() if number not in mine and self._changes(ops, number)]
        outputs = [*written, *(made.get(n) or Ref(n, TensorSpec((self.storages[n].nbytes,), "uint8")) for n in survive)]
        gradients = [made[n] for n in survive if self.storages[n].role == types.GRADIENT and n in made]
        kept = [op for op in ops if op.name == DETACH and op.phase == "backward" and any(op.inputs[0].storage == g.storage for g in gradients)]
        seconds = sum(known[id(op)][1] for op in ops)
        hot = factors[0] * sum(known[id(op)][1] for op in ops if hungry(shape_of(op), known[id(op)][0]))
        beside = sum(known[id(op)][1] * self.prices.beside(op) for op in ops) / seconds if seconds else 0.0
        host = self.prices.host(ops) - (self.prices.host(kept[:1]) if kept else 0.0)
        yield merged(
            Merged(seconds * factors[0], host * factors[1], _family(ops, known), _products(ops), hot, beside, self._scratch(group.held)),
            list(read.values()), outputs, ops[0].module, ops[0].phase, sum(op.flops or 0 for op in ops), survive,
            [number for op in ops for number in op.frees if number not in mine],
        )  # fmt: skip
        if kept:
            refs = tuple(g for g in gradients if any(op.inputs[0].storage == g.storage for op in kept))
            yield Op(DETACH, refs, refs, ops[0].module, "backward", 0)

    @staticmethod
    def _changes(ops: Sequence[Op], number: int) -> bool:
        """Whether some op writes to a storage that was there: views of it do not."""
        return any(
            (any(ref.storage == number for ref in op.outputs) and short(op.name) in ("add", "copy")) or
            (op.name.split(".")[1].endswith("_") and any(ref.storage == number for ref in op.outputs))
            for op in ops
        )

    @staticmethod
    def _scratch(held: Sequence[int]) -> tuple[int, ...]:
        small = sum(size for size in held if size <= SMALL)
        return (*(size for size in held if size > SMALL), *((small,) if small else ()))

    def summed(self, ops: Sequence[Op]) -> list[Op]:
        """Small tensors that come with one op and go with another, as one."""
        dies = {number: place for place, op in enumerate(ops) for number in op.frees}
        names: dict[int, int] = {}
        for op in ops:
            groups: dict[int, list[int]] = {}
            for number in op.allocates:
                storage = self.storages[number]
                if number in dies and storage.nbytes <= BUNDLED and storage.role != types.GRADIENT and not storage.host and op.name == MERGED:
                    groups.setdefault(dies[number], []).append(number)
            for numbers in groups.values():
                if len(numbers) > 1:
                    names.update(dict.fromkeys(numbers[1:], numbers[0]))
                    total = sum(rounded(self.storages[number].nbytes) for number in numbers)
                    self.storages[numbers[0]] = self.storages[numbers[0]]._replace(nbytes=total)
        if not names:
            return list(ops)

        def refs(found: Sequence[Ref]) -> tuple[Ref, ...]:
            return tuple(ref for ref in found if ref.storage not in names)

        def numbers_of(found: Sequence[int]) -> tuple[int, ...]:
            return tuple(number for number in found if number not in names)

        return [
            replace(op, inputs=refs(op.inputs), outputs=refs(op.outputs), allocates=numbers_of(op.allocates), frees=numbers_of(op.frees))
            if op.name == MERGED else op for op in ops
        ]  # fmt: skip


def _alone(op: Op) -> bool:
    """Messages, and marks."""
    return op.name.startswith("foretell.")


def _products(ops: Sequence[Op]) -> int:
    names = {op.name for op in ops}
    return BIASED_PRODUCT if names & BIASED else PRODUCT if names & GEMMS else NO_PRODUCT


def _family(ops: Sequence[Op], known: Mapping[int, tuple[str, float]]) -> str:
    """What most of the seconds are spent on."""
    sums: dict[str, float] = {}
    for op in ops:
        family, seconds = known[id(op)]
        kind = ("attention" if family == "attention" else "gemm") if family in COMPUTE_KINDS else "memory"
        sums[kind] = sums.get(kind, 0.0) + seconds
    return max(sums, key=lambda kind: sums[kind], default="memory")
