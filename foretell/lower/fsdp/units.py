"""What fully_shard gathers and reduces at once, with the storages that takes: the units of one sharded rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from foretell.trace import types
from foretell.trace.moments.rows import has_codes, shapes
from foretell.trace.recipe import CODED_FORMATS
from foretell.trace.types import Op, Storage, TensorSpec, Trace
from foretell.units import DTYPE_BYTES

COMPUTE_STREAM, GATHER_STREAM, REDUCE_STREAM = 0, 1, 2
"""Streams whose allocator pools FSDP2 uses: compute, all-gather copy-in, reduce-scatter."""

SEND, RECEIVE = "foretell.send", "foretell.receive"
COLLECTIVES = ("foretell.all_gather", "foretell.reduce_scatter", "foretell.all_reduce", "foretell.all_to_all")
"""Ops in which ranks talk to each other; their attributes name the mesh axis and how many take part."""

FIRST, LAST = "micro_first", "micro_last"
ALONE, ADD, BEGIN, MORE, END = "alone", "add", "begin", "more", "end"
"""What a micro-batch does with scattered gradients: keep them, add them to those kept; with replicas, where only the last
one sums over them: hold them, add them to those held, add those held and sum."""

MODEL_END = "foretell.model_end"
"""A marker op, if the trace has one: here the root's forward returned and the loss begins."""

DP_SHARD, DP_REPLICATE = "dp_shard", "dp_replicate"


@dataclass(frozen=True, kw_only=True)
class FsdpSharding:
    """How parameters are sharded."""

    ranks: int
    """Ranks that hold a parameter together."""
    replicate: int = 1
    """Groups of such ranks that hold the same."""
    reshard: bool | int = True
    """What happens to a block's parameters after its forward: given back, kept, or spread over so many ranks."""
    wide: Mapping[str, str] = field(default_factory=dict)
    """Dtype of compute → dtype that is kept and trained, where it differs."""
    reduce: str | None = None
    """Dtype in which gradients are summed; None: their own."""
    apart: Mapping[str, bool | int] = field(default_factory=dict)
    """Unit → the same, where it differs; the root, whose path is empty, is kept unless it is here."""
    state_format: str = "fp32"
    """Of optimizer states."""
    inside: bool = False
    """Sharded along the first dimension after the rows that divides, if one does: as stacks of experts are."""

    def part(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the first, largest shard."""
        for dim in range(1, len(shape)) if self.inside else ():
            if shape[dim] % self.ranks == 0:
                return (*shape[:dim], shape[dim] // self.ranks, *shape[dim + 1 :])
        return rows(shape, self.ranks)

    def after(self, path: str) -> bool | int:
        """What happens to a unit's parameters after its forward."""
        return self.apart.get(path, self.reshard if path else False)

    def rows_of(self, shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Shapes that are sharded as a parameter of this one is: its own, and those of codes and scales."""
        yield shape
        if self.state_format in CODED_FORMATS and has_codes(shape):
            yield from (shape for shape, _ in shapes(shape, self.state_format).values())

    def kept(self, dtype: str) -> str:
        return self.wide.get(dtype, dtype)

    def summed(self, dtype: str) -> str:
        return self.reduce or dtype


class ShardedParameter(NamedTuple):
    """A parameter, which is sharded by rows."""

    storage: int
    spec: TensorSpec
    """Whole, as compute sees it."""

    def rows(self, way: FsdpSharding) -> TensorSpec:
        """What one rank keeps of it."""
        return TensorSpec(way.part(self.spec.shape), way.kept(self.spec.dtype))


@dataclass
class FsdpUnit:
    """What is gathered and reduced at once: a block, or what is left for the root."""

    path: str
    parameters: list[ShardedParameter] = field(default_factory=list)
    trained: list[ShardedParameter] = field(default_factory=list)
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
    casts: dict[int, int] = field(default_factory=dict)
    """Plain replicas: storage of the whole parameter → that of its cast copy, where it is cast."""
    parts: dict[int, int] = field(default_factory=dict)
    """Resharding to fewer ranks: storage of the whole parameter → that of the part kept after forward."""
    part_input: int = -1
    """What is gathered of those parts, copied together."""
    partial: int = -1
    """Replicas: what was scattered in earlier micro-batches, to be summed over replicas with the last one."""


def rows(shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Shape of the first, largest of `ranks` chunks along dimension 0."""
    return (-(-shape[0] // ranks), *shape[1:]) if shape else (1,)


class Storages:
    """The storages of the new trace: those of the old one, some with another size, and new ones."""

    def __init__(self, old: Mapping[int, Storage]) -> None:
        self.all: dict[int, Storage] = dict(old)
        self._next = max(old, default=-1) + 1

    def add(self, nbytes: int, role: str, module: str, stream: int = COMPUTE_STREAM) -> int:
        number, self._next = self._next, self._next + 1
        self.all[number] = Storage(nbytes, role, module, stream=stream)
        return number


# ---------------------------------------------------------------------- units


def units_of(
    trace: Trace, way: FsdpSharding, storages: Storages, chosen: Sequence[str] | None = None, left: Sequence[str] = (),
    beside: Sequence[str] | None = None,
) -> dict[str, FsdpUnit]:  # fmt: skip
    """Path → unit, the root first; every parameter and gradient in the one it belongs to.

    With `chosen` these are the units, and only what they hold; what modules in `left` hold is in none. With `beside` these are
    the units beside the root, not the blocks."""
    blocks = (trace.meta.get("blocks", ()) if beside is None else beside) if chosen is None else chosen
    assert isinstance(blocks, Sequence)
    units = {path: FsdpUnit(path) for path in ("", *blocks)}
    out = {number for number, storage in trace.storages.items() if _out(storage.module, units, chosen, left)}
    specs, trained = _specs(trace), {ref.storage for op in _ops(trace, "update") for ref in op.inputs}
    for number in trace.resident:
        storage = trace.storages[number]
        if storage.role == types.PARAMETER and number not in out:
            unknown = TensorSpec((storage.nbytes // DTYPE_BYTES["bfloat16"],), "bfloat16")
            piece = ShardedParameter(number, specs.get(number, unknown))
            unit = units[unit_of(storage.module, units)]
            unit.parameters.append(piece)
            unit.trained.extend([piece] if number in trained else [])
    for number, storage in sorted(trace.storages.items()):
        if storage.role == types.GRADIENT and number not in out:
            units[unit_of(storage.module, units)].gradients.append(number)
    for unit in units.values():
        _allocate(unit, way, storages)
    return units


def _out(module: str, units: Mapping[str, FsdpUnit], chosen: Sequence[str] | None, left: Sequence[str]) -> bool:
    """Whether what a module holds is in no unit."""
    if chosen is not None and not unit_of(module, units):
        return True
    return any(module == path or module.startswith(f"{path}.") for path in left)


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


def unit_of(module: str, units: Mapping[str, FsdpUnit]) -> str:
    """Path of the unit that a module is part of."""
    path = module
    while path and path not in units:
        path = path.rpartition(".")[0]
    return path


def _allocate(unit: FsdpUnit, way: FsdpSharding, storages: Storages) -> None:
    """Name the storages that a unit uses, and size them."""
    gathered, cast = 0, 0
    for piece in unit.parameters:
        kept = piece.rows(way)
        module = storages.all[piece.storage].module
        unit.shards[piece.storage] = storages.add(kept.nbytes, types.PARAMETER, module)
        low = kept.numel * DTYPE_BYTES[piece.spec.dtype]
        gathered += way.ranks * low
        cast += low if kept.dtype != piece.spec.dtype else 0
        if way.ranks == 1 and kept.dtype != piece.spec.dtype:
            unit.casts[piece.storage] = storages.add(low, types.COMMUNICATION, unit.path)
        if way.after(unit.path) > 1:
            part = way.ranks * low // int(way.after(unit.path))
            unit.parts[piece.storage] = storages.add(part, types.GATHERED, module)
        storages.all[piece.storage] = storages.all[piece.storage]._replace(nbytes=way.ranks * low, role=types.GATHERED)
    reduced = sum(piece.rows(way).numel * DTYPE_BYTES[way.summed(piece.spec.dtype)] for piece in unit.trained)
    kept_bytes = sum(piece.rows(way).nbytes for piece in unit.trained)
    unit.gather_input = storages.add(cast, types.COMMUNICATION, unit.path, GATHER_STREAM)
    unit.gather_output = storages.add(gathered, types.COMMUNICATION, unit.path, GATHER_STREAM)
    parts = sum(storages.all[number].nbytes for number in unit.parts.values()) if cast else 0
    unit.part_input = storages.add(parts, types.COMMUNICATION, unit.path, GATHER_STREAM)
    unit.reduce_input = storages.add(way.ranks * reduced, types.COMMUNICATION, unit.path)
    unit.gradient = storages.add(kept_bytes, types.GRADIENT, unit.path, REDUCE_STREAM)
    unit.more_gradient = storages.add(kept_bytes, types.COMMUNICATION, unit.path, REDUCE_STREAM)
    unit.partial = storages.add(reduced, types.COMMUNICATION, unit.path, REDUCE_STREAM)
    if any(way.summed(piece.spec.dtype) != way.kept(piece.spec.dtype) for piece in unit.trained):
        unit.reduce_output = storages.add(reduced, types.COMMUNICATION, unit.path, REDUCE_STREAM)
