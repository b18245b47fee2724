"""The step of one device cut into pipeline stages: which ops each runs forward and backward, and what crosses.

    one device    │ head │ 0 │ 1 │ 2 │ 3 │ tail, loss │ 3' │ 2' │ 1' │ 0' │ head' │
    stage 0       │ head │ 0 │ 1 │→                                →│ 1' │ 0' │ head' │
    stage 1                     →│ 2 │ 3 │ tail, loss │ 3' │ 2' │→

What runs before a stage's first block belongs to the stage before; what depends on the batch alone (masks, positions) is
computed again on every later stage. A tensor that a stage sends is held until its backward there has ended; one that it
receives lies in a buffer that stays. A parameter that two stages use is there twice, with two gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from foretell.lower.blocks import blocks_of
from foretell.lower.fsdp.sharded import block_of
from foretell.trace import types
from foretell.trace.types import Op, Ref, Trace

_LATE = ("backward", "recompute")
_MARKS = ("foretell.begin", "foretell.model_end")


@dataclass(frozen=True, kw_only=True)
class CutStage:
    """What one stage does with one micro-batch. Storages are numbered as in the trace of one device."""

    index: int
    forward: tuple[Op, ...]
    backward: tuple[Op, ...]
    received: tuple[Ref, ...] = ()
    """From the stage before, forward."""
    sent: tuple[Ref, ...] = ()
    gradients_received: tuple[Ref, ...] = ()
    gradients_sent: tuple[Ref, ...] = ()
    resident: tuple[int, ...] = ()
    """Parameters and buffers that it holds; and the batch."""
    held: tuple[int, ...] = ()
    """Made in forward and alive until backward: there once for every micro-batch in flight."""
    tied: frozenset[int] = frozenset()
    """Parameters that another stage holds too."""
    owners: frozenset[str] = frozenset()
    """Modules whose parameters it holds."""
    aliases: Mapping[int, int] = field(default_factory=dict)
    """Gradient on one device → the storage that is this stage's gradient of the same parameter, where they differ."""


def cut(trace: Trace, stages: Sequence[Sequence[str]]) -> tuple[CutStage, ...]:
    """The stages of a micro-batch; `stages` are the blocks of each."""
    work = _Cut(trace, stages)
    return tuple(work.stage(index) for index in range(len(stages)))


def some(trace: Trace, stages: Sequence[Sequence[str]], wanted: Iterable[int]) -> tuple[CutStage, ...]:
    """The same of some of the stages."""
    work = _Cut(trace, stages)
    return tuple(work.stage(index) for index in wanted)


@dataclass
class _Cut:
    trace: Trace
    stages: Sequence[Sequence[str]]
    ops: tuple[Op, ...] = ()
    where: list[int] = field(default_factory=list)
    """Stage of every op."""
    born: dict[int, int] = field(default_factory=dict)
    """Storage → position of the op that makes it."""
    died: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ops = self.trace.programs["micro_first"].ops
        self.start = next((i for i, op in enumerate(self.ops) if op.phase in _LATE), len(self.ops))
        for position, op in enumerate(self.ops):
            self.born.update((number, position) for number in op.allocates)
            self.died.update((number, position) for number in op.frees)
        self._assign()
        self._taint()
        self.sums, self.aliases = _shared_sums(self)
        self.apart = {number for found in self.aliases.values() for pair in found.items() for number in pair}
        self._use()

    # ------------------------------------------------------------------ which op is whose

    def _assign(self) -> None:
        of_block = {block: index for index, blocks in enumerate(self.stages) for block in blocks}
        last = len(self.stages) - 1
        blocks = block_of(self.ops, blocks_of(self.trace))
        ends = max((i for i in range(self.start) if blocks[i]), default=-1)
        modules: dict[str, int] = {}
        here = 0
        for position in range(self.start):
            if blocks[position]:
                here = of_block[blocks[position]]
            elif position > ends >= 0:
                here = last
            self.where.append(here)
            if self.ops[position].module and not blocks[position]:
                modules.setdefault(self.ops[position].module, here)
        here = last
        for position in range(self.start, len(self.ops)):
            op = self.ops[position]
            if blocks[position]:
                here = of_block[blocks[position]]
            elif op.module in modules:
                here = modules[op.module]
            else:
                made = [self.where[self.born[ref.storage]] for ref in op.inputs if self.born.get(ref.storage, self.start) < self.start]
                here = min(here, *made) if made else here
            self.where.append(here)

    def _taint(self) -> None:
        """Which storages depend on parameters; the others follow from the batch alone."""
        tainted = {number for number, storage in self.trace.storages.items() if storage.role == types.PARAMETER}
        blocks = block_of(self.ops[: self.start], blocks_of(self.trace))
        self.plain: list[int] = []
        for position in range(self.start):
            op = self.ops[position]
            if any(ref.storage in tainted for ref in op.inputs) or (blocks[position] and _writes(op)):
                tainted.update(ref.storage for ref in op.outputs)
                tainted.update(op.allocates)
            elif blocks[position]:  # a view of what follows from the batch alone is no reason to send it
                tainted.update(op.allocates)
            elif op.name not in _MARKS and op.outputs:
                self.plain.append(position)
        self.tainted = tainted

    def _use(self) -> None:
        """By stage: storages that its forward and its backward read or write."""
        count = len(self.stages)
        self.used: list[tuple[set[int], set[int]]] = [(set(), set()) for _ in range(count)]
        for position, op in enumerate(self.ops):
            if op.name in _MARKS:
                continue
            uses = self.used[self.where[position]][position >= self.start]
            uses.update(ref.storage for ref in (*op.inputs, *op.outputs))

    # ------------------------------------------------------------------ one stage

    def stage(self, index: int) -> CutStage:
        forward = [p for p in range(self.start) if self.where[p] == index]
        backward = [p for p in range(self.start, len(self.ops)) if self.where[p] == index]
        again = [p for p in self.plain if self.where[p] < index and (not forward or p < forward[0])]
        forward = [*again, *forward]
        received, sent = self._crossing(index), self._crossing(index + 1)
        back, given = self._crossing_back(index + 1), self._crossing_back(index)
        resident, tied = self._resident(index)
        done = _Deaths(self, index, forward, backward, {ref.storage for ref in sent}, {ref.storage for ref in given})
        return CutStage(
            index=index, forward=done.forward, backward=done.backward, received=received, sent=sent,
            gradients_received=back, gradients_sent=given, resident=resident, held=done.held, tied=tied,
            owners=frozenset(
                self.trace.storages[n].module for n in resident if self.trace.storages[n].role == types.PARAMETER
            ),
            aliases=done.aliases,
        )  # fmt: skip

    def _crossing(self, index: int) -> tuple[Ref, ...]:
        """What stages before `index` make in forward and it, or a later one, reads: handed from stage to stage."""
        if not 0 < index < len(self.stages):
            return ()
        read: dict[int, Ref] = {}
        for position in range(self.start):
            if self.where[position] >= index:
                for ref in self.ops[position].inputs:
                    made = self.born.get(ref.storage)
                    if made is not None and self.where[made] < index and ref.storage in self.tainted:
                        read.setdefault(ref.storage, ref)
        return tuple(read.values())

    def _crossing_back(self, index: int) -> tuple[Ref, ...]:
        """What stage `index` and later ones make in backward and an earlier one reads."""
        if not 0 < index < len(self.stages):
            return ()
        read: dict[int, Ref] = {}
        for position in range(self.start, len(self.ops)):
            if self.where[position] < index:
                for ref in self.ops[position].inputs:
                    made = self.born.get(ref.storage, -1)
                    if made >= self.start and self.where[made] >= index and ref.storage not in self.apart:
                        read.setdefault(ref.storage, ref)
        return tuple(read.values())

    def _resident(self, index: int) -> tuple[tuple[int, ...], frozenset[int]]:
        mine = self.used[index][0] | self.used[index][1]
        early = {ref.storage for p in self.plain for ref in self.ops[p].inputs}
        holders: dict[int, int] = {}
        for forward, backward in self.used:
            for number in forward | backward:
                holders[number] = holders.get(number, 0) + 1
        found, tied = [], set()
        unused = {number for number in self.trace.resident if number not in holders}
        for number in self.trace.resident:
            role = self.trace.storages[number].role
            if role == types.PARAMETER:
                if number in mine or (number in unused and index == 0):
                    found.append(number)
                    tied.update([number] if holders.get(number, 0) > 1 else [])
            elif role == types.INPUT or number in mine or number in early or number in unused:
                found.append(number)
        return tuple(found), frozenset(tied)


def _writes(op: Op) -> bool:
    """Whether it changes a tensor in place."""
    return op.name.split(".")[1].endswith("_")


class _Deaths:
    """A stage's ops with the deaths that are its own to decide."""

    def __init__(
        self, cut: _Cut, index: int, forward: Sequence[int], backward: Sequence[int], sent: set[int], given: set[int]
    ) -> None:
        ops, where = cut.ops, cut.where
        mine = set(forward) | set(backward)
        later_reads: dict[int, int] = {}
        for position in backward:
            later_reads.update((ref.storage, position) for ref in (*ops[position].inputs, *ops[position].outputs))
        dying: dict[int, list[int]] = {}
        held: list[int] = []
        for position in forward:
            for number in ops[position].allocates:
                death = cut.died.get(number)
                if number in sent:
                    when = -2
                elif death in mine and where[death] == index:
                    when = death
                else:
                    when = later_reads.get(number, -1)
                dying.setdefault(when, []).append(number)
                if when == -2 or when >= cut.start:
                    held.append(number)
        gradients, self.aliases = cut.sums, cut.aliases.get(index, {})
        staying = {*given, *self.aliases.values()}
        for position in backward:
            for number in ops[position].allocates:
                death = cut.died.get(number)
                if death is None or cut.trace.storages[number].role == types.GRADIENT or number in staying:
                    continue
                dying.setdefault(death if death in mine else -2, []).append(number)
        self.held = tuple(held)
        self.forward = _closed([ops[p] for p in forward], forward, dying, -1)
        self.backward = _closed([gradients.get(p, ops[p]) for p in backward], backward, dying, -2)


def _shared_sums(cut: _Cut) -> tuple[dict[int, Op], dict[int, dict[int, int]]]:
    """Additions of two stages' gradients of one parameter, which no stage makes: (position → what is left of it), and
    by stage the gradient on one device → its own."""
    found: dict[int, Op] = {}
    aliases: dict[int, dict[int, int]] = {}
    for position in range(cut.start, len(cut.ops)):
        op = cut.ops[position]
        if op.name != "aten.add.Tensor" or not op.outputs or cut.trace.storages[op.outputs[0].storage].role != types.GRADIENT:
            continue
        total = op.outputs[0].storage
        made = {ref.storage: cut.where[cut.born[ref.storage]] for ref in op.inputs if cut.born.get(ref.storage, -1) >= cut.start}
        if len(set(made.values())) < 2:
            continue
        here = cut.where[position]
        for number, stage in made.items():
            if number != total:
                aliases.setdefault(stage, {})[total] = number
        own = tuple(ref for ref in op.inputs if made.get(ref.storage) == here)
        found[position] = replace(op, name="aten.detach.default", inputs=own, outputs=own, allocates=(), flops=0)
        if total in op.allocates:
            aliases.setdefault(here, {})[total] = own[0].storage
    return found, aliases


def _closed(
    ops: Sequence[Op], positions: Sequence[int], dying: Mapping[int, Iterable[int]], at_end: int
) -> tuple[Op, ...]:
    done = [
        replace(op, frees=_in_order(op.frees, tuple(dying.get(position, ()))))
        for op, position in zip(ops, positions, strict=True)
    ]
    if done and dying.get(at_end):
        done[-1] = replace(done[-1], frees=(*done[-1].frees, *dying[at_end]))
    return tuple(done)


def _in_order(before: tuple[int, ...], dying: Sequence[int]) -> tuple[int, ...]:
    kept = [number for number in before if number in dying]
    return (*kept, *(number for number in dying if number not in kept))
