"""Replicas that step alone: no message between them in a step, and a round that joins them every so many steps.

    steps      │ step │ step │ ... │ step │          each replica by itself: as lowered without the axis dp_replicate
    round      │ moved = begin - weights │ a part to each │ mean in the order of ranks │ mean to each │ SGD on begin │ weights = begin │

Beside what a replica holds there stay, for every trained weight that a rank has, the weights that the round began from and the outer
momentum in fp32; with int8 what rounding cut off too, of this rank's own and of the part that it averages. What is exchanged goes in two
messages, so that each rank averages one part and everybody gets the same bits; both are exchanges of all with all, which take one
crossing of the link however many replicas there are. Ops and lifetimes are those of `runtime.parallel.sync`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from foretell.lower.fsdp.units import DP_REPLICATE, Storages
from foretell.plan.types import Plan
from foretell.trace import types
from foretell.trace.recipe import BLOCK
from foretell.trace.types import Op, Program, Ref, TensorSpec, Trace
from foretell.units import DTYPE_BYTES

ROUND = "round"
THROUGH_HUB = "through:hub"
"""Of a message that one process gets from all, or sends to all."""
OUTER = "outer"
"""The phase of what joins replicas."""


def padded(elements: int, replicas: int) -> int:
    """Elements as they are exchanged: equal parts of whole blocks with one scale, a part for each replica."""
    each = replicas * BLOCK
    return -(-elements // each) * each


def scales_of(elements: int) -> int:
    """Scales of so many elements in 8 bits."""
    return elements // BLOCK


def sent_bytes(elements: int, replicas: int, format: str, *, through_hub: bool = False) -> int:
    """What a rank sends in a round: a part to each other replica, and its own average to each; or all of it to a hub."""
    if through_hub:
        whole = padded(elements, 1)
        return 4 * whole if format == "fp32" else whole + 4 * scales_of(whole)
    part = padded(elements, replicas) // replicas
    return 2 * (replicas - 1) * (4 * part if format == "fp32" else part + 4 * scales_of(part))


def trained_elements(trace: Trace) -> int:
    """Elements that the optimizer of this rank updates, each parameter once."""
    found: dict[int, int] = {}
    for name, program in trace.programs.items():
        if not name.startswith("update"):
            continue
        for op in program.ops:
            for ref in (*op.inputs, *op.outputs):
                storage = trace.storages[ref.storage]
                if storage.role == types.PARAMETER:
                    found[ref.storage] = storage.nbytes // DTYPE_BYTES[ref.spec.dtype]
    return sum(found.values())


def joined(trace: Trace, plan: Plan) -> Trace:
    """A rank's trace, lowered without the axis of replicas, with a run of its own that joins them."""
    assert plan.sync is not None
    replicas = plan.mesh.dp_replicate
    storages = Storages(trace.storages)
    elements = padded(trained_elements(trace), replicas)
    making = _Round(storages, elements, replicas, through_hub=plan.sync.quorum > 0)
    ops = tuple(making.in_codes() if plan.sync.format == "int8" else making.in_floats())
    return replace(
        trace, programs={**trace.programs, ROUND: Program(ROUND, ops)}, schedule={**trace.schedule, ROUND: ((ROUND, 1),)},
        storages=storages.all, resident=(*trace.resident, *making.kept), meta={**trace.meta, "replicas": replicas},
    )  # fmt: skip


@dataclass
class _Round:
    """The ops of a round on flat vectors."""

    storages: Storages
    elements: int
    replicas: int
    through_hub: bool
    """One process gets what all replicas send, and sends the mean to all: its link carries all of it."""

    def __post_init__(self) -> None:
        self.part = self.elements // self.replicas
        self.begin = self._kept(self.elements)
        self.momentum = self._kept(self.elements)
        self.kept = [self.begin.storage, self.momentum.storage]

    def _kept(self, elements: int) -> Ref:
        return Ref(self.storages.add(4 * elements, types.OPTIMIZER, OUTER), TensorSpec((elements,), "float32"))

    def _new(self, elements: int, dtype: str = "float32") -> Ref:
        spec = TensorSpec((elements,), dtype)
        return Ref(self.storages.add(spec.nbytes, types.COMMUNICATION, OUTER), spec)

    def in_floats(self) -> Iterator[Op]:
        moved = self._new(self.elements)
        yield _op("aten.cat.default", (self.begin,), moved, new=True)
        yield _op("aten.sub.out", (self.begin, moved), moved)
        received = self._new(self.elements)
        yield self._message(moved, received)
        mean = self._new(self.part)
        yield _op("aten.clone.default", (mean,), mean, new=True)
        for _ in range(self.replicas):
            yield _op("aten.add_.Tensor", (mean, mean), mean)
        same, whole = self._new(self.elements), self._new(self.elements)
        yield _op("aten.repeat.default", (mean,), same, new=True, frees=(mean.storage,))
        yield self._message(same, whole)
        yield from self._outer_step(whole, received)

    def in_codes(self) -> Iterator[Op]:
        cut, cut_of_part = self._kept(self.elements), self._kept(self.part)
        self.kept += [cut.storage, cut_of_part.storage]
        moved = self._new(self.elements)
        yield _op("aten.cat.default", (self.begin,), moved, new=True)
        yield _op("aten.sub.out", (self.begin, moved), moved)
        yield _op("aten.add_.Tensor", (moved, cut), moved)
        sent, received = self._coded(self.elements), self._coded(self.elements)
        yield from self._rounded(moved, sent, cut)
        yield self._message(sent, received)
        mean = self._new(self.part)
        yield _op("aten.clone.default", (cut_of_part,), mean, new=True)
        for _ in range(self.replicas):
            yield _op("aten.add_.Tensor", (mean, mean), mean)
        own, same, whole = self._coded(self.part), self._coded(self.elements), self._coded(self.elements)
        yield from self._rounded(mean, own, cut_of_part)
        yield _op("aten.repeat.default", (own,), same, new=True, frees=(own.storage,))
        yield self._message(same, whole)
        plain = self._new(self.elements)
        yield _op("aten.mul.Tensor", (whole,), plain, new=True, frees=(whole.storage, mean.storage))
        yield from self._outer_step(plain, received, moved)

    def _coded(self, elements: int) -> Ref:
        """Codes and their scales, sent as one vector of bytes."""
        return self._new(elements + 4 * scales_of(elements), "int8")

    def _rounded(self, exact: Ref, coded: Ref, cut: Ref) -> Iterator[Op]:
        """Codes of a vector, and what they leave out."""
        beside = self._new(exact.spec.numel)
        yield _op("aten.abs.default", (exact,), beside, new=True)
        yield _op("aten.div.Tensor", (exact,), beside)
        yield _op("aten._to_copy.default", (beside,), coded, new=True)
        yield _op("aten.mul.out", (coded,), beside)
        yield _op("aten.sub.out", (exact, beside), cut, frees=(beside.storage,))

    def _outer_step(self, mean: Ref, *over: Ref) -> Iterator[Op]:
        """SGD on the weights that the round began from, which become everybody's."""
        yield _op("aten.mul_.Tensor", (self.momentum,), self.momentum, frees=tuple(ref.storage for ref in over))
        yield _op("aten.add_.Tensor", (self.momentum, mean), self.momentum)
        yield _op("aten.add_.Tensor", (mean, self.momentum), mean)
        yield _op("aten.sub_.Tensor", (self.begin, mean), self.begin, frees=(mean.storage,))
        yield _op("aten.copy_.default", (self.begin,), self.begin)

    def _message(self, given: Ref, got: Ref) -> Op:
        attrs = (f"axis:{DP_REPLICATE}", f"ranks:{self.replicas}", *((THROUGH_HUB,) if self.through_hub else ()))
        return Op("foretell.all_to_all", (given,), (got,), "", OUTER, 0, (got.storage,), (given.storage,), attrs)


def _op(name: str, inputs: tuple[Ref, ...], output: Ref, *, new: bool = False, frees: tuple[int, ...] = ()) -> Op:
    allocates = (output.storage,) if new else ()
    return Op(name, inputs, (output,), "", OUTER, 0, allocates, frees)
