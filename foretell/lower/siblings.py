"""Linear layers of one input as one product, as the engine that serves has them in compiled code (serve/siblings.py).

    traced   q = x·Wq   k = x·Wk   v = x·Wv          here   qkv = x·[Wq Wk Wv]

Weights and results stay as many storages as they were: bytes are the same, one kernel reads and writes all of them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from foretell.trace.types import PARAMETER, Op, Program, Ref, TensorSpec, Trace

PRODUCTS = {"aten.mm.default": 0, "aten.addmm.default": 1}
"""Where the input is among what a product reads; its weight is the next."""


def joined(trace: Trace) -> Trace:
    """The same step with siblings joined."""
    weights = {number for number, one in trace.storages.items() if one.role == PARAMETER}
    programs = {name: Program(name, tuple(_joined(program.ops, weights))) for name, program in trace.programs.items()}
    return replace(trace, programs=programs)


def _joined(ops: tuple[Op, ...], weights: set[int]) -> list[Op]:
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for number, op in enumerate(ops):
        at = PRODUCTS.get(op.name)
        if at is not None and op.inputs[at + 1].storage in weights and op.inputs[at].storage not in weights:
            groups[op.name, op.inputs[at], op.module.rpartition(".")[0]].append(number)
    out = list(ops)
    for (name, *_), numbers in groups.items():
        if len(numbers) > 1:
            some = [ops[number] for number in numbers]
            out[numbers[0]] = _one(some, PRODUCTS[str(name)])
            for number in numbers[1:]:
                out[number] = Op("foretell.view", (), (), ops[number].module, ops[number].phase, 0, (), ops[number].frees)
    return out


def _one(some: list[Op], at: int) -> Op:
    first = some[0]
    wide = sum(op.outputs[0].spec.shape[-1] for op in some)

    def widened(ref: Ref) -> Ref:
        return Ref(ref.storage, TensorSpec((*ref.spec.shape[:-1], wide), ref.spec.dtype))

    inputs = tuple(ref if place == at else widened(ref) for place, ref in enumerate(first.inputs))
    flops = None if any(op.flops is None for op in some) else sum(op.flops or 0 for op in some)
    allocates = tuple(number for op in some for number in op.allocates)
    return Op(first.name, inputs, (widened(first.outputs[0]),), first.module, first.phase, flops, allocates, first.frees, first.attrs)

