"""The trace of any micro-batch from those of two: every size of an op is a straight line in the number of samples.

Two traces that differ in the micro-batch alone run the same ops on the same storages; only integers differ. Where they
do not (an op that a larger batch runs another way), or where a size is no whole number on the line, the answer is
refused and the micro-batch must be traced itself. One sample is always traced: a dimension of 1 is special.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from foretell.trace import types
from foretell.trace.types import Op, Program, Ref, Storage, TensorSpec, Trace

CROOKED = frozenset({"aten.mkldnn_rnn_layer.default"})
"""Ops that keep something whose size no shape says and that need not be a line."""
_LOOSE = (types.ACTIVATION, types.LOGITS, types.TEMPORARY)


class BatchMismatch(Exception):
    """The two traces are not of the same step."""


def rebatch(small: Trace, large: Trace, sizes: tuple[int, int], micro_batch: int) -> Trace:
    """The step with `micro_batch` samples, from those with `sizes` of them (both above 1)."""
    if micro_batch == sizes[0]:
        return small
    if micro_batch == sizes[1]:
        return large
    line = _Line(sizes, micro_batch)
    if small.programs.keys() != large.programs.keys() or small.storages.keys() != large.storages.keys():
        raise BatchMismatch("the traces have other programs or storages")
    if any(op.name in CROOKED for op in small.ops()):
        raise BatchMismatch("what a recurrent layer keeps on this CPU is not known for other micro-batches")
    programs = {
        name: Program(name, line.ops(program.ops, large.programs[name].ops)) for name, program in small.programs.items()
    }
    storages = {number: line.storage(storage, large.storages[number]) for number, storage in small.storages.items()}
    meta = {**small.meta, "batch": line.batch(small.meta.get("batch", []), large.meta.get("batch", []))}
    return replace(small, programs=programs, storages=storages, meta=meta)


class _Line:
    """Integers at two micro-batches, carried on to a third."""

    def __init__(self, sizes: tuple[int, int], wanted: int) -> None:
        self.first, self.second = sizes
        self.wanted = wanted
        self.specs: dict[tuple[TensorSpec, TensorSpec], TensorSpec] = {}

    def at(self, one: int, two: int) -> int:
        if one == two:
            return one
        slope, rest = divmod(two - one, self.second - self.first)
        if rest:
            raise BatchMismatch(f"a size of {one} and {two} is not on a line of whole numbers")
        return one + slope * (self.wanted - self.first)

    def spec(self, one: TensorSpec, two: TensorSpec) -> TensorSpec:
        if one is two or one == two:
            return one
        found = self.specs.get((one, two))
        if found is None:
            if one.dtype != two.dtype or len(one.shape) != len(two.shape):
                raise BatchMismatch("a tensor has another dtype or rank")
            shape = tuple(self.at(a, b) for a, b in zip(one.shape, two.shape, strict=True))
            found = self.specs[one, two] = TensorSpec(shape, one.dtype)
        return found

    def refs(self, one: Sequence[Ref], two: Sequence[Ref]) -> tuple[Ref, ...]:
        if len(one) != len(two) or any(a.storage != b.storage for a, b in zip(one, two, strict=True)):
            raise BatchMismatch("an op works on other tensors")
        return tuple(Ref(a.storage, self.spec(a.spec, b.spec)) for a, b in zip(one, two, strict=True))

    def ops(self, one: Sequence[Op], two: Sequence[Op]) -> tuple[Op, ...]:
        if len(one) != len(two):
            raise BatchMismatch("a program has another number of ops")
        return tuple(self.op(a, b) for a, b in zip(one, two, strict=True))

    def op(self, one: Op, two: Op) -> Op:
        same = (
            one.name == two.name and one.module == two.module and one.phase == two.phase
            and one.allocates == two.allocates and one.frees == two.frees and len(one.attrs) == len(two.attrs)
        )  # fmt: skip
        if not same or (one.flops is None) != (two.flops is None):
            raise BatchMismatch(f"{two.name} in {two.module} where {one.name} was")
        flops = one.flops if one.flops is None or two.flops is None else self.at(one.flops, two.flops)
        attrs = one.attrs if one.attrs == two.attrs else tuple(map(self.attr, one.attrs, two.attrs))
        return Op(
            one.name, self.refs(one.inputs, two.inputs), self.refs(one.outputs, two.outputs), one.module, one.phase,
            flops, one.allocates, one.frees, attrs,
        )  # fmt: skip

    def attr(self, one: Any, two: Any) -> Any:
        if one == two:
            return one
        if type(one) is int and type(two) is int:
            return self.at(one, two)
        raise BatchMismatch(f"an op has {one!r} at one micro-batch and {two!r} at another")

    def storage(self, one: Storage, two: Storage) -> Storage:
        if one._replace(nbytes=0) != two._replace(nbytes=0, role=one.role if two.role in _LOOSE else two.role):
            raise BatchMismatch("a storage is for something else")
        return one if one.nbytes == two.nbytes else one._replace(nbytes=self.at(one.nbytes, two.nbytes))

    def batch(self, one: object, two: object) -> list[list[Any]]:
        assert isinstance(one, Sequence) and isinstance(two, Sequence)
        return [[a[0], *map(self.at, a[1:], b[1:])] for a, b in zip(one, two, strict=True)]
