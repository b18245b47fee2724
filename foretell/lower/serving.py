"""A server's step of any size, from one that was traced: other counts of tokens and of rows that sample.

    traced  │ TOKENS = 1021 tokens, ROWS = 509 of them sample        both prime, and divide no size of the model
    a step  │ 37 tokens, 12 sample                                   every size that they divide, scaled

What is left of the trace is the same: weights are, and which ops run hangs on no count of tokens. Attention, one op for each layer
in the trace, becomes what the sequences of the step need: keys and values written to pages, attention over pages for those that
generate, and causal attention for each piece of a prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from foretell.errors import ModelError
from foretell.trace.types import BUFFER, PARAMETER, Op, Program, Ref, Storage, TensorSpec, Trace

ATTEND = "foretell_serving.attend.default"
"""In a traced step: inputs are queries, keys and values, each (tokens, heads, size)."""
PAGED = "foretell_serving.paged_attention.default"
FLASH = "aten._scaled_dot_product_flash_attention.default"
WRITE = "aten.cat.default"
"""What writing keys and values of a step costs: reading both and writing both."""


class StepShape(NamedTuple):
    """What a step costs depends on this."""

    generating: int
    """Sequences that compute one token."""
    attended: int
    """Tokens that these attend to, themselves included."""
    chunks: tuple[tuple[int, int], ...]
    """Of prompts: tokens before, tokens computed."""
    samples: int
    """Sequences that get a token."""

    @property
    def tokens(self) -> int:
        return self.generating + sum(count for _, count in self.chunks)


TOKENS, ROWS = 1021, 509
_ODD = (TOKENS, TOKENS + 1, ROWS)
"""A model may look for where one sequence ends and the next begins by a list of one more."""


def resized(trace: Trace, tokens: int, rows: int) -> Trace:
    """The same step with other counts; raises where a weight's size could be taken for a count."""
    fixed = {number for number, one in trace.storages.items() if one.role in (PARAMETER, BUFFER)}
    for op in trace.ops():
        for ref in op.inputs:
            if ref.storage in fixed and any(size % odd == 0 for size in ref.spec.shape if size for odd in _ODD):
                raise ModelError(f"a weight of {ref.spec.shape} has a size that one of {_ODD} divides", "serve a model of other sizes")

    def scaled(size: int) -> int:
        for odd, count in zip(_ODD, (tokens, tokens + 1, rows), strict=True):
            if size and size % odd == 0:
                return size // odd * count
        return size

    def ref_of(ref: Ref) -> Ref:
        return Ref(ref.storage, TensorSpec(tuple(map(scaled, ref.spec.shape)), ref.spec.dtype))

    def op_of(op: Op) -> Op:
        flops = None if op.flops is None else scaled(op.flops)
        return replace(op, inputs=tuple(map(ref_of, op.inputs)), outputs=tuple(map(ref_of, op.outputs)), flops=flops)

    def storage_of(number: int, one: Storage) -> Storage:
        return one if number in fixed else one._replace(nbytes=scaled(one.nbytes))

    programs = {name: Program(name, tuple(map(op_of, program.ops))) for name, program in trace.programs.items()}
    return replace(trace, programs=programs, storages={number: storage_of(number, one) for number, one in trace.storages.items()})


def kv_bytes(trace: Trace) -> int:
    """Of a token, all layers."""
    return sum(ref.spec.nbytes // ref.spec.shape[0] for op in trace.ops() if op.name == ATTEND for ref in op.inputs[1:])


def served_step(trace: Trace, shape: StepShape, cached: int) -> Trace:
    """A step of this shape, beside pages for so many tokens."""
    found = resized(trace, shape.tokens, max(1, shape.samples))
    pool = max(found.storages) + 1
    storages = {**found.storages, pool: Storage(cached * kv_bytes(trace), BUFFER, "")}
    programs = {
        name: Program(name, tuple(each for op in program.ops for each in (_attention(op, shape, pool) if op.name == ATTEND else (op,))))
        for name, program in found.programs.items()
    }
    return replace(found, programs=programs, storages=storages, resident=(*found.resident, pool))


def _attention(op: Op, shape: StepShape, pool: int) -> Iterator[Op]:
    query, key, value = (ref.spec for ref in op.inputs)
    heads, size = query.shape[1:]

    def kept(spec: TensorSpec, *lead: int) -> Ref:
        return Ref(pool, TensorSpec((lead[0], spec.shape[1], *lead[1:], spec.shape[2]), spec.dtype))

    def of(storage: int, *sizes: int) -> Ref:
        return Ref(storage, TensorSpec(sizes, query.dtype))

    asks, result = op.inputs[0].storage, op.outputs[0].storage
    parts = [Op(WRITE, op.inputs[1:], (kept(key, query.shape[0]), kept(value, query.shape[0])), op.module, op.phase, 0)]
    if shape.generating:
        many, tokens = shape.generating, -(-shape.attended // shape.generating)
        flops = 2 * many * heads * tokens * (size + value.shape[2])
        given = (of(asks, many, heads, size), kept(key, many, tokens), kept(value, many, tokens))
        parts.append(Op(PAGED, given, (of(result, many, heads, value.shape[2]),), op.module, op.phase, flops))
    for start, count in shape.chunks:
        flops = 2 * heads * count * (start + (count + 1) // 2) * (size + value.shape[2])
        given = (of(asks, 1, heads, count, size), kept(key, 1, start + count), kept(value, 1, start + count))
        parts.append(Op(FLASH, given, (of(result, 1, heads, count, value.shape[2]),), op.module, op.phase, flops, attrs=(0.0, True)))
    parts[0] = replace(parts[0], allocates=op.allocates)
    parts[-1] = replace(parts[-1], frees=op.frees)
    yield from parts
