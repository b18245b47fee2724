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
from foretell.lower.compiling import compiled
from foretell.trace.types import BUFFER, PARAMETER, Op, Program, Ref, Storage, TensorSpec, Trace
from foretell.units import DTYPE_BYTES

ATTEND = "foretell_serving.attend.default"
"""In a traced step: inputs are queries, keys and values, each (tokens, heads, size)."""
PAGED = "foretell_serving.paged_attention.default"
FLASH = "aten._scaled_dot_product_flash_attention.default"
WRITE = "aten.cat.default"
"""What writing keys and values of a step costs: reading both and writing both."""


class Layer(NamedTuple):
    """One attention."""

    query: TensorSpec
    """(tokens, heads, size), as keys and values."""
    key: TensorSpec
    value: TensorSpec
    wide: int
    """Size of a head of the result."""
    window: int = 0
    """Tokens that a query sees at most; 0: all."""

    def seen(self, tokens: int) -> int:
        return min(tokens, self.window) if self.window else tokens


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


def kv_bytes(trace: Trace, dtype: str = "", scale_bytes: int = 0) -> int:
    """Of a token, all layers, in pages of this dtype (else the model's own) with so many bytes of scale for each head."""
    found = 0
    for op in trace.ops():
        if op.name == ATTEND:
            for _, heads, size in (ref.spec.shape for ref in op.inputs[1:]):
                each = DTYPE_BYTES[dtype or op.inputs[1].spec.dtype]
                found += heads * (size * each + (scale_bytes if size else 0))
    return found


def kept_bytes(trace: Trace, tokens: int, step: int = 0) -> int:
    """Keys and values that a sequence of so many tokens needs, where those out of every window are given back: a layer with one keeps at
    most it and the tokens of a step."""
    found = 0
    for op in trace.ops():
        if op.name == ATTEND:
            window = _window(op)
            held = min(tokens, window + step) if window else tokens
            found += held * sum(ref.spec.nbytes // ref.spec.shape[0] for ref in op.inputs[1:])
    return found


def latent(trace: Trace) -> Trace:
    """Of latent attention (DeepSeek's) what its kernels keep: one compressed row and a rotary key a token, and queries that are as wide."""
    sizes = _latent_sizes(trace)
    if not sizes:
        return trace

    def narrowed(op: Op) -> Op:
        if op.name != ATTEND or op.module not in sizes:
            return op
        tokens, heads, _ = op.inputs[0].spec.shape
        size = sizes[op.module]
        specs = ((tokens, heads, size), (tokens, 1, size), (tokens, 1, 0))
        return replace(op, inputs=tuple(Ref(ref.storage, ref.spec._replace(shape=shape)) for ref, shape in zip(op.inputs, specs, strict=True)))

    programs = {name: Program(name, tuple(map(narrowed, program.ops))) for name, program in trace.programs.items()}
    return replace(trace, programs=programs, meta={**trace.meta, "latent": True})


def _latent_sizes(trace: Trace) -> dict[str, int]:
    """Module that attends → what its `kv_a_proj_with_mqa` makes of a token."""
    found = {}
    for op in trace.ops():
        owner, _, name = op.module.rpartition(".")
        if name == "kv_a_proj_with_mqa" and op.name.split(".")[1] in ("mm", "addmm"):
            found[owner] = op.outputs[0].spec.shape[-1]
    return found


def served_step(
    trace: Trace, shape: StepShape, cached: int, *, token_bytes: int | None = None, kv_dtype: str = "", way: str = "none"
) -> Trace:  # fmt: skip
    """A step of this shape, beside pages for so many tokens. `way`: how it is compiled, before attention is what this step needs of it:
    pieces of prompts and rows that generate share one result, of which a compiler would keep the last."""
    found = compiled(resized(trace, shape.tokens, max(1, shape.samples)), way)
    pool = max(found.storages) + 1
    each = kv_bytes(trace) if token_bytes is None else token_bytes
    storages = {**found.storages, pool: Storage(cached * each, BUFFER, "")}
    programs = {
        name: Program(name, tuple(one for op in program.ops for one in (_attention(op, shape, pool, kv_dtype) if op.name == ATTEND else (op,))))
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


def generating(layer: Layer, many: int, tokens: int, kv_dtype: str = "") -> Specs:
    """One token of each of many sequences, against as many tokens each."""
    _, heads, size = layer.query.shape
    dtype, seen = layer.query.dtype, layer.seen(tokens)
    kept = [TensorSpec((many, one.shape[1], seen, one.shape[2]), kv_dtype or one.dtype) for one in (layer.key, layer.value)]
    return Specs(PAGED, TensorSpec((many, heads, size), dtype), kept[0], kept[1], TensorSpec((many, heads, layer.wide), dtype), ())


def prompting(layer: Layer, start: int, count: int) -> Specs:
    """A piece of a prompt, against itself and what is before it."""
    _, heads, size = layer.query.shape
    dtype, seen = layer.query.dtype, min(start + count, layer.window + count) if layer.window else start + count
    kept = [TensorSpec((1, one.shape[1], seen, one.shape[2] or size), one.dtype) for one in (layer.key, layer.value)]
    return Specs(FLASH, TensorSpec((1, heads, count, size), dtype), kept[0], kept[1], TensorSpec((1, heads, count, layer.wide), dtype), (0.0, True))


def _window(op: Op) -> int:
    return next((int(one) for one in op.attrs if type(one) is int), 0)


def layer_of(op: Op) -> Layer:
    query, key, value = (ref.spec for ref in op.inputs)
    return Layer(query, key, value, op.outputs[0].spec.shape[2], _window(op))


def layers_of_attention(trace: Trace) -> list[Layer]:
    """Queries, keys and values of each layer, as traced."""
    return [layer_of(op) for op in trace.ops() if op.name == ATTEND]


def _attention(op: Op, shape: StepShape, pool: int, kv_dtype: str) -> Iterator[Op]:
    layer = layer_of(op)
    asks, result = op.inputs[0].storage, op.outputs[0].storage
    heads, sizes = layer.query.shape[1], layer.query.shape[2] + layer.wide

    def made(specs: Specs, pairs: int) -> Op:
        """`pairs`: of queries and keys that meet, of one head."""
        given = (Ref(asks, specs.query), Ref(pool, specs.key), Ref(pool, specs.value))
        return Op(specs.name, given, (Ref(result, specs.result),), op.module, op.phase, 2 * pairs * heads * sizes, attrs=specs.attrs)

    parts = [Op(WRITE, op.inputs[1:], (Ref(pool, layer.key), Ref(pool, layer.value)), op.module, op.phase, 0)]
    if shape.generating:
        tokens = -(-shape.attended // shape.generating)
        parts.append(made(generating(layer, shape.generating, tokens, kv_dtype), shape.generating * layer.seen(tokens)))
    for start, count in shape.chunks:
        whole = count * start + count * (count + 1) // 2
        parts.append(made(prompting(layer, start, count), min(whole, count * layer.window) if layer.window else whole))
    parts[0] = replace(parts[0], allocates=op.allocates)
    parts[-1] = replace(parts[-1], frees=op.frees)
    yield from parts
