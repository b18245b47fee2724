"""From the compute of one device to one rank of fully sharded data parallel (PyTorch's FSDP2).

The trace of a step with recipe.precision "fsdp-bf16" has whole bf16 parameters that stay, and whole bf16
gradients ("fsdp-fp16": fp16 ones, and the ops of a gradient scaler). Here its ops are woven together with what
`fully_shard` on every block and on the root does:

    forward    │ gather root │ gather 0 │ block 0 │ free 0 │ gather 1 │ block 1 │ free 1 │ head │ loss │
    backward   │ loss │ prefetch 1 │ head │ copy out 1, prefetch 0 │ block 1 │ free 1, reduce 1 │ copy out 0 │ …
    update     │ on fp32 shards of parameters and gradients

Only fp32 shards stay: `ceil(rows / ranks)` rows of each parameter, on rank 0, which has the largest ones.
Gathering takes two buffers (the bf16 shard, the result of the collective) and the whole parameters, and the
result is held until the next unit has its own. Reducing takes the unit's whole gradients once more, flat and
padded; that buffer is held until the next unit needs one. Order and lifetimes follow
`torch.distributed.fsdp._fully_shard` of torch 2.11 to 2.13 with its default settings and
`MixedPrecisionPolicy(param_dtype=torch.bfloat16)`: gradients are reduced in bf16 and kept in fp32.

With `replicate`, groups of `ranks` hold the same shards (HSDP): what was scattered is summed over the groups too.
With one rank in a group (plain replicas) nothing is gathered: FSDP2 then copies its parameters, cast, where a gather
would have put them.

Not modelled: units that share a parameter (FSDP2 refuses them), a block called twice in a row without an op in
between (seen as one call), buffers of the communication library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from foretell.lower.fsdp.units import (
    ADD,
    ALONE,
    BEGIN,
    COLLECTIVES,
    DP_REPLICATE,
    DP_SHARD,
    END,
    FIRST,
    LAST,
    MODEL_END,
    MORE,
    FsdpSharding,
    FsdpUnit,
    Storages,
    units_of,
)
from foretell.lower.fsdp.weave import Weaver, block_of
from foretell.trace.types import Op, Program, Ref, TensorSpec, Trace

__all__ = ["COLLECTIVES", "DP_REPLICATE", "DP_SHARD", "MODEL_END", "block_of", "format_of", "on_shards", "reshard_of", "shard", "wide_of"]

_WIDE = {"fsdp-bf16": {"bfloat16": "float32"}, "fsdp-fp16": {"float16": "float32"}}
"""With fp32 shards and compute in 16 bits: dtype in the trace → dtype of the shard that is kept and trained."""


def shard(
    trace: Trace, ranks: int, *, replicate: int = 1, reshard: bool | int = True, reduce: str | None = None,
    units: Sequence[str] | None = None, left: Sequence[str] = (), beside: Sequence[str] | None = None,
    apart: Mapping[str, bool | int] | None = None,
) -> Trace:  # fmt: skip
    """The step of one rank (the one with the largest shards) out of `ranks`, from the trace of its compute.

    `replicate` such groups hold the same; `reshard` is FSDP2's reshard_after_forward of the blocks; `reduce` the dtype
    in which gradients are summed, their own if None. `units` are the modules that are gathered each by itself, the blocks
    if not said, and then nothing else is sharded; modules in `left` are left as they are. `beside` are the units beside the root
    where these are not the blocks, and `apart` says which of them (the root: "") reshard in another way.
    """
    if ranks * replicate < 2 and units is None and beside is None:
        raise ValueError(f"sharding needs at least 2 ranks, got {ranks}")
    way = FsdpSharding(
        ranks=ranks, replicate=replicate, reshard=reshard_of(reshard, ranks), wide=wide_of(trace), reduce=reduce,
        state_format=format_of(trace), inside=units is not None, apart={path: reshard_of(one, ranks) for path, one in (apart or {}).items()},
    )  # fmt: skip
    storages = Storages(trace.storages)
    pieces = units_of(trace, way, storages, units, left, beside)
    programs: dict[str, Program] = {}
    schedule, roles = _summing_last(trace.schedule) if replicate > 1 else (trace.schedule, {"micro_next": ADD})
    for name, program in [*trace.programs.items(), *((name, trace.programs[FIRST]) for name in roles if name == LAST)]:
        if name in (FIRST, LAST, "micro_next", "forward"):
            source = program if name == "forward" else trace.programs[FIRST]
            ops = Weaver(pieces, way, trace.storages, role=roles.get(name, ALONE), within=units is not None).weave(source.ops)
        else:
            ops = on_shards(program.ops, pieces, way, storages)
        programs[name] = Program(name, ops)
    shards = {whole: kept for unit in pieces.values() for whole, kept in unit.shards.items()}
    return Trace(
        programs=programs,
        schedule=schedule,
        storages=storages.all,
        resident=tuple(shards.get(number, number) for number in trace.resident),
        meta=_meta(trace, pieces, way),
    )


def _summing_last(
    schedule: Mapping[str, tuple[tuple[str, int], ...]],
) -> tuple[dict[str, tuple[tuple[str, int], ...]], dict[str, str]]:
    """Runs whose last micro-batch alone sums over replicas, and what each micro-batch does with its gradients."""
    done: dict[str, tuple[tuple[str, int], ...]] = {}
    roles: dict[str, str] = {}
    for run, parts in schedule.items():
        more = dict(parts).get("micro_next", 0)
        if not more:
            done[run] = parts
            continue
        roles = {FIRST: BEGIN, "micro_next": MORE, LAST: END}
        changed = [[("micro_next", more - 1), (LAST, 1)] if name == "micro_next" else [(name, count)] for name, count in parts]
        done[run] = tuple((name, count) for piece in changed for name, count in piece if count)
    return done, roles


def reshard_of(reshard: bool | int, ranks: int) -> bool | int:
    """As FSDP2 reads it: 1 means that nothing is given back, all ranks that everything is."""
    if isinstance(reshard, bool):
        return reshard
    if reshard < 1 or ranks % reshard:
        raise ValueError(f"parameters on {ranks} ranks cannot be spread over {reshard} after forward")
    return False if reshard == 1 else True if reshard == ranks else reshard


def wide_of(trace: Trace) -> Mapping[str, str]:
    """Only FSDP2's mixed precision keeps another dtype than it computes with."""
    recipe = trace.meta.get("recipe", {})
    assert isinstance(recipe, Mapping)
    return _WIDE.get(str(recipe.get("precision", "fsdp-bf16")), {})


def format_of(trace: Trace) -> str:
    """What optimizer states are held in."""
    recipe = trace.meta.get("recipe", {})
    assert isinstance(recipe, Mapping)
    return str(recipe.get("state_format", "fp32"))


def _meta(trace: Trace, units: Mapping[str, FsdpUnit], way: FsdpSharding) -> dict[str, object]:
    return {
        **trace.meta, "ranks": way.ranks * way.replicate, "shards": way.ranks,
        "units": [path for path, unit in units.items() if unit.parameters],
    }  # fmt: skip


# ---------------------------------------------------------------------- the update


def on_shards(ops: Sequence[Op], units: Mapping[str, FsdpUnit], way: FsdpSharding, storages: Storages) -> tuple[Op, ...]:
    """The same ops on fp32 shards: an optimizer works element by element, on the shapes of its parameters."""
    shapes = {shape for unit in units.values() for piece in unit.parameters for shape in way.rows_of(piece.spec.shape)}
    place = {whole: kept for unit in units.values() for whole, kept in unit.shards.items()}
    place |= {number: unit.gradient for unit in units.values() for number in unit.gradients}

    smaller: dict[TensorSpec, TensorSpec] = {}

    def kept(ref: Ref) -> Ref:
        number, spec = ref
        part = smaller.get(spec)
        if part is None:
            shape, dtype = spec
            part = smaller[spec] = TensorSpec(way.part(shape) if shape and shape in shapes else shape, way.kept(dtype))
        return Ref(place.get(number, number), part)

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
