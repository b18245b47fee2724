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


Layer = tuple[TensorSpec, TensorSpec, TensorSpec]
"""Queries, keys and values of one attention, each (tokens, heads, size)."""


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

    known: dict[TensorSpec, TensorSpec] = {}

    def ref_of(ref: Ref) -> Ref:
        spec = known.get(ref.spec)
        if spec is None:
            spec = known[ref.spec] = TensorSpec(tuple(map(scaled, ref.spec.shape)), ref.spec.dtype)
        return ref if spec == ref.spec else Ref(ref.storage, spec)

    def op_of(op: Op) -> Op:
        flops = None if op.flops is None else scaled(op.flops)
        inputs, outputs = tuple(map(ref_of, op.inputs)), tuple(map(ref_of, op.outputs))
        return Op(op.name, inputs, outputs, op.module, op.phase, flops, op.allocates, op.frees, op.attrs)

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


class Specs(NamedTuple):
    """What one attention of a step reads and writes."""

    name: str
    query: TensorSpec
    key: TensorSpec
    value: TensorSpec
    result: TensorSpec
    attrs: tuple[float | bool, ...]


def generating(layer: Layer, many: int, tokens: int) -> Specs:
    """One token of each of many sequences, against as many tokens each."""
    query, key, value = layer
    heads, size, wide, dtype = query.shape[1], query.shape[2], value.shape[2], query.dtype
    kept = [TensorSpec((many, one.shape[1], tokens, one.shape[2]), one.dtype) for one in (key, value)]
    return Specs(PAGED, TensorSpec((many, heads, size), dtype), kept[0], kept[1], TensorSpec((many, heads, wide), dtype), ())


def prompting(layer: Layer, start: int, count: int) -> Specs:
    """A piece of a prompt, against itself and what is before it."""
    query, key, value = layer
    heads, size, wide, dtype = query.shape[1], query.shape[2], value.shape[2], query.dtype
    kept = [TensorSpec((1, one.shape[1], start + count, one.shape[2]), one.dtype) for one in (key, value)]
    return Specs(FLASH, TensorSpec((1, heads, count, size), dtype), kept[0], kept[1], TensorSpec((1, heads, count, wide), dtype), (0.0, True))


def layers_of_attention(trace: Trace) -> list[Layer]:
    """Queries, keys and values of each layer, as traced."""
    return [(op.inputs[0].spec, op.inputs[1].spec, op.inputs[2].spec) for op in trace.ops() if op.name == ATTEND]


def _attention(op: Op, shape: StepShape, pool: int) -> Iterator[Op]:
    layer = (op.inputs[0].spec, op.inputs[1].spec, op.inputs[2].spec)
    query, key, value = layer
    asks, result = op.inputs[0].storage, op.outputs[0].storage

    def made(specs: Specs, pairs: int) -> Op:
        """`pairs`: of queries and keys that meet, of one head."""
        given = (Ref(asks, specs.query), Ref(pool, specs.key), Ref(pool, specs.value))
        flops = 2 * pairs * query.shape[1] * (query.shape[2] + value.shape[2])
        return Op(specs.name, given, (Ref(result, specs.result),), op.module, op.phase, flops, attrs=specs.attrs)

    parts = [Op(WRITE, op.inputs[1:], (Ref(pool, key), Ref(pool, value)), op.module, op.phase, 0)]
    if shape.generating:
        tokens = -(-shape.attended // shape.generating)
        parts.append(made(generating(layer, shape.generating, tokens), shape.generating * tokens))
    for start, count in shape.chunks:
        parts.append(made(prompting(layer, start, count), count * start + count * (count + 1) // 2))
    parts[0] = replace(parts[0], allocates=op.allocates)
    parts[-1] = replace(parts[-1], frees=op.frees)
    yield from parts
