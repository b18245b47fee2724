"""A pipeline stage whose parameters are sharded: what fully_shard does around each micro-batch, and at the end.

Between micro-batches nothing is reduced. A block's parameters stay whole after its backward until its next forward
gives them back, if they are to be; whole gradients are added up, in the dtype they are reduced in. After the stage's
last backward every unit's are scattered (and summed over replicas), the root's first.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence

from foretell.lower.fsdp.sharded import on_shards
from foretell.lower.fsdp.units import ALONE, FsdpSharding, FsdpUnit, Storages, units_of
from foretell.lower.fsdp.weave import Weaver
from foretell.trace import types
from foretell.trace.types import Op, Ref, Storage, TensorSpec, Trace
from foretell.units import DTYPE_BYTES


class StageWeaver(Weaver):
    """Weaves the events of one stage in the order they come; storages are those of the trace of one device."""

    def __init__(self, trace: Trace, way: FsdpSharding, *, looped: bool, loss_inside: bool, split: bool) -> None:
        self.storages = Storages(trace.storages)
        units = units_of(trace, way, self.storages)
        super().__init__(units, way, ChainMap(dict(trace.storages), self.storages.all), role=ALONE)
        self.loss_inside = loss_inside
        """Backward begins with the model: no loss after it, or one that the model itself computes."""
        self.split = split
        """Weights' gradients come in a pass of their own, which fully_shard does not see: it takes them up when it next
        sees a backward, and until then they stand beside those that are added up."""
        self.waiting = not split
        """There are gradients to take up."""
        self.looped = looped
        """The schedule itself gathers a stage before its first event and gives it back after its last."""
        self.sums: dict[int, int] = {}
        """Whole gradient → where it is added up, in another dtype."""
        self.added: set[str] = set()
        """Units with gradients from an earlier micro-batch."""
        for unit in units.values():
            for number in unit.gradients if self._widens(unit) else ():
                dtype = unit.trained[0].spec.dtype
                size = self.old[number].nbytes // DTYPE_BYTES[dtype] * DTYPE_BYTES[way.summed(dtype)]
                self.sums[number] = self.storages.add(size, types.GRADIENT, unit.path)

    def _widens(self, unit: FsdpUnit) -> bool:
        return any(self.way.summed(piece.spec.dtype) != piece.spec.dtype for piece in unit.trained)

    @property
    def widens(self) -> bool:
        """Whether gradients are added up apart, so that every backward makes new ones."""
        return bool(self.sums)

    def forward(self, ops: Sequence[Op]) -> list[Op]:
        self.phase, self.out = "forward", []
        self._forward(ops)
        return self.out

    def backward(self, ops: Sequence[Op]) -> list[Op]:
        self.phase, self.out = "backward", []
        self._backward(ops, self.loss_inside)
        self.waiting = not self.split
        return self.out

    def gather_all(self) -> list[Op]:
        """Before a looped schedule first runs the stage: all of it, at once."""
        self.phase, self.out = "forward", []
        waiting = [unit for path, unit in self.units.items() if unit.parameters and path not in self.whole]
        for unit in waiting:
            self._start_gather(unit)
        for unit in waiting:
            self._copy_out(unit, *([unit.gather_output] if self.way.ranks > 1 else []))
        return self.out

    def reduce_all(self) -> list[Op]:
        """After the stage's last backward: every unit is given back and its gradients are reduced."""
        self.phase, self.out = "backward", []
        self.order.clear()
        for path, unit in self.units.items():
            if self.split and self.waiting:
                self._after_backward(path)
            real = list(unit.gradients)
            unit.gradients = [self.sums.get(number, number) for number in real]
            super()._after_backward(path)
            unit.gradients = real
        held = (self.held_reduce,) if self.held_reduce is not None else ()
        self._emit("foretell.reduce_scatter_wait", "", frees=(*held, *self.held_sums))
        self.held_reduce, self.held_sums = None, []
        self.waiting = not self.split
        self.added.clear()
        return self.out

    def _gradients(self, unit: FsdpUnit) -> list[Ref]:
        return [Ref(number, TensorSpec((self.storages.all[number].nbytes,), "uint8")) for number in unit.gradients]

    def _after_backward(self, path: str) -> None:
        """Whole gradients are kept, or added up in the dtype they will be reduced in."""
        unit = self.units[path]
        fresh = [number for number in unit.gradients if number in self.sums] if self.waiting else []
        for number in fresh:
            size = self.storages.all[number].nbytes
            grad = Ref(number, TensorSpec((size // DTYPE_BYTES[unit.trained[0].spec.dtype],), unit.trained[0].spec.dtype))
            total = Ref(self.sums[number], TensorSpec(grad.spec.shape, self.way.summed(grad.spec.dtype)))
            if path in self.added:
                self._emit("aten.add_.Tensor", path, (total, grad), (total,), frees=(number,))
            else:
                self._emit("aten._to_copy.default", path, (grad,), (total,), allocates=(total.storage,), frees=(number,))
        if fresh:
            self.added.add(path)

    def _finish_backward(self) -> None:
        """Nothing is waited for until the stage's last backward."""

    def on_shards(self, ops: Sequence[Op]) -> tuple[Op, ...]:
        """The update on this rank's shards."""
        return on_shards(ops, self.units, self.way, self.storages)

    def shards(self) -> dict[int, int]:
        return {whole: kept for unit in self.units.values() for whole, kept in unit.shards.items()}


def stage_trace(trace: Trace, resident: Sequence[int], made: set[int], storages: Mapping[int, Storage]) -> Trace:
    """The trace as one stage sees it: parameters and gradients of other stages are no business of its."""
    own = set(resident)

    def role(number: int, storage: Storage) -> Storage:
        foreign = storage.role == types.GRADIENT and number not in made
        return storage._replace(role=types.TEMPORARY) if foreign else storage

    return Trace(
        programs=trace.programs, schedule=trace.schedule,
        storages={number: role(number, storage) for number, storage in storages.items()},
        resident=tuple(number for number in trace.resident if number in own), meta=trace.meta,
    )  # fmt: skip
