"""From the compute of one device to one rank of fully sharded data parallel (PyTorch's FSDP2).

The trace of a step with recipe.precision "fsdp-bf16" has whole bf16 parameters that stay, and whole bf16
gradients. Here its ops are woven together with what `fully_shard` on every block and on the root does:

    forward    │ gather root │ gather 0 │ block 0 │ free 0 │ gather 1 │ block 1 │ free 1 │ head │ loss │
    backward   │ loss │ prefetch 1 │ head │ copy out 1, prefetch 0 │ block 1 │ free 1, reduce 1 │ copy out 0 │ …
    update     │ on fp32 shards of parameters and gradients

Only fp32 shards stay: `ceil(rows / ranks)` rows of each parameter, on rank 0, which has the largest ones.
Gathering takes two buffers (the bf16 shard, the result of the collective) and the whole parameters, and the
result is held until the next unit has its own. Reducing takes the unit's whole gradients once more, flat and
padded; that buffer is held until the next unit needs one. Order and lifetimes follow
`torch.distributed.fsdp._fully_shard` of torch 2.11 to 2.13 with its default settings and
`MixedPrecisionPolicy(param_dtype=torch.bfloat16)`: gradients are reduced in bf16 and kept in fp32.

Not modelled: units that share a parameter (FSDP2 refuses them), a block called twice in a row without an op in
between (seen as one call), reduction in fp32, resharding to a smaller mesh, buffers of the communication library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from foretell.trace import types
from foretell.trace.types import Op, Program, Ref, Storage, TensorSpec, Trace
from foretell.units import DTYPE_BYTES

COMPUTE_STREAM, GATHER_STREAM, REDUCE_STREAM = 0, 1, 2
"""Streams whose allocator pools FSDP2 uses: compute, all-gather copy-in, reduce-scatter."""

MODEL_END = "foretell.model_end"
"""A marker op, if the trace has one: here the root's forward returned and the loss begins."""

_BACKWARD = ("backward", "recompute")
_BEFORE_GATHER = ("foretell.begin", "aten._to_copy.default")
"""What may come before a unit's parameters are gathered: the casts of its inputs."""
_WIDE = {"bfloat16": "float32"}
"""Dtype in the trace of compute → dtype of the shard that is kept and trained."""


class Piece(NamedTuple):
    """A parameter, which is sharded by rows."""

    storage: int
    spec: TensorSpec
    """Whole, as compute sees it."""

    def rows(self, ranks: int) -> TensorSpec:
        """What one rank keeps of it."""
        return TensorSpec(rows(self.spec.shape, ranks), _WIDE.get(self.spec.dtype, self.spec.dtype))


@dataclass
class Unit:
    """What is gathered and reduced at once: a block, or what is left for the root."""

    path: str
    parameters: list[Piece] = field(default_factory=list)
    trained: list[Piece] = field(default_factory=list)
    """Parameters that get a gradient: those that the optimizer touches."""
    gradients: list[int] = field(default_factory=list)
    """Storages of the whole gradients; two gradients may share one."""
    shards: dict[int, int] = field(default_factory=dict)
    """Storage of the whole parameter → storage of its shard."""
    gather_input: int = -1
    gather_output: int = -1
    reduce_input: int = -1
    reduce_output: int = -1
    gradient: int = -1
    """One storage for the sharded gradients of the unit; each gradient is a view into it."""
    more_gradient: int = -1
    """The same for a later micro-batch, before it is added."""


def shard(trace: Trace, ranks: int) -> Trace:
    """The step of one rank (the one with the largest shards) out of `ranks`, from the trace of its compute."""
    if ranks < 2:
        raise ValueError(f"sharding needs at least 2 ranks, got {ranks}")
    storages = _Storages(trace.storages)
    units = _units(trace, ranks, storages)
    programs: dict[str, Program] = {}
    for name, program in trace.programs.items():
        source = trace.programs["micro_first"] if name == "micro_next" else program
        if name in ("micro_first", "micro_next", "forward"):
            ops = _Weaver(units, ranks, trace.storages, add=name == "micro_next").weave(source.ops)
        else:
            ops = _on_shards(program.ops, units, ranks, storages)
        programs[name] = Program(name, ops)
    shards = {whole: kept for unit in units.values() for whole, kept in unit.shards.items()}
    return Trace(
        programs=programs,
        schedule=trace.schedule,
        storages=storages.all,
        resident=tuple(shards.get(number, number) for number in trace.resident),
        meta=_meta(trace, units, ranks),
    )


def rows(shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Shape of the first, largest of `ranks` chunks along dimension 0."""
    return (-(-shape[0] // ranks), *shape[1:]) if shape else (1,)


class _Storages:
    """The storages of the new trace: those of the old one, some with another size, and new ones."""

    def __init__(self, old: Mapping[int, Storage]) -> None:
        self.all: dict[int, Storage] = dict(old)
        self._next = max(old, default=-1) + 1

    def add(self, nbytes: int, role: str, module: str, stream: int = COMPUTE_STREAM) -> int:
        number, self._next = self._next, self._next + 1
        self.all[number] = Storage(nbytes, role, module, stream=stream)
        return number


# ---------------------------------------------------------------------- units


def _units(trace: Trace, ranks: int, storages: _Storages) -> dict[str, Unit]:
    """Path → unit, the root first; every parameter and gradient in the one it belongs to."""
    blocks = trace.meta.get("blocks", ())
    assert isinstance(blocks, Sequence)
    units = {path: Unit(path) for path in ("", *blocks)}
    specs, trained = _specs(trace), {ref.storage for op in _ops(trace, "update") for ref in op.inputs}
    for number in trace.resident:
        storage = trace.storages[number]
        if storage.role == types.PARAMETER:
            unknown = TensorSpec((storage.nbytes // DTYPE_BYTES["bfloat16"],), "bfloat16")
            piece = Piece(number, specs.get(number, unknown))
            unit = units[_unit_of(storage.module, units)]
            unit.parameters.append(piece)
            unit.trained.extend([piece] if number in trained else [])
    for number, storage in sorted(trace.storages.items()):
        if storage.role == types.GRADIENT:
            units[_unit_of(storage.module, units)].gradients.append(number)
    for unit in units.values():
        _allocate(unit, ranks, storages)
    return units


def _specs(trace: Trace) -> dict[int, TensorSpec]:
    """Whole shapes of parameters: as the optimizer sees them, else as the first op does."""
    found: dict[int, TensorSpec] = {}
    for op in (*_ops(trace, "update"), *_ops(trace, "micro_first"), *_ops(trace, "forward")):
        for ref in op.inputs:
            storage = trace.storages[ref.storage]
            if storage.role == types.PARAMETER and ref.spec.nbytes == storage.nbytes:
                found.setdefault(ref.storage, ref.spec)
    return found


def _ops(trace: Trace, name: str) -> tuple[Op, ...]:
    return trace.programs[name].ops if name in trace.programs else ()


def _unit_of(module: str, units: Mapping[str, Unit]) -> str:
    """Path of the unit that a module is part of."""
    path = module
    while path and path not in units:
        path = path.rpartition(".")[0]
    return path


def _allocate(unit: Unit, ranks: int, storages: _Storages) -> None:
    """Name the storages that a unit uses, and size them."""
    gathered, cast = 0, 0
    for piece in unit.parameters:
        kept = piece.rows(ranks)
        module = storages.all[piece.storage].module
        unit.shards[piece.storage] = storages.add(kept.nbytes, types.PARAMETER, module)
        low = kept.numel * DTYPE_BYTES[piece.spec.dtype]
        gathered += ranks * low
        cast += low if kept.dtype != piece.spec.dtype else 0
        storages.all[piece.storage] = storages.all[piece.storage]._replace(nbytes=ranks * low, role=types.GATHERED)
    reduced = sum(piece.rows(ranks).numel * DTYPE_BYTES[piece.spec.dtype] for piece in unit.trained)
    kept_bytes = sum(piece.rows(ranks).nbytes for piece in unit.trained)
    unit.gather_input = storages.add(cast, types.COMMUNICATION, unit.path, GATHER_STREAM)
    unit.gather_output = storages.add(gathered, types.COMMUNICATION, unit.path, GATHER_STREAM)
    unit.reduce_input = storages.add(ranks * reduced, types.COMMUNICATION, unit.path)
    unit.reduce_output = storages.add(reduced, types.COMMUNICATION, unit.path, REDUCE_STREAM)
    unit.gradient = storages.add(kept_bytes, types.GRADIENT, unit.path, REDUCE_STREAM)
    unit.more_gradient = storages.add(kept_bytes, types.COMMUNICATION, unit.path, REDUCE_STREAM)


def _meta(trace: Trace, units: Mapping[str, Unit], ranks: int) -> dict[str, object]:
    return {**trace.meta, "ranks": ranks, "units": [path for path, unit in units.items() if unit.parameters]}


# ---------------------------------------------------------------------- forward and backward


class _Weaver:
    """Writes the ops of a micro-batch, or of an evaluation, with what FSDP2 does around them."""

    def __init__(self, units: Mapping[str, Unit], ranks: int, old: Mapping[int, Storage], *, add: bool) -> None:
        self.units, self.ranks, self.old = units, ranks, old
        self.out: list[Op] = []
        self.phase = "forward"
        self.add = add
        """There is a sharded gradient from the micro-batch before, to which the next one is added."""
        self.whole: set[str] = set()
        self.pending: set[str] = set()
        """Units whose all-gather was started and not yet copied out."""
        self.order: list[str] = []
        """Units in the order in which their forward ended, which is what backward prefetches by."""
        self.held_gather: int | None = None
        self.held_reduce: int | None = None

    def weave(self, ops: Sequence[Op]) -> tuple[Op, ...]:
        start = next((i for i, op in enumerate(ops) if op.phase in _BACKWARD), len(ops))
        self._forward(ops[:start])
        if start < len(ops):
            self.phase = "backward"
            self._backward(ops[start:], _loss_inside(ops[:start]))
        return tuple(self.out)

    def _forward(self, ops: Sequence[Op]) -> None:
        end = _model_end(ops, self.old)
        inside = ""
        for position, op in enumerate(ops):
            unit = _unit_of(op.module, self.units)
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
        if path in self.whole or not unit.parameters:
            return
        self._start_gather(unit)
        self._copy_out(unit, *([self.held_gather] if self.held_gather is not None else []))
        self.held_gather = unit.gather_output

    def _leave(self, path: str) -> None:
        """A block's parameters are given back after its forward."""
        if path and self.units[path].parameters:
            self._reshard(self.units[path])
            self.order.append(path)

    def _end_of_model(self) -> None:
        if self.units[""].parameters:
            self.order.append("")
        if self.held_gather is not None:
            self._emit("foretell.all_gather_wait", "", frees=(self.held_gather,))
            self.held_gather = None

    def _backward(self, ops: Sequence[Op], loss_inside: bool) -> None:
        begin = 0 if loss_inside else _model_begin(ops, self.old)
        inside = ""
        for position, (op, unit) in enumerate(zip(ops, _backward_units(ops, self.units), strict=True)):
            if position == begin:
                self._before_backward("")
            if unit != inside:
                if inside:
                    self._after_backward(inside)
                self._before_backward(unit)
                inside = unit
            self.out.append(op)
        if inside:
            self._after_backward(inside)
        for path in self.units:
            if path == "" or path in self.whole:
                self._after_backward(path)
        held = (self.held_reduce,) if self.held_reduce is not None else ()
        left = (self.units[path].gather_output for path in sorted(self.pending))
        self._emit("foretell.reduce_scatter_wait", "", frees=(*held, *left))

    def _before_backward(self, path: str) -> None:
        """Make a unit whole and start to gather the one that comes next."""
        unit = self.units[path]
        if path not in self.order:
            return
        if path not in self.whole:
            if path not in self.pending:
                self._start_gather(unit)
            self._copy_out(unit, unit.gather_output)
            self.pending.discard(path)
        index = len(self.order) - 1 - self.order[::-1].index(path)
        self.order[index] = "done"
        target = self.order[index - 1] if index else path
        if target in self.units and target not in self.whole and target not in self.pending:
            self._start_gather(self.units[target])
            self.pending.add(target)

    def _after_backward(self, path: str) -> None:
        """Give a unit's parameters back and reduce its gradients, which are there after its last call only."""
        unit = self.units[path]
        held = (self.held_reduce,) if self.held_reduce is not None else ()
        self.held_reduce = None
        self._reshard(unit, *held)
        if not unit.trained or path in self.order:
            return
        flat = sum(piece.rows(self.ranks).numel for piece in unit.trained)
        dtypes = {piece.spec.dtype for piece in unit.trained}
        dtype = dtypes.pop() if len(dtypes) == 1 else "bfloat16"
        source = Ref(unit.reduce_input, TensorSpec((self.ranks * flat,), dtype))
        kept = unit.more_gradient if self.add else unit.gradient
        self._emit(
            "foretell.reduce_scatter_copy_in", path, self._gradients(unit), (source,),
            allocates=(unit.reduce_input,), frees=tuple(unit.gradients),
        )  # fmt: skip
        frees = (unit.reduce_output, kept) if self.add else (unit.reduce_output,)
        self._emit(
            "foretell.reduce_scatter", path, (source,), (Ref(kept, TensorSpec((flat,), _WIDE.get(dtype, dtype))),),
            allocates=(unit.reduce_output, kept), frees=frees,
        )  # fmt: skip
        self.held_reduce = unit.reduce_input

    def _gradients(self, unit: Unit) -> list[Ref]:
        """The whole gradients of a unit, each as flat bytes of its storage."""
        return [Ref(number, TensorSpec((self.old[number].nbytes,), "uint8")) for number in unit.gradients]

    def _start_gather(self, unit: Unit) -> None:
        inputs = [Ref(unit.shards[piece.storage], piece.rows(self.ranks)) for piece in unit.parameters]
        self._emit(
            "foretell.all_gather", unit.path, inputs, (self._gathered(unit),),
            allocates=(unit.gather_input, unit.gather_output), frees=(unit.gather_input,),
        )  # fmt: skip

    def _copy_out(self, unit: Unit, *frees: int) -> None:
        self.whole.add(unit.path)
        self._emit(
            "foretell.all_gather_copy_out", unit.path, (self._gathered(unit),), unit.parameters,
            allocates=tuple(piece.storage for piece in unit.parameters), frees=frees,
        )  # fmt: skip

    def _gathered(self, unit: Unit) -> Ref:
        """The result of a unit's all-gather, as one flat tensor."""
        counts = [(self.ranks * piece.rows(self.ranks).numel, piece.spec.dtype) for piece in unit.parameters]
        if len({dtype for _, dtype in counts}) == 1:
            return Ref(unit.gather_output, TensorSpec((sum(count for count, _ in counts),), counts[0][1]))
        nbytes = sum(count * DTYPE_BYTES[dtype] for count, dtype in counts)
        return Ref(unit.gather_output, TensorSpec((nbytes,), "uint8"))

    def _reshard(self, unit: Unit, *frees: int) -> None:
        whole = tuple(piece.storage for piece in unit.parameters) if unit.path in self.whole else ()
        self.whole.discard(unit.path)
        if whole or frees:
            self._emit("foretell.reshard", unit.path, frees=(*whole, *frees))

    def _emit(
        self,
        name: str,
        module: str,
        inputs: Iterable[Ref | Piece] = (),
        outputs: Iterable[Ref | Piece] = (),
        *,
        allocates: tuple[int, ...] = (),
        frees: tuple[int, ...] = (),
    ) -> None:
        read, made = (tuple(Ref(ref.storage, ref.spec) for ref in refs) for refs in (inputs, outputs))
        self.out.append(Op(name, read, made, module, self.phase, 0, allocates, frees))


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


def _loss_inside(forward: Sequence[Op]) -> bool:
    """Whether the marked end of the model is also the end of the loss: nothing but scalars comes after it."""
    marks = [position for position, op in enumerate(forward) if op.name == MODEL_END]
    return bool(marks) and all(ref.spec.shape == () for op in forward[marks[-1] + 1 :] for ref in op.outputs)


def _touches_parameters(op: Op, old: Mapping[int, Storage]) -> bool:
    return any(old[ref.storage].role == types.PARAMETER for ref in op.inputs)


def _backward_units(ops: Sequence[Op], units: Mapping[str, Unit]) -> list[str]:
    """The unit of every backward op; an op of no module belongs to the block around it."""
    found = [_unit_of(op.module, units) for op in ops]
    last = 0
    for position, op in enumerate(ops):
        if op.module:
            if found[position] and found[position] == found[last]:
                found[last:position] = [found[position]] * (position - last)
            last = position
    return found


# ---------------------------------------------------------------------- the update


def _on_shards(ops: Sequence[Op], units: Mapping[str, Unit], ranks: int, storages: _Storages) -> tuple[Op, ...]:
    """The same ops on fp32 shards: an optimizer works element by element, on the shapes of its parameters."""
    shapes = {piece.spec.shape for unit in units.values() for piece in unit.parameters}
    place = {whole: kept for unit in units.values() for whole, kept in unit.shards.items()}
    place |= {number: unit.gradient for unit in units.values() for number in unit.gradients}

    def kept(ref: Ref) -> Ref:
        shape, dtype = ref.spec
        smaller = rows(shape, ranks) if shape and shape in shapes else shape
        return Ref(place.get(ref.storage, ref.storage), TensorSpec(smaller, _WIDE.get(dtype, dtype)))

    done: list[Op] = []
    for op in ops:
        outputs = tuple(kept(ref) for ref in op.outputs)
        for before, after in zip(op.outputs, outputs, strict=True):
            storage = storages.all[after.storage]
            if after.storage in op.allocates and storage.nbytes == before.spec.nbytes:
                storages.all[after.storage] = storage._replace(nbytes=after.spec.nbytes)
        done.append(
            replace(
                op, inputs=tuple(kept(ref) for ref in op.inputs), outputs=outputs, flops=_scaled(op, outputs),
                frees=tuple(dict.fromkeys(place.get(number, number) for number in op.frees)),
            )
        )  # fmt: skip
    return tuple(done)


def _scaled(op: Op, outputs: Iterable[Ref]) -> int | None:
    before = sum(ref.spec.numel for ref in op.outputs)
    if not op.flops or not before:
        return op.flops
    return round(op.flops * sum(ref.spec.numel for ref in outputs) / before)
