"""One stage of a pipeline as its rank runs it: the ops of each kind of event, and what its storages are for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from foretell.lower.fsdp.sharded import format_of, reshard_of, wide_of
from foretell.lower.fsdp.units import FsdpSharding
from foretell.lower.fsdp.weave import loss_inside
from foretell.lower.pipeline.cut import CutStage
from foretell.lower.pipeline.halves import halves, unshared, weight_readers
from foretell.lower.pipeline.shard import StageWeaver, stage_trace
from foretell.lower.steps import adding
from foretell.lower.tensor import degree, whole_between
from foretell.plan.legal import SPLIT_BACKWARD
from foretell.plan.precision import MIXED
from foretell.plan.types import LOOPED, Plan
from foretell.trace import types
from foretell.trace.types import Op, Ref, Storage, Trace

RESIDENT, INPUT, HELD, TEMPORARY = "resident", "input", "held", "temporary"
RECEIVED, GRADIENT_RECEIVED, GRADIENT_SENT = "received", "gradient received", "gradient sent"
EACH = (INPUT, HELD, RECEIVED, GRADIENT_RECEIVED, GRADIENT_SENT)
"""Kinds of storages that every micro-batch has its own of."""


class StagePart:
    """A stage on its rank. Storages are numbered as in the trace of one device, with new ones behind."""

    def __init__(self, trace: Trace, stage: CutStage, plan: Plan) -> None:
        assert plan.pipeline is not None
        self.trace, self.plan = trace, plan
        self.index = stage.index
        self.split = plan.pipeline.schedule in SPLIT_BACKWARD
        self.looped = plan.pipeline.schedule in LOOPED
        self.storages: dict[int, Storage] = dict(trace.storages)
        for number in stage.aliases.values():
            self.storages[number] = self.storages[number]._replace(role=types.GRADIENT)
        self.stage = whole_between(stage, degree(trace), self.storages)
        stage = self.stage
        backward, twins = self._unshared()
        self.gradients_sent = tuple(Ref(twins.get(ref.storage, ref.storage), ref.spec) for ref in stage.gradients_sent)
        self.made = {n for op in backward for n in op.allocates if self.storages[n].role == types.GRADIENT}
        self.elsewhere: set[int] = set()
        """What ops of the update make that belong to other stages."""
        self.owned: dict[int, bool] = {}
        self.weaver = self._sharded(trace, plan)
        self.programs = self._events(backward)
        self.begun: set[str] = set()
        self.left = dict.fromkeys(self.programs, plan.accumulate)
        self.kinds = self._kinds()

    def _unshared(self) -> tuple[tuple[Op, ...], dict[int, int]]:
        """Backward that leaves alone what is not autograd's to write into: buffers, and what the second half needs."""
        stage = self.stage
        received = {ref.storage for ref in stage.gradients_received}
        sent = {ref.storage for ref in stage.gradients_sent}
        needed = weight_readers(stage.backward, sent, self.storages) if self.split and stage.index else {}
        written: set[int] = set()

        def held(number: int, position: int) -> bool:
            fresh = number in received and number not in written
            written.add(number)
            return fresh or needed.get(number, position) < position

        return unshared(stage.backward, self.storages, sent, held)

    def _sharded(self, trace: Trace, plan: Plan) -> StageWeaver | None:
        mesh = plan.mesh
        if mesh.spread == 1:
            return None
        ranks = mesh.dp_shard * mesh.cp
        way = FsdpSharding(
            ranks=ranks, replicate=mesh.dp_replicate, reshard=reshard_of(plan.reshard, ranks),
            wide=wide_of(trace), state_format=format_of(trace), reduce="float32" if plan.precision in MIXED else None,
        )  # fmt: skip
        seen = stage_trace(trace, self.stage.resident, self.made, self.storages)
        inside = bool(self.stage.gradients_received) or loss_inside(self.stage.forward)
        weaver = StageWeaver(seen, way, looped=self.looped, loss_inside=inside, split=self.split and self.index > 0)
        self.storages = weaver.storages.all
        return weaver

    def _events(self, backward: tuple[Op, ...]) -> dict[str, tuple[tuple[Op, ...], tuple[Op, ...]]]:
        """Kind of event → its ops, the first time in a step and later."""
        forward = (self.stage.forward, self.stage.forward)
        if not self.split:
            return {"F": forward, "B": (backward, self._later(backward))}
        if self.index == 0:  # nobody waits for it: all of its backward is done with the weights
            return {"F": forward, "I": ((), ()), "W": (backward, self._later(backward))}
        inputs, weights = halves(backward, [ref.storage for ref in self.gradients_sent], self.storages)
        return {"F": forward, "I": (inputs, inputs), "W": (weights, self._later(weights))}

    def _later(self, backward: Sequence[Op]) -> tuple[Op, ...]:
        if self.weaver is not None and self.weaver.widens and not self.weaver.split:
            return tuple(backward)
        return tuple(adding(backward, self.storages))

    def ops(self, kind: str) -> list[Op]:
        """What the next event of this kind does."""
        ops = self.programs[kind][kind in self.begun]
        first = not self.begun
        self.begun.add(kind)
        self.left[kind] -= 1
        weaver = self.weaver
        if weaver is None:
            return list(ops)
        before = weaver.gather_all() if first and self.looped else []
        if kind == "W" and weaver.split:
            if weaver.widens:
                ops = self.programs[kind][weaver.waiting]
            weaver.waiting = True
            done = list(ops)
        else:
            done = weaver.forward(ops) if kind == "F" else weaver.backward(ops) if ops else []
        over = kind in ("B", "W") and self.left[kind] == 0
        return [*before, *done, *(weaver.reduce_all() if over else [])]

    def resident(self) -> tuple[int, ...]:
        shards = self.weaver.shards() if self.weaver is not None else {}
        return tuple(shards.get(number, number) for number in self.stage.resident)

    def _kinds(self) -> dict[int, str]:
        """Storage → what it is for; those not named are there once and live within one event."""
        stage = self.stage
        inputs = [number for number in stage.resident if self.trace.storages[number].role == types.INPUT]
        across = [n for op in self.programs.get("I", ((), ()))[0] for n in op.allocates]
        return {
            **dict.fromkeys((*across, *stage.held), HELD),
            **dict.fromkeys([ref.storage for ref in stage.gradients_received], GRADIENT_RECEIVED),
            **dict.fromkeys([ref.storage for ref in self.gradients_sent], GRADIENT_SENT),
            **dict.fromkeys([ref.storage for ref in stage.received], RECEIVED),
            **dict.fromkeys(self.resident(), RESIDENT),
            **dict.fromkeys(stage.resident if self.weaver is None else (), RESIDENT),
            **dict.fromkeys(inputs, INPUT),
        }  # fmt: skip

    # ------------------------------------------------------------------ the update

    def update(self, ops: Sequence[Op]) -> list[Op]:
        """An update of all parameters as one of this stage's: of what it holds, on its shards."""
        if self.weaver is not None:
            ops = self.weaver.on_shards(ops)
        done = []
        for op in ops:
            inputs, outputs = self._mine(op.inputs), self._mine(op.outputs)
            if op.inputs and not inputs:  # of another stage alone, such as the norm of one of its gradients
                self.elsewhere.update(op.allocates)
                continue
            if (inputs or outputs) or not (op.inputs or op.outputs):
                allocates, frees = self._owned(op.allocates), self._owned(op.frees)
                done.append(replace(op, inputs=inputs, outputs=outputs, allocates=allocates, frees=frees))
        return done

    def _mine(self, refs: Sequence[Ref]) -> tuple[Ref, ...]:
        owns, named = self._owns, self.stage.aliases.get
        return tuple([Ref(named(number, number), spec) for number, spec in refs if owns(number)])

    def _owned(self, numbers: Sequence[int]) -> tuple[int, ...]:
        named = self.stage.aliases.get
        return tuple(dict.fromkeys([named(number, number) for number in numbers if self._owns(number)]))

    def _owns(self, number: int) -> bool:
        """Whether a storage of the update is this stage's."""
        found = self.owned.get(number)
        if found is not None:
            return found
        storage, named = self.storages[number], self.stage.aliases.get(number, number)
        if storage.role == types.GRADIENT or self.trace.storages.get(named, storage).role == types.GRADIENT:
            found = named in self.made or self._scattered(named)
        elif storage.role in (types.PARAMETER, types.GATHERED):
            found = self.kinds.get(named) == RESIDENT
        elif storage.role == types.OPTIMIZER:
            found = storage.module in self.stage.owners
        else:
            return named not in self.elsewhere  # that grows
        self.owned[number] = found
        return found

    def _scattered(self, number: int) -> bool:
        return self.weaver is not None and any(unit.gradient == number for unit in self.weaver.units.values() if unit.trained)
