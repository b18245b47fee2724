"""The ops of a micro-batch woven together with what fully_shard does around them: gather, copy, scatter, sum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from foretell.lower.fsdp.units import (
    ADD,
    BEGIN,
    COLLECTIVES,
    DP_REPLICATE,
    DP_SHARD,
    END,
    MODEL_END,
    MORE,
    FsdpSharding,
    FsdpUnit,
    ShardedParameter,
    unit_of,
)
from foretell.trace import types
from foretell.trace.types import Op, Ref, Storage, TensorSpec
from foretell.units import DTYPE_BYTES

T = TypeVar("T")
_BACKWARD = ("backward", "recompute")
_BEFORE_GATHER = ("foretell.begin", "aten._to_copy.default")
"""What may come before a unit's parameters are gathered: the casts of its inputs."""


class Weaver:
    """Writes the ops of a micro-batch, or of an evaluation, with what FSDP2 does around them."""

    def __init__(
        self, units: Mapping[str, FsdpUnit], way: FsdpSharding, old: Mapping[int, Storage], *, role: str, within: bool = False
    ) -> None:
        self.units, self.way, self.old = units, way, old
        self.within = within
        """Units lie within others, which are woven after them: what is done early for one belongs to the one at work."""
        self.out: list[Op] = []
        self.phase = "forward"
        self.role = role
        self.whole: set[str] = set()
        self.pending: set[str] = set()
        """Units whose all-gather was started and not yet copied out."""
        self.order: list[str] = []
        """Units in the order in which their forward ended, which is what backward prefetches by."""
        self.ended = False
        """The model's forward is over: what follows, the loss, needs nothing of the root."""
        self.spread: set[str] = set()
        """Units of which fewer ranks hold the parameters together since forward."""
        self.held_gather: int | None = None
        self.held_reduce: int | None = None
        self.held_sums: list[int] = []
        """What is summed over replicas, held until backward has ended."""
        self.lists: dict[tuple[str, str], Any] = {}
        """What is the same each time a unit is gathered or reduced."""

    def weave(self, ops: Sequence[Op]) -> tuple[Op, ...]:
        start = next((i for i, op in enumerate(ops) if op.phase in _BACKWARD), len(ops))
        self._forward(ops[:start])
        if start < len(ops):
            self.phase = "backward"
            self._backward(ops[start:], loss_inside(ops[:start]))
        return tuple(self.out)

    def _forward(self, ops: Sequence[Op]) -> None:
        end = _model_end(ops, self.old)
        inside = ""
        for position, op in enumerate(ops):
            unit = unit_of(op.module, self.units)
            if unit != inside:
                self._gather(inside)
                self._leave(inside)
                inside = unit
            if op.name not in _BEFORE_GATHER or op.module != unit:
                self._gather(unit)
            if position == end:
                self._end_of_model()
            self.out.append(op)
        self._leave(inside)
        if end >= len(ops):
            self._end_of_model()

    def _gather(self, path: str) -> None:
        """Make a unit whole before its forward; the result of the gather before goes only after that."""
        unit = self.units[path]
        if path in self.whole or not unit.parameters or (self.ended and not path):
            return
        self._start_gather(unit)
        self._copy_out(unit, *([self.held_gather] if self.held_gather is not None else []))
        self.held_gather = unit.gather_output if self.way.ranks > 1 else None

    def _leave(self, path: str) -> None:
        """A block's parameters are given back after its forward, if they are to be."""
        if path and self.units[path].parameters:
            if self.way.after(path) > 1:
                self._spread(self.units[path])
            elif self.way.after(path):
                self._reshard(self.units[path])
            self.order.append(path)

    def _end_of_model(self) -> None:
        self.ended = True
        if self.units[""].parameters:
            self.order.append("")
        if self.held_gather is not None:
            self._emit("foretell.all_gather_wait", "", frees=(self.held_gather,))
            self.held_gather = None
        if self.way.after("") and self.units[""].parameters:
            (self._spread if self.way.after("") > 1 else self._reshard)(self.units[""])

    def _backward(self, ops: Sequence[Op], from_model: bool) -> None:
        begin = 0 if from_model else _model_begin(ops, self.old)
        inside, found = "", _backward_units(ops, self.units)
        last = {unit: position for position, unit in enumerate(found)} if self.within else {}
        for position, (op, unit) in enumerate(zip(ops, found, strict=True)):
            if position == begin:
                self._before_backward("")
            if unit != inside:
                if inside and last.get(inside, -1) < position:
                    self._after_backward(inside)
                self._before_backward(unit)
                inside = unit
            self.out.append(op)
        if inside:
            self._after_backward(inside)
        for path in self.units:
            if path == "" or path in self.whole:
                self._after_backward(path)
        self._finish_backward()

    def _finish_backward(self) -> None:
        held = (self.held_reduce,) if self.held_reduce is not None else ()
        left = (self.units[path].gather_output for path in sorted(self.pending)) if self.way.ranks > 1 else ()
        self._emit("foretell.reduce_scatter_wait", "", frees=(*held, *left, *self.held_sums))

    def _before_backward(self, path: str) -> None:
        """Make a unit whole and start to gather the one that comes next."""
        unit = self.units[path]
        if path not in self.order:
            return
        if path not in self.whole:
            if path not in self.pending:
                self._start_gather(unit)
            self._copy_out(unit, *([unit.gather_output] if self.way.ranks > 1 else []))
            self.pending.discard(path)
        index = len(self.order) - 1 - self.order[::-1].index(path)
        self.order[index] = "done"
        target = self.order[index - 1] if index else path
        if target in self.units and target not in self.whole and target not in self.pending:
            self._start_gather(self.units[target], path if self.within else target)
            self.pending.add(target)

    def _after_backward(self, path: str) -> None:
        """Give a unit's parameters back and reduce its gradients, which are there after its last call only."""
        unit = self.units[path]
        held = (self.held_reduce,) if self.held_reduce is not None else ()
        self.held_reduce = None
        self._reshard(unit, *held)
        if not unit.trained or path in self.order:
            return
        flat = self._once(unit, "flat", lambda: sum(piece.rows(self.way).numel for piece in unit.trained))
        dtypes = {piece.spec.dtype for piece in unit.trained}
        dtype = dtypes.pop() if len(dtypes) == 1 else "bfloat16"
        summed, whole = self.way.summed(dtype), self.way.kept(dtype)
        source = Ref(unit.reduce_input, TensorSpec((self.way.ranks * flat,), summed))
        self._emit(
            "foretell.reduce_scatter_copy_in", path, self._gradients(unit), (source,),
            allocates=(unit.reduce_input,), frees=tuple(unit.gradients),
        )  # fmt: skip
        self.held_reduce = unit.reduce_input
        if self.way.replicate > 1:
            self._sum_over_replicas(unit, source, TensorSpec((flat,), summed))
            return
        kept = unit.more_gradient if self.role == ADD else unit.gradient
        scattered = unit.reduce_output if unit.reduce_output >= 0 else kept
        made = (Ref(kept, TensorSpec((flat,), whole)),)
        born = tuple(dict.fromkeys((scattered, kept)))
        self._emit(
            "foretell.reduce_scatter" if self.way.ranks > 1 else "aten.copy_.default", path, (source,), made,
            allocates=born, frees=tuple(number for number in born if number != unit.gradient),
        )  # fmt: skip

    def _sum_over_replicas(self, unit: FsdpUnit, source: Ref, spec: TensorSpec) -> None:
        """Scatter inside the group (or copy, where it is one rank); then hold the result, or sum it over groups."""
        apart = unit.reduce_output >= 0
        scattered = Ref(unit.reduce_output if apart else unit.gradient, spec)
        held = Ref(unit.partial, spec)
        name = "foretell.reduce_scatter" if self.way.ranks > 1 else "aten.copy_.default"
        target = held if self.role == BEGIN else scattered
        self._emit(name, unit.path, (source,), (target,), allocates=(target.storage,))
        if self.role == BEGIN:
            return
        if self.role in (MORE, END):
            into = held if self.role == MORE else scattered
            frees = (scattered.storage,) if self.role == MORE else ()
            self._emit("aten.add_.Tensor", unit.path, (held, scattered), (into,), frees=frees)
        if self.role == MORE:
            return
        self._emit(
            "foretell.all_reduce", unit.path, (scattered,), (scattered,), axis=DP_REPLICATE,
            allocates=(unit.gradient,) if apart else (), frees=(unit.partial,) if self.role == END else (),
        )  # fmt: skip
        self.held_sums.extend([scattered.storage] if apart else [])

    def _gradients(self, unit: FsdpUnit) -> list[Ref]:
        """The whole gradients of a unit, each as flat bytes of its storage."""
        return [Ref(number, TensorSpec((self.old[number].nbytes,), "uint8")) for number in unit.gradients]

    def _start_gather(self, unit: FsdpUnit, where: str | None = None) -> None:
        if self.way.ranks == 1:
            return
        if unit.path in self.spread:
            inputs = self._once(unit, "parts", lambda: tuple(Ref(unit.parts[one.storage], self._part(one, unit)) for one in unit.parameters))
            source, ranks = unit.part_input, int(self.way.after(unit.path))
        else:
            inputs = self._once(unit, "shards", lambda: tuple(Ref(unit.shards[p.storage], p.rows(self.way)) for p in unit.parameters))
            source, ranks = unit.gather_input, self.way.ranks
        self._emit(
            "foretell.all_gather", unit.path if where is None else where, inputs, (self._gathered(unit),),
            allocates=(source, unit.gather_output), frees=(source,), ranks=ranks,
        )  # fmt: skip

    def _copy_out(self, unit: FsdpUnit, *frees: int) -> None:
        self.whole.add(unit.path)
        if self.way.ranks == 1:
            self._copy(unit)
            return
        parts: tuple[int, ...] = ()
        if unit.path in self.spread:
            parts = tuple(unit.parts[piece.storage] for piece in unit.parameters)
            self.spread.discard(unit.path)
        whole = self._once(unit, "whole", lambda: tuple(Ref(piece.storage, piece.spec) for piece in unit.parameters))
        self._emit(
            "foretell.all_gather_copy_out", unit.path, (self._gathered(unit),), whole,
            allocates=tuple(ref.storage for ref in whole), frees=(*parts, *frees),
        )  # fmt: skip

    def _copy(self, unit: FsdpUnit) -> None:
        """Plain replicas: each parameter is cast and copied; a cast goes when the next one is made."""
        before: tuple[int, ...] = ()
        for piece in unit.parameters:
            source, cast = Ref(unit.shards[piece.storage], piece.rows(self.way)), unit.casts.get(piece.storage)
            if cast is not None:
                low = Ref(cast, piece.spec)
                self._emit("aten._to_copy.default", unit.path, (source,), (low,), allocates=(cast,), frees=before)
                source, before = low, (cast,)
            whole = Ref(piece.storage, piece.spec)
            self._emit("aten.copy_.default", unit.path, (whole, source), (whole,), allocates=(piece.storage,))
        if before:
            self._emit("foretell.all_gather_wait", unit.path, frees=before)

    def _spread(self, unit: FsdpUnit) -> None:
        """Keep the part of each parameter that fewer ranks share, and give the whole back."""
        for piece in unit.parameters if unit.path in self.whole else ():
            part = Ref(unit.parts[piece.storage], self._part(piece, unit))
            self._emit("aten.clone.default", unit.path, (part._replace(storage=piece.storage),), (part,),
                       allocates=(part.storage,), frees=(piece.storage,))  # fmt: skip
        self.whole.discard(unit.path)
        self.spread.add(unit.path)

    def _part(self, piece: ShardedParameter, unit: FsdpUnit) -> TensorSpec:
        padded = self.way.ranks * piece.rows(self.way).numel
        return TensorSpec((padded // int(self.way.after(unit.path)),), piece.spec.dtype)

    def _gathered(self, unit: FsdpUnit) -> Ref:
        """The result of a unit's all-gather, as one flat tensor."""
        return self._once(unit, "gathered", lambda: self._flat(unit))

    def _once(self, unit: FsdpUnit, what: str, made: Callable[[], T]) -> T:
        key = (unit.path, what)
        if key not in self.lists:
            self.lists[key] = made()
        found: T = self.lists[key]
        return found

    def _flat(self, unit: FsdpUnit) -> Ref:
        counts = [(self.way.ranks * piece.rows(self.way).numel, piece.spec.dtype) for piece in unit.parameters]
        if len({dtype for _, dtype in counts}) == 1:
            return Ref(unit.gather_output, TensorSpec((sum(count for count, _ in counts),), counts[0][1]))
        nbytes = sum(count * DTYPE_BYTES[dtype] for count, dtype in counts)
        return Ref(unit.gather_output, TensorSpec((nbytes,), "uint8"))

    def _reshard(self, unit: FsdpUnit, *frees: int) -> None:
        whole = tuple(piece.storage for piece in unit.parameters) if unit.path in self.whole else ()
        self.whole.discard(unit.path)
        if whole or frees:
            self._emit("foretell.reshard", unit.path, frees=(*whole, *frees))

    def _emit(
        self,
        name: str,
        module: str,
        inputs: Iterable[Ref] = (),
        outputs: Iterable[Ref] = (),
        *,
        allocates: tuple[int, ...] = (),
        frees: tuple[int, ...] = (),
        axis: str = DP_SHARD,
        ranks: int = 0,
    ) -> None:
        """`axis` and `ranks` say who takes part in a collective."""
        members = ranks or (self.way.replicate if axis == DP_REPLICATE else self.way.ranks)
        attrs = (f"axis:{axis}", f"ranks:{members}") if name in COLLECTIVES else ()
        self.out.append(Op(name, tuple(inputs), tuple(outputs), module, self.phase, 0, allocates, frees, attrs))


def _model_end(ops: Sequence[Op], old: Mapping[int, Storage]) -> int:
    """Position of the first forward op that is no longer the model's: its marker, else the loss."""
    end = 0
    for position, op in enumerate(ops):
        if op.name == MODEL_END:
            return position
        if op.module or _touches_parameters(op, old):
            end = position + 1
    return end


def _model_begin(ops: Sequence[Op], old: Mapping[int, Storage]) -> int:
    """Position of the first backward op of the model: before it, only the loss was differentiated."""
    for position, op in enumerate(ops):
        makes_gradient = any(old[number].role == types.GRADIENT for number in op.allocates)
        if op.module or makes_gradient or _touches_parameters(op, old):
            return position
    return 0


def loss_inside(forward: Sequence[Op]) -> bool:
    """Whether the marked end of the model is also the end of the loss: nothing but scalars comes after it."""
    marks = [position for position, op in enumerate(forward) if op.name == MODEL_END]
    return bool(marks) and all(ref.spec.shape == () for op in forward[marks[-1] + 1 :] for ref in op.outputs)


def _touches_parameters(op: Op, old: Mapping[int, Storage]) -> bool:
    return any(old[ref.storage].role == types.PARAMETER for ref in op.inputs)


def _backward_units(ops: Sequence[Op], units: Mapping[str, FsdpUnit]) -> list[str]:
    """The unit of every backward op; an op of no module belongs to the block around it."""
    found = [unit_of(op.module, units) for op in ops]
    last = 0
    for position, op in enumerate(ops):
        if op.module:
            if found[position] and found[position] == found[last]:
                found[last:position] = [found[position]] * (position - last)
            last = position
    return found


def block_of(ops: Sequence[Op], blocks: Iterable[str]) -> list[str]:
    """The block of every op of a micro-batch, forward and backward; empty for what is in none."""
    units = {path: FsdpUnit(path) for path in ("", *blocks)}
    start = next((i for i, op in enumerate(ops) if op.phase in _BACKWARD), len(ops))
    return [unit_of(op.module, units) for op in ops[:start]] + _backward_units(ops[start:], units)
