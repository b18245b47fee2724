"""What one step computes: the values every later room reads. Plain data, no torch.

A `Trace` is named programs with call counts. A program is a list of `Op`s in the order the
device sees them. Ops speak of tensors by `TensorSpec` and of memory by storage id: which
storages an op allocates and which die right after it, so that a memory timeline can be
replayed without running anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from foretell.units import DTYPE_BYTES

SCHEMA_VERSION = 1

PARAMETER, GRADIENT, OPTIMIZER, BUFFER, INPUT = "parameter", "gradient", "optimizer", "buffer", "input"
ACTIVATION, LOGITS, TEMPORARY = "activation", "logits", "temporary"
GATHERED, COMMUNICATION = "gathered", "communication"
ROLES = frozenset({PARAMETER, GRADIENT, OPTIMIZER, BUFFER, INPUT, ACTIVATION, LOGITS, TEMPORARY, GATHERED, COMMUNICATION})
"""What a storage is for."""
TF32 = "tf32"
"""Attribute of a product of fp32 matrices that rounds its inputs."""
NO_GRAD = "no_grad"
"""Attribute of an op of a CPU's forward that autograd does not write down: the host has less to do for it."""


class TensorSpec(NamedTuple):
    """Shape and dtype of one tensor as an op sees it."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]


class Ref(NamedTuple):
    """A tensor of an op: which storage holds it, and how the op sees it."""

    storage: int
    spec: TensorSpec


@dataclass(frozen=True, slots=True, init=False)
class Op:
    """One operation as the device would run it."""

    name: str
    """Overload name, such as `aten.mm.default`."""
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    module: str
    """Path of the module it belongs to; empty for what belongs to none."""
    phase: str
    """forward, backward, recompute, update, ...: an open string."""
    flops: int | None
    """Floating point operations, 2 per multiply-add; None where no rule knows."""
    allocates: tuple[int, ...] = ()
    """Storages that come to life in this op, in order."""
    frees: tuple[int, ...] = ()
    """Storages that die after this op and before the next, in order."""
    attrs: tuple[int | float | str | bool, ...] = ()
    """What a cost rule needs and shapes do not say (causal, stride, groups)."""

    def __init__(
        self, name: str, inputs: tuple[Ref, ...], outputs: tuple[Ref, ...], module: str, phase: str, flops: int | None,
        allocates: tuple[int, ...] = (), frees: tuple[int, ...] = (), attrs: tuple[int | float | str | bool, ...] = (),
    ) -> None:  # fmt: skip
        """As a frozen dataclass has it, in half the time: a search makes hundreds of thousands."""
        _name(self, name)
        _inputs(self, inputs)
        _outputs(self, outputs)
        _module(self, module)
        _phase(self, phase)
        _flops(self, flops)
        _allocates(self, allocates)
        _frees(self, frees)
        _attrs(self, attrs)

    @property
    def bytes_read(self) -> int:
        return sum(ref.spec.nbytes for ref in self.inputs)

    @property
    def bytes_written(self) -> int:
        return sum(ref.spec.nbytes for ref in self.outputs)


_name, _inputs, _outputs, _module, _phase, _flops, _allocates, _frees, _attrs = (vars(Op)[name].__set__ for name in Op.__slots__)


class Storage(NamedTuple):
    """A piece of device (or host) memory that tensors live in."""

    nbytes: int
    role: str
    module: str
    """Module that owns it: of the parameter, or of the op that allocated it."""
    saved: bool = False
    """Autograd keeps it from forward to backward."""
    host: bool = False
    """It lives in host memory even in a CUDA run (optimizer step counters, for example)."""
    stream: int = 0
    """0 is where the model computes; collectives have streams, and so memory pools, of their own."""


@dataclass(frozen=True, slots=True)
class Program:
    """A named list of ops: `init`, `micro_first`, `micro_next`, `update_first`, `update`, ..."""

    name: str
    ops: tuple[Op, ...]


@dataclass(frozen=True)
class Trace:
    """One rank's step."""

    programs: Mapping[str, Program]
    schedule: Mapping[str, tuple[tuple[str, int], ...]]
    """Name of a run of programs (`first_step`, `steady_step`, `evaluation`) → (program, times)."""
    storages: Mapping[int, Storage]
    resident: tuple[int, ...]
    """Storages alive before the first program, in the order a `.to(device)` allocates them."""
    meta: Mapping[str, object] = field(default_factory=dict)
    """Configuration, versions, parameter counts, blocks, assumptions."""

    def ops(self) -> Iterator[Op]:
        for program in self.programs.values():
            yield from program.ops

    @property
    def ops_without_flop_rule(self) -> tuple[str, ...]:
        return tuple(sorted({op.name for op in self.ops() if op.flops is None}))
