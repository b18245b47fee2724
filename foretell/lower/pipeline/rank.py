"""The step of one rank of a pipeline: its stages' events in the schedule's order, then the update.

What a stage keeps between forward and backward is there once for every micro-batch in flight; buffers for what it
receives are there for all micro-batches of a step and stay. The first backward of a stage makes its gradients, the
others add to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from foretell.lower.blocks import blocks_of
from foretell.lower.fsdp.units import RECEIVE, SEND
from foretell.lower.pipeline.cut import cut
from foretell.lower.pipeline.order import Event, Order, orders
from foretell.lower.pipeline.part import (
    EACH,
    GRADIENT_RECEIVED,
    GRADIENT_SENT,
    INPUT,
    RECEIVED,
    RESIDENT,
    TEMPORARY,
    StagePart,
)
from foretell.plan.blocks import rank_of_stage, stages_of, stages_of_rank
from foretell.plan.types import Plan
from foretell.trace import types
from foretell.trace.types import Op, Program, Ref, Storage, TensorSpec, Trace

STEP = "step"
_PAIR = ("axis:pp", "ranks:2")
_UPDATES = ("update_first", "update", "zero_grad")


@dataclass(frozen=True)
class RankTrace:
    """A rank's step, and which of its ops belong to which event."""

    rank: int
    stages: tuple[int, ...]
    trace: Trace
    events: tuple[tuple[Event, int, int], ...]
    """Event, its first op and the one after its last, in the program `step`."""


def rank_traces(trace: Trace, plan: Plan, *, holds_sends: bool = False) -> tuple[RankTrace, ...]:
    """The step of every rank of the pipeline axis, from that of one device.

    `holds_sends`: what a schedule sends and does not wait for is held until the step ends, as NCCL's messages do.
    """
    assert plan.pipeline is not None
    stages = cut(trace, stages_of(plan, blocks_of(trace)))
    every = orders(plan.pipeline.schedule, plan.mesh.pp, plan.pipeline.stages, plan.accumulate)
    ties: dict[int, set[int]] = {}
    for stage in stages:
        for number in stage.tied:
            ties.setdefault(number, set()).add(rank_of_stage(plan, stage.index))
    holders = {number: sorted(ranks) for number, ranks in ties.items()}
    found = []
    for rank, order in enumerate(every):
        parts = [StagePart(trace, stages[index], plan) for index in stages_of_rank(plan, rank)]
        found.append(_Rank(trace, rank, parts, plan, holds_sends, holders).arranged(order))
    return tuple(found)


def arranged(
    trace: Trace, rank: int, parts: Sequence[StagePart], plan: Plan, order: Order, ties: Mapping[int, Sequence[int]]
) -> RankTrace:
    """The step of one rank that runs its stages' events in some order; `ties`: parameter that several ranks hold → those."""
    return _Rank(trace, rank, parts, plan, True, ties).arranged(order)


@dataclass
class _Rank:
    trace: Trace
    rank: int
    parts: Sequence[StagePart]
    plan: Plan
    holds_sends: bool
    ties: Mapping[int, Sequence[int]]
    """Parameter that stages on several ranks hold → those ranks."""
    storages: dict[int, Storage] = field(default_factory=dict)
    out: list[Op] = field(default_factory=list)
    names: dict[object, int] = field(default_factory=dict)
    """Stage, what it is and which one → storage of this rank."""
    sending: dict[int, list[int]] = field(default_factory=dict)
    """Stage → gradients that 1f1b sent last and still holds."""
    late: list[int] = field(default_factory=list)
    """Sent gradients that die when the step ends."""
    next_step: list[int] = field(default_factory=list)
    """Sent gradients that die when the next step begins."""
    slots: dict[int, dict[int, int]] = field(default_factory=dict)
    """Stage → micro-batch in flight → which of the stage's places it has."""
    renamed: dict[tuple[int, int], tuple[Op, Op]] = field(default_factory=dict)
    """Op and place → the same on this rank's storages; the op itself is kept so that no other has its id."""
    numbers: dict[tuple[int, int, int], dict[int, int]] = field(default_factory=dict)
    """Stage, micro-batch and its place → storage of the stage → that of this rank."""

    # ------------------------------------------------------------------ storages

    def name(self, key: object, storage: Storage) -> int:
        found = self.names.get(key)
        if found is None:
            found = self.names[key] = len(self.storages)
            self.storages[found] = storage
        return found

    def of(self, part: StagePart, number: int, micro: int) -> int:
        """The storage of this rank that stands for one of a stage's."""
        kind = part.kinds.get(number, TEMPORARY)
        which = 0 if kind not in EACH else micro if kind == GRADIENT_SENT else self.slots.get(part.index, {}).get(micro, micro)
        storage = part.storages[number]
        if kind == INPUT:
            return self.name((INPUT, number, which), storage)
        if kind in (RECEIVED, GRADIENT_RECEIVED):
            refs = part.stage.received if kind == RECEIVED else part.stage.gradients_received
            size = next(ref.spec.nbytes for ref in refs if ref.storage == number)
            storage = Storage(size, types.COMMUNICATION, storage.module)
        return self.name((part.index, kind, number, which), storage)

    def resident(self) -> tuple[int, ...]:
        found: list[int] = []
        for part in self.parts:
            for number in part.resident():
                counts = range(self.plan.accumulate) if part.kinds[number] == INPUT else (0,)
                found += [self.of(part, number, micro) for micro in counts]
        for part in self.parts:
            for refs in (part.stage.received, part.stage.gradients_received):
                found += [self.of(part, ref.storage, m) for m in range(self.plan.accumulate) for ref in refs]
        return tuple(dict.fromkeys(found))

    # ------------------------------------------------------------------ events

    def arranged(self, order: Order) -> RankTrace:
        events = []
        for event in order:
            start = len(self.out)
            self._event(event)
            events.append((event, start + 1, len(self.out) + 1))
        self._drop([*(number for numbers in self.sending.values() for number in numbers), *self.late])
        self._sum_ties()
        begin = Op("foretell.begin", (), (), "", "", 0, (), tuple(self.next_step))
        programs = {STEP: Program(STEP, (begin, *self.out))}
        for name in _UPDATES:
            programs[name] = Program(name, tuple(self._update(name)))
        schedule = {
            "first_step": ((STEP, 1), ("update_first", 1), ("zero_grad", 1)),
            "steady_step": ((STEP, 1), ("update", 1), ("zero_grad", 1)),
        }
        indices = tuple(part.index for part in self.parts)
        meta = {**self.trace.meta, "ranks": self.plan.mesh.world, "stages": list(indices)}
        trace = Trace(programs=programs, schedule=schedule, storages=self.storages, resident=self.resident(), meta=meta)
        return RankTrace(self.rank, indices, trace, tuple(events))

    def _event(self, event: Event) -> None:
        part = next(part for part in self.parts if part.index == event.stage)
        ops = part.ops(event.kind)
        slots = self.slots.setdefault(part.index, {})
        if event.kind == "F":
            slots[event.micro] = next(slot for slot in range(self.plan.accumulate) if slot not in slots.values())
            self._messages(RECEIVE, part, part.stage.received, event, "forward")
            self.out += self._renamed(part, ops, event.micro)
            self._messages(SEND, part, part.stage.sent, event, "forward")
            if self._here(part.index + 1):  # it takes the place of the next stage's buffer
                self._drop([self.of(part, ref.storage, event.micro) for ref in part.stage.sent])
            return
        if event.kind != "W":
            self._messages(RECEIVE, part, part.stage.gradients_received, event, "backward")
        self.out += self._renamed(part, ops, event.micro)
        if event.kind != "W":
            self._messages(SEND, part, part.gradients_sent, event, "backward")
            self._let_go(part, [self.of(part, ref.storage, event.micro) for ref in part.gradients_sent])
        if event.kind != "I":
            del slots[event.micro]

    def _let_go(self, part: StagePart, sent: list[int]) -> None:
        """When gradients that were sent die: 1f1b drops them after its next backward, gpipe and loops at once."""
        assert self.plan.pipeline is not None
        if self._here(part.index - 1):  # they take the place of the other stage's buffers
            self._drop(sent)
        elif part.split:  # they stay with the tensors that were received, until the next step begins
            self.next_step += sent
        elif self.plan.pipeline.schedule == "1f1b":
            self._drop(self.sending.get(part.index, []))
            self.sending[part.index] = sent
        elif self.holds_sends:
            self.late += sent
        else:
            self._drop(sent)

    def _drop(self, dying: Sequence[int]) -> None:
        if dying:
            self.out.append(Op("foretell.send_wait", (), (), "", "backward", 0, (), tuple(dying)))

    def _here(self, index: int) -> bool:
        """Whether a stage is on this rank."""
        return any(part.index == index for part in self.parts)

    def _messages(self, name: str, part: StagePart, refs: Sequence[Ref], event: Event, phase: str) -> None:
        if self._here(part.index + (1 if (name == SEND) == (phase == "forward") else -1)):
            return
        for ref in refs:
            moved = (Ref(self.of(part, ref.storage, event.micro), ref.spec),)
            inputs, outputs = (moved, ()) if name == SEND else ((), moved)
            self.out.append(Op(name, inputs, outputs, "", phase, 0, attrs=_PAIR))

    def _renamed(self, part: StagePart, ops: Sequence[Op], micro: int) -> Iterator[Op]:
        place = self.slots.get(part.index, {}).get(micro, -1 - micro)
        sent = {ref.storage for ref in part.gradients_sent}
        for op in ops:
            known = self.renamed.get((id(op), place))
            if known is None or known[0] is not op:
                known = (op, self._rename(part, op, micro))
                if not any(ref.storage in sent for ref in (*op.inputs, *op.outputs)):
                    self.renamed[id(op), place] = known
            yield known[1]

    def _rename(self, part: StagePart, op: Op, micro: int) -> Op:
        place = self.slots.get(part.index, {}).get(micro, micro)
        known = self.numbers.setdefault((part.index, micro, place), {})

        def of(number: int) -> int:
            found = known.get(number)
            if found is None:
                found = known[number] = self.of(part, number, micro)
            return found

        return Op(
            op.name, tuple([Ref(of(number), spec) for number, spec in op.inputs]),
            tuple([Ref(of(number), spec) for number, spec in op.outputs]), op.module, op.phase, op.flops,
            tuple([of(number) for number in op.allocates]), tuple([of(number) for number in op.frees]), op.attrs,
        )  # fmt: skip

    # ------------------------------------------------------------------ parameters that several stages hold

    def _sum_ties(self) -> None:
        """Their gradients: the first holder sums what the others send, and sends the sum back."""
        for number in sorted({number for part in self.parts for number in part.stage.tied}):
            holders = self.ties[number]
            if len(holders) < 2:
                continue
            part = next(part for part in self.parts if number in part.stage.tied)
            kept = part.weaver.shards()[number] if part.weaver is not None else number
            size = part.storages[kept].nbytes
            sums = holders[0] == self.rank
            refs = [Ref(self.name(("tie", number, i), Storage(size, types.COMMUNICATION, "")), TensorSpec((size,), "uint8")) for i in (0, 1)]
            if sums:
                self.out.append(Op("aten.clone.default", (), (refs[0],), "", "backward", 0, (refs[0].storage,)))
            for _ in holders[1:] if sums else holders[:1]:
                born = (refs[1].storage,)
                self.out.append(Op(RECEIVE, (), (refs[1],), "", "backward", 0, born, born, attrs=_PAIR))
                self.out.append(Op(SEND, (refs[0],), (), "", "backward", 0, attrs=_PAIR))
            if sums:
                self._drop([refs[0].storage])

    # ------------------------------------------------------------------ the update

    def _update(self, name: str) -> Iterator[Op]:
        """One update of what all stages of this rank hold."""
        ops = self.trace.programs[name].ops
        if len(self.parts) == 1:
            yield from self._renamed(self.parts[0], self.parts[0].update(ops), 0)
            return
        for one in ops:  # lists of all stages are updated together
            mine = [(part, op) for part in self.parts for op in part.update((one,))]
            if mine:
                yield self._joined(mine)

    def _joined(self, mine: Sequence[tuple[StagePart, Op]]) -> Op:
        renamed = [next(self._renamed(part, (op,), 0)) for part, op in mine]
        first = renamed[0]
        return replace(
            first, inputs=tuple(ref for op in renamed for ref in op.inputs),
            outputs=tuple(ref for op in renamed for ref in op.outputs),
            allocates=tuple(n for op in renamed for n in op.allocates), frees=tuple(n for op in renamed for n in op.frees),
        )  # fmt: skip


__all__ = ["GRADIENT_SENT", "RESIDENT", "STEP", "RankTrace", "rank_traces"]
