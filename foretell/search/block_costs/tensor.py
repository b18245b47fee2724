"""One rank's part of a block whose tensors are split over ranks, from the ops of the whole block.

    stream │ norm │ gather ─► column products │ attention, activation │ row products ─► scatter │ stream
             ▲ split along the sequence         ▲ split along heads and features

Products that read the stream are split by columns, those that read what column products made by rows: as
`plan.tensor.derive` finds it from the model's dataflow and `runtime.parallel.tensor.split` runs it. Here it is read off the ops: each storage
has a label, and an op's labels say what becomes of its shapes. What does not follow the pattern is refused: such a model
must be traced split. Messages are ops of foretell's own, as in a trace of a split model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from foretell.errors import UserError
from foretell.lower.tensor import SPLIT_STREAM
from foretell.price.kernels.features import FREE
from foretell.price.kernels.shapes import short
from foretell.search.block_costs.ops import AFTER, BEFORE, Material, Piece, Weights, settled
from foretell.trace import types
from foretell.trace.types import Op, Ref, Storage, TensorSpec

WHOLE, STREAM, PART, SUM, SHARE = "whole", "stream", "part", "sum", "share"
"""Labels: the same on every rank; split along the sequence; split along heads or features; to be summed over ranks;
a weight's part, or that of its gradient."""
COLUMN, ROW, VOCABULARY, SEQUENCE = "column", "row", "vocabulary", "sequence"
_UNKNOWN = frozenset({"bmm", "baddbmm", "convolution", "index_put", "topk", "_cudnn_rnn", "scatter", "_fft_r2c"})
_FIXED = (types.PARAMETER, types.BUFFER, types.INPUT)
_REMEDY = "trace the model split, or take another tensor degree"


def split(material: Material, ranks: int) -> Material:
    """The material of one rank of `ranks`; a UserError where the model does not follow the pattern."""
    return material if ranks == 1 else _Split(material, ranks).done()


def _refuse(why: str, ranks: int) -> UserError:
    return UserError(f"tensor parallelism over {ranks} ranks: {why}", _REMEDY)


@dataclass
class _Split:
    material: Material
    ranks: int
    label: dict[int, str] = field(default_factory=dict)
    ways: dict[str, str] = field(default_factory=dict)
    """Module → how its weight is split."""
    weights: dict[int, str] = field(default_factory=dict)
    """Parameter, or its copy in another dtype → how it is split."""
    storages: dict[int, Storage] = field(default_factory=dict)
    copies: dict[int, int] = field(default_factory=dict)
    """Storage of the stream → its gathered copy."""
    pending: dict[int, int] = field(default_factory=dict)
    """Storage that is to be summed → where this rank's summand is."""
    out: list[Op] = field(default_factory=list)
    heads: set[int] = field(default_factory=set)
    stream: set[tuple[int, ...]] = field(default_factory=set)
    next: int = 0
    early: set[int] = field(default_factory=set)
    """Storages of the piece's forward."""
    own: dict[tuple[int, str], int] = field(default_factory=dict)
    """Storage of the stream and module → the copy gathered for it, where positions are shared too."""

    @property
    def apart(self) -> bool:
        """Whether every product gathers the stream for itself, and scatters its gradient: where positions are shared too."""
        return self.material.meta.get("cp", 1) != 1

    def done(self) -> Material:
        old = self.material
        self.storages = dict(old.storages)
        self.next = max(self.storages, default=0) + 1
        self._known()
        pieces: dict[str | int, Piece] = {}
        for key in (BEFORE, *(key for key in old.pieces if key not in (BEFORE, AFTER)), AFTER):
            pieces[key] = self._piece(old.pieces[key])
        weights = {key: self._parameters(key, one) for key, one in old.weights.items()}
        shared = tuple(spec if SEQUENCE in self.ways.values() else self._cut(spec, 0) for spec in old.shared)
        boundary = tuple(self._cut(spec, 1) for spec in old.boundary)
        return replace(
            old, pieces=pieces, storages=self.storages, weights=weights, shared=shared, boundary=boundary,
            meta={**old.meta, "tp": self.ranks, SPLIT_STREAM: True},
        )  # fmt: skip

    def _known(self) -> None:
        """What enters a block is the stream; heads are those of its attention."""
        for spec in self.material.boundary:
            if len(spec.shape) != 3 or spec.shape[1] % self.ranks:
                raise _refuse("what blocks hand on has no sequence that divides", self.ranks)
            self.stream |= {spec.shape, (spec.shape[0] * spec.shape[1], spec.shape[2])}
        if not self.stream:
            raise _refuse("there is no stack of blocks", self.ranks)
        for piece in self.material.pieces.values():
            attention = [op for op in piece.forward if "scaled_dot_product" in op.name]
            self.heads |= {ref.spec.shape[1] for op in attention for ref in op.inputs[:3] if len(ref.spec.shape) == 4}
        if any(count % self.ranks for count in self.heads):
            raise _refuse(f"heads ({', '.join(map(str, sorted(self.heads)))}) do not divide", self.ranks)

    def _piece(self, piece: Piece) -> Piece:
        self.early = {ref.storage for op in piece.forward for ref in (*op.inputs, *op.outputs)}
        self.copies, self.pending, self.own = {}, {}, {}
        if self._casts(piece):
            labels, sizes = dict(self.label), dict(self.storages)
            self._walk(piece.forward)  # says how weights are split, which casts of them come before
            self.label, self.storages, self.copies, self.pending = labels, sizes, {}, {}
        forward = self._walk(piece.forward)
        backward = self._walk(piece.backward)
        return settled(piece, forward, backward)

    def _casts(self, piece: Piece) -> bool:
        """Whether weights are cast to another dtype before they are used."""
        old = self.material.storages
        casts = (op for op in piece.forward if short(op.name) == "_to_copy" and op.inputs)
        return any(old[op.inputs[0].storage].role == types.PARAMETER for op in casts)

    # ------------------------------------------------------------------ labels and shapes

    def of(self, ref: Ref) -> str:
        found = self.label.get(ref.storage)
        if found is None:
            storage = self.storages.get(ref.storage)
            made = storage is not None and storage.role not in _FIXED
            found = self.label[ref.storage] = STREAM if made and ref.spec.shape in self.stream else WHOLE
            if storage is not None and found == STREAM:  # another piece made it
                self.storages[ref.storage] = storage._replace(nbytes=-(-storage.nbytes // self.ranks))
        return found

    def _cut(self, spec: TensorSpec, dim: int) -> TensorSpec:
        shape = list(spec.shape)
        shape[dim] = -(-shape[dim] // self.ranks)
        return TensorSpec(tuple(shape), spec.dtype)

    def _part(self, label: str, spec: TensorSpec) -> TensorSpec:
        """This rank's part of a tensor."""
        shape = spec.shape
        if label in (WHOLE, SUM) or not shape:
            return spec
        if label == STREAM:
            return self._cut(spec, 1 if len(shape) > 2 else 0)
        if label == SHARE:
            return self._cut(spec, shape.index(max(shape)))
        if len(shape) == 4:
            return self._cut(spec, 2 if shape[1] not in self.heads and shape[2] in self.heads else 1)
        return self._cut(spec, len(shape) - 1)

    def _seen(self, ref: Ref) -> Ref:
        return Ref(self.pending.get(ref.storage, ref.storage), self._part(self.of(ref), ref.spec))

    def _made(self, op: Op, outputs: Sequence[Ref]) -> tuple[int, ...]:
        """Storages that an op makes, each as much smaller as its tensors."""
        for before, after in zip(op.outputs, outputs, strict=True):
            if before.storage in op.allocates and before.spec.numel:
                storage = self.material.storages[before.storage]
                size = round(storage.nbytes * after.spec.numel / before.spec.numel)
                self.storages[after.storage] = storage._replace(nbytes=size)
        return tuple(self.pending.get(number, number) for number in op.allocates)

    def _new(self, nbytes: int, like: int) -> int:
        number, self.next = self.next, self.next + 1
        self.storages[number] = self.material.storages[like]._replace(nbytes=nbytes, role=types.ACTIVATION)
        return number

    # ------------------------------------------------------------------ ops

    def _walk(self, ops: Sequence[Op]) -> list[Op]:
        self.out = []
        for op in ops:
            name = short(op.name)
            if name in _UNKNOWN:
                raise _refuse(f"{name} in {op.module or 'the model'} is not known to split", self.ranks)
            if name in ("mm", "addmm"):
                self._product(op)
            elif name == "embedding" and len(op.outputs[0].spec.shape) > 2:
                self._embedding(op)
            elif name == "embedding_dense_backward" and self.ways.get(op.module) == VOCABULARY:
                self._embedding_backward(op)
            elif name in _LOSS and self.of(op.inputs[0 if name == "_log_softmax" else 1]) == PART:
                self._loss(op, name)
            else:
                self._plain(op, name)
        for number in list(self.pending):
            self._summed(number, ops[-1])
        return self.out

    def _plain(self, op: Op, name: str) -> None:
        labels = {self.of(ref) for ref in op.inputs}
        if SUM in labels and not (name in FREE or (name == "add" and labels == {SUM})):
            for ref in dict.fromkeys(op.inputs):
                if self.of(ref) == SUM:
                    self._summed(ref.storage, op)
            labels = {self.of(ref) for ref in op.inputs}
        made = next((label for label in (PART, STREAM, SUM, SHARE) if label in labels), WHOLE)
        if name == "_to_copy" and op.inputs and op.outputs[0].storage in self.weights:
            made = SHARE  # a weight cast to another dtype
            self.weights[op.inputs[0].storage] = self.weights[op.outputs[0].storage]
        for ref in op.outputs:
            if ref.storage in op.allocates or ref.storage not in self.label:
                self.label[ref.storage] = WHOLE if made == STREAM and len(ref.spec.shape) < 2 else made
                if made == SUM and ref.storage not in self.pending:
                    self.pending[ref.storage] = self._new(self.material.storages[ref.storage].nbytes, ref.storage)
        inputs, outputs = tuple(map(self._seen, op.inputs)), tuple(map(self._seen, op.outputs))
        if made == SHARE and name == "_to_copy" and self.of(op.inputs[0]) == WHOLE:
            inputs = (Ref(inputs[0].storage, self._part(SHARE, inputs[0].spec)),)
        self.out.append(
            replace(op, inputs=inputs, outputs=outputs, allocates=self._made(op, outputs), flops=_scaled(op, inputs, outputs))
        )
        kept = {ref.storage for ref in op.outputs}
        for ref in op.inputs if made == SUM and name == "add" else ():
            if ref.storage not in kept:
                self.pending.pop(ref.storage, None)
        for ref in op.outputs if made == STREAM else ():
            if ref.storage in op.allocates and self.storages[ref.storage].role == types.GRADIENT:
                self._message("all_reduce", ref, ref, op)  # a norm's weights: each rank saw part of the sequence

    def _product(self, op: Op) -> None:
        left, right = op.inputs[-2:]
        if op.phase == "forward":
            self._forward_product(op, left, right)
            return
        way = self.ways.get(op.module)
        if way is None:
            raise _refuse(f"a product in {op.module or 'the model'} has no weight", self.ranks)
        if way == SEQUENCE:
            self._on_sequence(op, left, right)
            return
        if right.storage in self.weights:  # gradient of the input: dy w
            if way == COLUMN:
                self._multiply(op, self._cut(left.spec, 1), self._cut(right.spec, 0), op.outputs[0].spec, SUM)
                if self.apart:
                    self._summed(op.outputs[0].storage, op)
            else:
                self._gather(left, op)
                self._multiply(op, left.spec, self._cut(right.spec, 1), self._cut(op.outputs[0].spec, 1), PART)
            return
        first = left.storage not in self.early  # gradient of the weight: dy' x, or x' dy
        if way == ROW:
            self._gather(left if first else right, op)
        if (way == COLUMN) == first:
            self._multiply(op, self._cut(left.spec, 0), right.spec, self._cut(op.outputs[0].spec, 0), SHARE)
        else:
            self._multiply(op, left.spec, self._cut(right.spec, 1), self._cut(op.outputs[0].spec, 1), SHARE)

    def _on_sequence(self, op: Op, left: Ref, right: Ref) -> None:
        """A product whose weight is whole on every rank: the weight's gradient is summed."""
        if right.storage in self.weights:
            self._multiply(op, self._cut(left.spec, 0), right.spec, self._cut(op.outputs[0].spec, 0), STREAM)
            return
        self._multiply(op, self._cut(left.spec, 1), self._cut(right.spec, 0), op.outputs[0].spec, WHOLE)
        self._message("all_reduce", op.outputs[0], op.outputs[0], op)

    def _forward_product(self, op: Op, left: Ref, right: Ref) -> None:
        storage = self.material.storages[right.storage]
        features, wide = right.spec.shape
        if storage.role != types.PARAMETER and self.of(right) not in (WHOLE, SHARE):
            raise _refuse(f"a product in {op.module or 'the model'} has no weight", self.ranks)
        if self.of(left) == SUM:
            self._summed(left.storage, op)
        if self.of(left) == PART:
            if features % self.ranks:
                raise _refuse(f"{features} features of {op.module} do not divide", self.ranks)
            self.ways[op.module] = self.weights[right.storage] = ROW
            self._multiply(op, self._cut(left.spec, 1), self._cut(right.spec, 0), op.outputs[0].spec, SUM)
            return
        if wide % self.ranks:
            if wide < 8 * features or self.of(left) != STREAM:
                raise _refuse(f"{wide} features of {op.module} do not divide", self.ranks)
            self.ways[op.module] = self.weights[right.storage] = SEQUENCE  # a vocabulary: each rank its part of the sequence
            self._multiply(op, self._cut(left.spec, 0), right.spec, self._cut(op.outputs[0].spec, 0), STREAM)
            return
        self.ways[op.module] = self.weights[right.storage] = COLUMN
        if self.of(left) == STREAM:
            if self.apart:
                self.copies.pop(left.storage, None)
            self._gather(left, op)
            self.own[left.storage, op.module] = self.copies[left.storage]
        self._multiply(op, left.spec, self._cut(right.spec, 1), self._cut(op.outputs[0].spec, 1), PART)

    def _multiply(self, op: Op, one: TensorSpec, two: TensorSpec, out: TensorSpec, label: str) -> None:
        left, right = op.inputs[-2:]
        operands = tuple(
            Ref(self.own.get((ref.storage, op.module), self.copies.get(ref.storage, ref.storage)), spec)
            for ref, spec in ((left, one), (right, two))
        )
        bias = tuple(Ref(ref.storage, self._cut(ref.spec, 0) if label == PART else ref.spec) for ref in op.inputs[:-2])
        target = op.outputs[0].storage
        self.label[target] = label
        if label == SUM:
            self.pending[target] = self._new(0, target)
        outputs = (Ref(self.pending.get(target, target), out),)
        self.out.append(
            replace(op, inputs=(*bias, *operands), outputs=outputs, allocates=self._made(op, outputs),
                    flops=(op.flops or 0) // self.ranks)
        )  # fmt: skip

    # ------------------------------------------------------------------ messages

    def _gather(self, ref: Ref, op: Op) -> None:
        """The stream, whole on every rank: once for all products that read it."""
        if ref.storage in self.copies or self.of(ref) != STREAM:
            return
        part, spec = self._flat(ref.spec), ref.spec
        first, second, third = (Ref(self._new(spec.nbytes, ref.storage), spec) for _ in range(3))
        self._message("all_gather", Ref(ref.storage, part), first, op)
        self._emit("foretell.tensor_wait", op, (first,), second)
        self._emit("aten.cat.default", op, (Ref(second.storage, part),) * self.ranks, third)
        self.copies[ref.storage] = third.storage

    def _flat(self, spec: TensorSpec) -> TensorSpec:
        """A part of the stream, also where a product sees it turned."""
        dim = 1 if len(spec.shape) > 2 or spec.shape not in self.stream else 0
        return self._cut(spec, dim)

    def _summed(self, number: int, op: Op) -> None:
        """What ranks have to add up, scattered along the sequence."""
        source = self.pending.pop(number, None)
        if source is None:
            return
        size = self.storages[source].nbytes
        known = next((spec for spec in self.material.boundary if spec.nbytes == size), None)
        whole = known or TensorSpec((1, size // 2, 1), "bfloat16")
        part = self._cut(whole, 1)
        self.label[number] = STREAM
        joined, sent = Ref(self._new(size, number), whole), Ref(self._new(part.nbytes, number), part)
        self._emit("aten.cat.default", op, (Ref(source, part),) * self.ranks, joined, "layout:" + "s" * self.ranks)
        self._message("reduce_scatter", joined, sent, op)
        self.storages[number] = self.material.storages[number]._replace(nbytes=part.nbytes)
        self._emit("foretell.tensor_wait", op, (sent,), Ref(number, part))

    def _message(self, kind: str, source: Ref, target: Ref, op: Op) -> None:
        born = (target.storage,) if kind != "all_reduce" else ()
        attrs = ("axis:tp", f"ranks:{self.ranks}")
        self.out.append(Op(f"foretell.{kind}", (source,), (target,), op.module, op.phase, 0, born, (), attrs))

    def _emit(self, name: str, op: Op, inputs: tuple[Ref, ...], output: Ref, *attrs: str) -> None:
        self.out.append(Op(name, inputs, (output,), op.module, op.phase, 0, (output.storage,), (), attrs))

    # ------------------------------------------------------------------ embeddings and the loss

    def _embedding(self, op: Op) -> None:
        """Each rank looks up the words it has, and the results are summed."""
        table, target = op.inputs[0], op.outputs[0]
        if table.spec.shape[0] % self.ranks:  # each rank looks up its part of the sequence
            self.label[target.storage] = STREAM
            part = tuple(Ref(ref.storage, self._part(STREAM, TensorSpec((*ref.spec.shape, 1), ref.spec.dtype))) for ref in op.inputs[1:])
            outputs = (self._seen(target),)
            self.out.append(replace(op, inputs=(table, *part), outputs=outputs, allocates=self._made(op, outputs)))
            return
        self.weights[table.storage] = self.ways[op.module] = VOCABULARY
        found = Ref(self._new(target.spec.nbytes, target.storage), target.spec)
        masked = Ref(self._new(target.spec.nbytes, target.storage), target.spec)
        small = (Ref(table.storage, self._cut(table.spec, 0)), *op.inputs[1:])
        self.out.append(replace(op, inputs=small, outputs=(found,), allocates=(found.storage,)))
        self._emit("aten.masked_fill.Scalar", op, (found,), masked)
        self.label[target.storage] = SUM
        self.pending[target.storage] = masked.storage

    def _embedding_backward(self, op: Op) -> None:
        gradient, target = op.inputs[0], op.outputs[0]
        self._gather(gradient, op)
        whole = Ref(self.copies.get(gradient.storage, gradient.storage), gradient.spec)
        masked = Ref(self._new(gradient.spec.nbytes, gradient.storage), gradient.spec)
        self._emit("aten.masked_fill.Scalar", op, (whole,), masked)
        self.label[target.storage] = SHARE
        outputs = (Ref(target.storage, self._cut(target.spec, 0)),)
        inputs = (masked, *op.inputs[1:])
        self.out.append(replace(op, inputs=inputs, outputs=outputs, allocates=self._made(op, outputs)))

    def _loss(self, op: Op, name: str) -> None:
        """A loss on logits split along the vocabulary: two small sums over ranks, one more copy of the logits."""
        source = op.inputs[0 if name == "_log_softmax" else 1]
        logits = Ref(source.storage, self._part(PART, source.spec))
        row = Ref(self._new(0, source.storage), TensorSpec((logits.spec.shape[0],), "float32"))
        target = op.outputs[0]
        if name == "nll_loss_forward":
            self.out.append(replace(op, inputs=(row, *op.inputs[1:]), flops=0))
            return
        self.label[target.storage] = PART
        out = Ref(target.storage, self._part(PART, target.spec))
        born = self._made(op, (out, *op.outputs[1:]))
        names = _LOSS[name]
        for place, (step, reads) in enumerate(names):
            inputs = (logits, row) if reads == "logits" else (out, row) if reads == "result" else (Ref(op.inputs[0].storage, out.spec), row)
            result = row if step in ("aten.amax.default", "aten.sum.dim_IntList") else out
            first = place == next(i for i, (s, _) in enumerate(names) if s not in ("aten.amax.default", "aten.sum.dim_IntList"))
            dead = op.frees if place == len(names) - 1 else ()
            self.out.append(Op(step, inputs[: 1 if result is row else 2], (result,), op.module, op.phase, 0, born if first else (), dead))
        if name == "_log_softmax":
            for size in (1, 2):
                both = Ref(row.storage, TensorSpec((size, *row.spec.shape), "float32"))
                self._message("all_reduce", both, both, op)

    # ------------------------------------------------------------------ parameters

    def _parameters(self, key: str | int, old: Weights) -> Weights:
        """Parameters by their shapes: those of column products lose rows, those of row products columns."""
        shapes: dict[tuple[int, ...], str] = {}
        for op in self.material.pieces[key].forward:
            way = self.ways.get(op.module)
            if way is None or short(op.name) not in ("mm", "addmm", "embedding"):
                continue
            for ref in op.inputs:
                if ref.storage in self.weights or len(ref.spec.shape) == 1:
                    shapes.setdefault(ref.spec.shape[::-1] if way != VOCABULARY else ref.spec.shape, way)

        def mine(spec: TensorSpec) -> TensorSpec:
            way = shapes.get(spec.shape, "")
            if way == SEQUENCE:
                return spec
            if way == ROW:
                return self._cut(spec, 1) if len(spec.shape) > 1 else spec
            return self._cut(spec, 0) if way else spec

        return Weights(tuple(map(mine, old.trained)), tuple(map(mine, old.frozen)))


_LOSS: dict[str, tuple[tuple[str, str], ...]] = {
    "_log_softmax": (
        ("aten.amax.default", "logits"), ("aten.sub.Tensor", "logits"), ("aten.exp_.default", "result"),
        ("aten.sum.dim_IntList", "result"), ("aten.div_.Tensor", "result"),
    ),
    "nll_loss_forward": (),
    "nll_loss_backward": (("aten.mul.Tensor", "logits"),),
    "_log_softmax_backward_data": (("aten.scatter_add.default", "gradient"),),
}  # fmt: skip
"""Op of a loss on whole logits → what runs on split ones, and what each step reads."""


def _scaled(op: Op, inputs: Sequence[Ref], outputs: Sequence[Ref]) -> int | None:
    before = sum(ref.spec.numel for ref in (*op.inputs, *op.outputs))
    if not op.flops or not before:
        return op.flops
    return round(op.flops * sum(ref.spec.numel for ref in (*inputs, *outputs)) / before)
