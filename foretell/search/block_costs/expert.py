"""One rank's pieces where the experts of a layer are spread over ranks, from the ops of all experts.

    rows of all experts │ all to all │ (experts / ep, rows × ep, size): this rank's experts │ all to all │ rows

As `runtime.parallel.expert.exchange` runs stacks of experts that get as many rows each: on the way in and out, forward and
backward, rows travel and are put in order. Weights are this rank's; their gradients are divided by ep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from foretell.errors import UserError
from foretell.lower.expert import EXPERTS
from foretell.search.block_costs.ops import Material, Piece, Weights, settled
from foretell.trace import types
from foretell.trace.types import Op, Ref, Storage, TensorSpec

_FIXED = (types.PARAMETER, types.GRADIENT)


def spread(material: Material, ranks: int, paths: Sequence[str], count: int) -> Material:
    """The material of one rank of `ranks` that share the `count` experts of each of the modules at `paths`."""
    if ranks == 1:
        return material
    if count % ranks:
        raise UserError(f"{count} experts cannot be shared evenly by {ranks} ranks", f"a divisor of {count}")
    return _Spread(material, ranks, frozenset(paths), count).done()


@dataclass
class _Spread:
    material: Material
    ranks: int
    paths: frozenset[str]
    count: int
    storages: dict[int, Storage] = field(default_factory=dict)
    next: int = 0
    out: list[Op] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)
    """Storage outside the experts → its rows as they came, or what is made of it inside."""
    inside: set[int] = field(default_factory=set)
    """Activations that experts made."""
    weights: set[tuple[int, ...]] = field(default_factory=set)
    rows: int = 0
    """Of one expert, before they travel."""

    def done(self) -> Material:
        old = self.material
        self.storages = dict(old.storages)
        self.next = max(self.storages, default=0) + 1
        pieces: dict[str | int, Piece] = {}
        weights: dict[str | int, Weights] = {}
        for key, piece in old.pieces.items():
            self.weights = set()
            pieces[key] = self._piece(piece)
            weights[key] = self._own(old.weights[key])
        return replace(old, pieces=pieces, weights=weights, storages=self.storages, meta={**old.meta, "ep": self.ranks, EXPERTS: list(self.paths)})

    def _own(self, old: Weights) -> Weights:
        def experts(spec: TensorSpec) -> bool:
            return len(spec.shape) > 1 and spec.shape[0] == self.count and tuple(sorted(spec.shape)) in self.weights

        mine = tuple(replace_first(spec, self.ranks) for spec in old.trained if experts(spec))
        return replace(old, trained=tuple(spec for spec in old.trained if not experts(spec)), experts=mine, groups=self.ranks)

    def _piece(self, piece: Piece) -> Piece:
        if not any(op.module in self.paths for op in piece.forward):
            return piece
        self.copies, self.inside = {}, set()
        return settled(piece, self._half(piece.forward), self._half(piece.backward))

    def _half(self, ops: Sequence[Op]) -> list[Op]:
        self.out = []
        ends = {op.module: place for place, op in enumerate(ops) if op.module in self.paths}
        outside = {ref.storage for op in ops if op.module not in self.paths for ref in op.inputs}
        born = {n for op in ops if op.module in self.paths for n in op.allocates if self.storages[n].role != types.GRADIENT}
        leaving = born & outside
        for place, op in enumerate(ops):
            if op.module not in self.paths:
                self.out.append(op)
                continue
            self._inside(op, leaving)
            if ends[op.module] == place:
                self._leave(op, leaving)
        return self.out

    # ------------------------------------------------------------------ ops of experts

    def _inside(self, op: Op, leaving: set[int]) -> None:
        for ref in op.inputs:
            known = ref.storage in self.inside or ref.storage in self.copies
            if not known and self.storages[ref.storage].role not in _FIXED and len(ref.spec.shape) == 3 and ref.spec.shape[0] == self.count:
                self._enter(ref, op)
            if self.storages[ref.storage].role == types.PARAMETER:
                self.weights.add(tuple(sorted(ref.spec.shape)))
        for number in op.allocates:
            self.inside.add(number)
            if number in leaving:
                self.copies[number] = self._new(self.storages[number].nbytes, number)
        inputs, outputs = tuple(map(self._seen, op.inputs)), tuple(map(self._seen, op.outputs))
        grads = [n for n in op.allocates if self.storages[n].role == types.GRADIENT]
        born = [self.copies.get(n, n) for n in op.allocates]
        if not grads:
            self.out.append(replace(op, inputs=inputs, outputs=outputs, allocates=tuple(born)))
            return
        whole = outputs[0]
        self.storages[grads[0]] = self.storages[grads[0]]._replace(nbytes=whole.spec.nbytes)
        summed = Ref(self._new(whole.spec.nbytes, grads[0]), whole.spec)
        self.out.append(replace(op, inputs=inputs, outputs=(summed, *outputs[1:]), allocates=(summed.storage,)))
        self._emit("aten.div.Tensor", op, summed, whole)

    def _seen(self, ref: Ref) -> Ref:
        shape = ref.spec.shape
        number = self.copies.get(ref.storage, ref.storage)
        if len(shape) < 2 or shape[0] != self.count:
            return Ref(number, ref.spec)
        small = [shape[0] // self.ranks, *shape[1:]]
        known = ref.storage in self.inside or ref.storage in self.copies
        if known and self.storages[ref.storage].role not in _FIXED and self.rows in small[1:]:
            small[1 + small[1:].index(self.rows)] *= self.ranks
        return Ref(number, TensorSpec(tuple(small), ref.spec.dtype))

    # ------------------------------------------------------------------ rows on their way

    def _enter(self, ref: Ref, op: Op) -> None:
        self.rows = ref.spec.shape[1]
        count, rows, size = ref.spec.shape
        flat = TensorSpec((count * rows, size), ref.spec.dtype)
        came = self._travel(Ref(ref.storage, flat), op)
        if count == self.ranks:  # one expert: its rows are in order
            self.copies[ref.storage] = came.storage
            return
        parts = TensorSpec((count // self.ranks, self.ranks, rows, size), ref.spec.dtype)
        ordered = Ref(self._new(ref.spec.nbytes, ref.storage), parts)
        self._emit("aten.clone.default", op, Ref(came.storage, parts), ordered, "layout:s")
        self.copies[ref.storage] = ordered.storage

    def _leave(self, op: Op, leaving: set[int]) -> None:
        for number in sorted(leaving & self.inside):
            source, made = self.copies[number], self.material.storages[number]
            spec = next(ref.spec for one in reversed(self.out) for ref in one.outputs if ref.storage == source)
            held, rows, size = spec.shape
            parts = TensorSpec((self.ranks, held, rows // self.ranks, size), spec.dtype)
            ordered = Ref(source, parts)
            if held > 1:
                ordered = Ref(self._new(spec.nbytes, number), parts)
                self._emit("aten.clone.default", op, Ref(source, parts), ordered, "layout:s")
            flat = TensorSpec((self.ranks * held * (rows // self.ranks), size), spec.dtype)
            self.storages[number] = made
            self._travel(Ref(ordered.storage, flat), op, number)
            leaving.discard(number)

    def _travel(self, ref: Ref, op: Op, into: int | None = None) -> Ref:
        """All to all, and what it has brought."""
        attrs = ("axis:ep", f"ranks:{self.ranks}")
        came = Ref(self._new(ref.spec.nbytes, ref.storage), ref.spec)
        self.out.append(Op("foretell.all_to_all", (ref,), (came,), op.module, op.phase, 0, (came.storage,), (), attrs))
        found = Ref(self._new(ref.spec.nbytes, ref.storage) if into is None else into, ref.spec)
        self._emit("foretell.tensor_wait", op, came, found)
        return found

    def _new(self, nbytes: int, like: int) -> int:
        number, self.next = self.next, self.next + 1
        self.storages[number] = self.storages[like]._replace(nbytes=nbytes, role=types.ACTIVATION)
        return number

    def _emit(self, name: str, op: Op, source: Ref, made: Ref, *attrs: str) -> None:
        self.out.append(Op(name, (source,), (made,), op.module, op.phase, 0, (made.storage,), (), attrs))


def replace_first(spec: TensorSpec, ranks: int) -> TensorSpec:
    """A stack of so many times fewer."""
    return TensorSpec((spec.shape[0] // ranks, *spec.shape[1:]), spec.dtype)
