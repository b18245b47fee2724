"""Products in 8 bits: linear layers of the blocks are marked, and what they read is scaled and cast first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from foretell.trace import types
from foretell.trace.types import Op, Program, Ref, TensorSpec, Trace

MARK = "float8"
_PRODUCTS = ("aten.mm.default", "aten.addmm.default")
_EXPERTS = "aten.bmm.default"


class Float8(NamedTuple):
    """A recipe: passes over each operand before the product, rate of the product over a plain one, what stays 16-bit."""

    passes: int
    rate: float
    wide_weight_gradients: bool
    source: str


RECIPES: Mapping[str, Float8] = {
    "delayed": Float8(1, 1.0, False, "scales from steps before: one pass to cast"),
    "tensorwise": Float8(2, 1.0, False, "one pass for the largest value, one to cast"),
    "rowwise": Float8(2, 0.75, False, "assumed: products with row scales run slower"),
    "rowwise_with_gw_hp": Float8(2, 0.75, True, "assumed: as row-wise; weight gradients in 16 bits"),
    "mxfp8": Float8(2, 0.9, False, "assumed: a scale for every 32 elements, in hardware"),
}


def with_float8(trace: Trace, recipe: str) -> Trace:
    """The trace with its blocks' products in 8 bits."""
    if not recipe:
        return trace
    how = RECIPES[recipe]
    programs = {name: Program(name, tuple(_lowered(trace, program.ops, how))) for name, program in trace.programs.items()}
    return replace(trace, programs=programs)


def _lowered(trace: Trace, ops: tuple[Op, ...], how: Float8) -> Iterator[Op]:
    """What several products read is cast once: a weight for forward and backward, a gradient for both of its products."""
    cast: set[int] = set()
    for op in ops:
        if not _narrow(trace, op, how):
            yield op
            continue
        for ref in op.inputs[-2:]:
            if ref.storage in cast:
                continue
            cast.add(ref.storage)
            small = Ref(ref.storage, TensorSpec(ref.spec.shape, "float8_e4m3fn"))
            for _ in range(how.passes):
                yield Op("aten._to_copy.default", (ref,), (small,), op.module, op.phase, 0)
        yield replace(op, attrs=(*op.attrs, MARK))


def _narrow(trace: Trace, op: Op, how: Float8) -> bool:
    inside = "blocks." in op.module and op.phase != "update"
    if not inside or not (op.name in _PRODUCTS or (op.name == _EXPERTS and op.module.endswith("experts"))):
        return False
    if not how.wide_weight_gradients or op.phase != "backward":
        return True
    return not any(trace.storages[ref.storage].role == types.GRADIENT for ref in op.outputs)
