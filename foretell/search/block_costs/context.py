"""One rank's pieces where the positions of a sample are shared, from traces of the whole sample and of half of it.

    traces at S and S/2 positions ─► every size is a straight line ─► pieces at S/cp positions
      ─► attention: keys and values gathered before it, their gradients scattered after it
      ─► the loss: a sum over ranks

As `plan.context` finds it and `runtime.parallel.context.positions` runs it: all else treats each position by itself. Of causal attention it
is the last rank's part, which is most. Tables of positions that all ranks make whole are left out: they are small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from foretell.errors import UserError
from foretell.lower.batch import rebatch
from foretell.search.block_costs.ops import AFTER, Material, Piece, PieceSource, of_mini, settled
from foretell.trace import types
from foretell.trace.types import Op, Program, Ref, Storage, TensorSpec, Trace

ATTENTION = "scaled_dot_product"
FLASH = "aten._scaled_dot_product_flash_attention"
MASKLESS = ("flash_attention", "cudnn_attention")
"""Kernels that attend from the last positions without a mask: it is flash attention's then."""
LAYOUT = "layout:"


class ContextCosts:
    """Pieces of a rank at any micro-batch and number of ranks that share a sample."""

    def __init__(self, whole: PieceSource, half: PieceSource, positions: int) -> None:
        self.whole, self.half, self.positions = whole, half, positions
        self._short: dict[int, PieceSource] = {}

    def at(self, micro_batch: int, ranks: int) -> Material:
        if self.positions % ranks:
            raise UserError(f"{self.positions} positions cannot be shared evenly by {ranks} ranks", "another cp")
        if ranks not in self._short:
            self._short[ranks] = self._shorter(ranks)
        return _Shared(self._short[ranks].at(micro_batch), ranks).done()

    def _shorter(self, ranks: int) -> PieceSource:
        """Traces of so many times fewer positions, the batch as it is."""
        sizes, wanted = (self.positions, self.positions // 2), self.positions // ranks
        small, large = (
            rebatch(_even(one), _even(two), sizes, wanted) if one is not None and two is not None else None
            for one, two in zip(self.whole.minis, self.half.minis, strict=True)
        )
        assert small is not None
        return PieceSource.from_minis(of_mini(self.whole.first, small, 1.0), small, large, self.whole)


def _even(mini: Trace) -> Trace:
    """Without the FLOPs of attention, which are no line in the number of positions."""
    return replace(mini, programs={
        name: Program(name, tuple(replace(op, flops=0) if ATTENTION in op.name else op for op in program.ops))
        for name, program in mini.programs.items()
    })  # fmt: skip


@dataclass
class _Shared:
    material: Material
    ranks: int
    storages: dict[int, Storage] = field(default_factory=dict)
    next: int = 0
    out: list[Op] = field(default_factory=list)
    whole: dict[int, Ref] = field(default_factory=dict)
    """Storage of this rank's keys or values → those of all ranks."""

    def done(self) -> Material:
        old = self.material
        self.storages = dict(old.storages)
        self.next = max(self.storages, default=0) + 1
        pieces = {key: self._piece(piece, key == AFTER) for key, piece in old.pieces.items()}
        return replace(old, pieces=pieces, storages=self.storages, meta={**old.meta, "cp": self.ranks})

    def _piece(self, piece: Piece, last: bool) -> Piece:
        if not last and not any(ATTENTION in op.name for op in piece.forward):
            return piece
        halves = []
        for ops in (piece.forward, piece.backward):
            self.out = []
            for op in ops:
                if ATTENTION in op.name:
                    self._backward(op) if "backward" in op.name else self._forward(op)
                elif last and op.name.startswith("aten.nll_loss"):
                    self._loss(op)
                else:
                    self.out.append(op)
            halves.append(self.out)
        return settled(piece, *halves)

    # ------------------------------------------------------------------ attention

    def _forward(self, op: Op) -> None:
        query, key, value = op.inputs[:3]
        letters = _letters(op)
        gathered = [self._gather(ref, op, letters[place]) for place, ref in ((1, key), (2, value))]
        causal = _causal(op)
        outputs, name = op.outputs, op.name
        if causal and any(kernel in name for kernel in MASKLESS):
            name = f"{FLASH}.default"
            summed = outputs[1]._replace(spec=TensorSpec(query.spec.shape[:3], outputs[1].spec.dtype))
            outputs = (outputs[0], summed, *outputs[2:])
        rest = tuple(self._mask(ref, key) for ref in op.inputs[3:])
        self.out.append(
            replace(op, name=name, inputs=(query, *gathered, *rest), outputs=outputs, flops=self._flops(op, 1),
                    attrs=_attrs(op, letters, (1, 2)))
        )  # fmt: skip

    def _gather(self, ref: Ref, op: Op, letter: str) -> Ref:
        """All ranks' keys or values: gathered one rank behind the other, then put in order."""
        if ref in self.whole.values():
            return ref
        shape, like = ref.spec.shape, ref.storage
        if letter != "c":
            ref = self._emit("aten.clone.default", op, (ref,), ref.spec, like, f"{LAYOUT}s")
        stacked = TensorSpec((shape[0] * self.ranks, *shape[1:]), ref.spec.dtype)
        sent = self._message("all_gather", op, ref, stacked, like)
        found = self._emit(
            "aten.cat.default", op, (Ref(sent.storage, ref.spec),) * self.ranks, self._longer(ref.spec), like,
            f"{LAYOUT}{'c' * self.ranks}",
        )  # fmt: skip
        self.whole[like] = found
        return found

    def _backward(self, op: Op) -> None:
        letters, causal = _letters(op), _causal(op)
        key, value = (self.whole.get(ref.storage, ref) for ref in op.inputs[2:4])
        name, inputs = op.name, [*op.inputs[:2], key, value, *op.inputs[4:]]
        if causal and any(kernel in name for kernel in MASKLESS):
            name = f"{FLASH}_backward.default"
            place = next((i for i, ref in enumerate(inputs) if i > 4 and len(ref.spec.shape) == 4 and ref.spec.shape[-1] == 1), -1)
            if place > 0:
                inputs[place] = inputs[place]._replace(spec=TensorSpec(inputs[place].spec.shape[:3], inputs[place].spec.dtype))
        grads = [Ref(self._new(self._longer(ref.spec).nbytes, ref.storage), self._longer(ref.spec)) for ref in op.outputs[1:3]]
        born = [number for number in op.allocates if number not in {ref.storage for ref in op.outputs[1:3]}]
        self.out.append(
            replace(op, name=name, inputs=tuple(inputs), outputs=(op.outputs[0], *grads, *op.outputs[3:]),
                    allocates=(*born, *(ref.storage for ref in grads)), flops=self._flops(op, 2), attrs=_attrs(op, letters, (2, 3)))
        )  # fmt: skip
        if causal:  # positions after the last that was seen: none on the last rank
            grads = [self._emit("aten.slice_backward.default", op, (ref,), ref.spec, ref.storage) for ref in reversed(grads)][::-1]
        for mine, whole in zip(op.outputs[1:3], grads, strict=True):
            stacked = TensorSpec((mine.spec.shape[0] * self.ranks, *mine.spec.shape[1:]), mine.spec.dtype)
            joined = self._emit(
                "aten.cat.default", op, (Ref(whole.storage, mine.spec),) * self.ranks, stacked, whole.storage, f"{LAYOUT}{'s' * self.ranks}"
            )  # fmt: skip
            self._message("reduce_scatter", op, joined, mine.spec, whole.storage, mine.storage)

    def _flops(self, op: Op, first: int) -> int:
        """Of the last rank, which sees all positions, its own up to each; `first` is the place of the keys."""
        query, key, value = op.inputs[first - 1 : first + 2]
        samples, heads, rows, size = query.spec.shape
        pairs = samples * heads * rows * key.spec.shape[-2] * self.ranks
        seen = 1 - 1 / (2 * self.ranks) if _causal(op) else 1.0
        wide = value.spec.shape[-1]
        return round(2 * pairs * seen * (size + wide if first == 1 else 3 * size + 2 * wide))

    def _mask(self, ref: Ref, key: Ref) -> Ref:
        shape = ref.spec.shape
        fits = len(shape) > 1 and shape[-1] == key.spec.shape[-2]
        return Ref(ref.storage, TensorSpec((*shape[:-1], shape[-1] * self.ranks), ref.spec.dtype)) if fits else ref

    def _longer(self, spec: TensorSpec) -> TensorSpec:
        *rest, rows, size = spec.shape
        return TensorSpec((*rest, rows * self.ranks, size), spec.dtype)

    # ------------------------------------------------------------------ the loss

    def _loss(self, op: Op) -> None:
        """Each rank's rows are summed, then those of all; the mean is over the rows of all ranks."""
        scalar = TensorSpec((), "float32")
        if op.phase == "forward":
            self.out.append(op)
            self._message("all_reduce", op, op.outputs[0], scalar, op.outputs[0].storage)
        else:
            self._message("all_reduce", op, op.inputs[0], scalar, op.inputs[0].storage)
            self.out.append(op)

    # ------------------------------------------------------------------ ops

    def _new(self, nbytes: int, like: int) -> int:
        number, self.next = self.next, self.next + 1
        self.storages[number] = self.storages[like]._replace(nbytes=nbytes, role=types.ACTIVATION)
        return number

    def _emit(self, name: str, op: Op, inputs: Sequence[Ref], made: TensorSpec, like: int, *attrs: str, into: int | None = None) -> Ref:
        number = self._new(made.nbytes, like) if into is None else into
        self.out.append(Op(name, tuple(inputs), (Ref(number, made),), op.module, op.phase, 0, (number,), (), attrs))
        return Ref(number, made)

    def _message(self, kind: str, op: Op, source: Ref, made: TensorSpec, like: int, into: int | None = None) -> Ref:
        """A message, and what it has brought."""
        attrs = ("axis:cp", f"ranks:{self.ranks}")
        came = self._emit(f"foretell.{kind}", op, (source,), made, like, *attrs)
        return self._emit("foretell.tensor_wait", op, (came,), made, like, into=into)


def _causal(op: Op) -> bool:
    return any(attr is True for attr in op.attrs)


def _letters(op: Op) -> str:
    """How each input lies in memory: c where it is in order."""
    found = next((str(attr).removeprefix(LAYOUT) for attr in op.attrs if str(attr).startswith(LAYOUT)), "")
    return found.ljust(len(op.inputs), "c")


def _attrs(op: Op, letters: str, gathered: Sequence[int]) -> tuple[int | float | str | bool, ...]:
    """The same with keys and values in order."""
    now = "".join("c" if place in gathered else letter for place, letter in enumerate(letters))
    rest = tuple(attr for attr in op.attrs if not str(attr).startswith(LAYOUT))
    return (*rest, f"{LAYOUT}{now}") if now.strip("c") else rest
