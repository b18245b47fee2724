"""A small twin of a plan: the same classes and the same axes, few blocks, narrow layers, at most sixteen ranks.

What can be wrong about applying a plan (which piece of which tensor goes where, what is summed, what is scaled by
what) is as wrong on a small model as on a large one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

import foretell.zoo as zoo
from foretell.errors import ForetellError, UserError
from foretell.plan import blocks as stack
from foretell.plan.recipe import known_blocks, source_of
from foretell.plan.types import LOOPED, Mesh, Plan
from foretell.trace.fold.blocks import find_blocks
from foretell.trace.load.model import Source, load

LARGEST_WORLD = 16
LARGEST_MODEL = 8_000_000
"""Parameters of a twin: sixteen ranks hold it, with its optimizer, on one machine."""
TOKENS = 32
STAGES_A_RANK = 2
"""Of schedules in which a rank holds several."""

_SMALL = {
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "dim": 64, "intermediate_size": 128, "n_inner": 128, "d_ff": 128,
    "ffn_dim": 128, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "head_dim": 16, "d_kv": 16, "vocab_size": 256,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
}  # fmt: skip
"""Settings of transformers configs → what a twin has."""
_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_encoder_layers",
    "num_decoder_layers",
)  # fmt: skip
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
_SCALED_BY_HAND = (
    "write a function `twin` in the model's file that returns a small model of the same classes (and its batch)"
)


@dataclass(frozen=True)
class Twin:
    source: Source
    plan: Plan
    notes: tuple[str, ...]
    """What was scaled."""
    parameters: int


def twin(plan: Plan) -> Twin:
    """The small plan and its model; a model that cannot be made small enough is a `UserError`."""
    mesh, notes = _mesh(plan)
    stages = _stages(plan, mesh)
    failures: list[str] = []
    for source, scaled in _sources(source_of(plan), max(stages, 2)):
        try:
            parameters, blocks = _measure(source)
        except ForetellError as error:
            failures.append(str(error))
            continue
        if parameters <= LARGEST_MODEL and len(blocks) >= (stages if mesh.pp > 1 else 0):
            small, more = _plan(plan, mesh, stages, blocks)
            sized = replace(source, micro_batch=small.micro_batch)
            return Twin(sized, small, (*scaled, *notes, *more), parameters)
        failures.append(f"{parameters:,} parameters and {len(blocks)} blocks")
    raise UserError(
        f"no small twin of {plan.model['model']} can be made: {failures[-1]}; "
        f"it needs {stages if mesh.pp > 1 else 0} blocks or more and at most {LARGEST_MODEL:,} parameters",
        _SCALED_BY_HAND,
    )


def _mesh(plan: Plan) -> tuple[Mesh, list[str]]:
    sizes = {axis: min(2, getattr(plan.mesh, axis)) for axis in ("pp", "dp_replicate", "dp_shard", "tp", "cp", "ep")}
    world = prod(size for axis, size in sizes.items() if axis != "ep")
    apart = plan.mesh.ep > 1 and plan.mesh.dp_shard > plan.mesh.ep
    if (_wants_smaller_world(plan) or apart) and world * 2 <= LARGEST_WORLD:
        sizes["dp_shard"] = 4
    notes = [
        f"{axis} {getattr(plan.mesh, axis)} → {size}"
        for axis, size in sizes.items()
        if size != getattr(plan.mesh, axis)
    ]
    return replace(plan.mesh, **sizes), notes


def _wants_smaller_world(plan: Plan) -> bool:
    """Whether parameters are resharded to fewer ranks after forward, which takes four to show."""
    return not isinstance(plan.reshard, bool) and plan.mesh.dp_shard >= 4


def _stages(plan: Plan, mesh: Mesh) -> int:
    if mesh.pp == 1:
        return 1
    several = plan.pipeline is not None and plan.pipeline.schedule in LOOPED and plan.pipeline.stages > plan.mesh.pp
    return mesh.pp * (STAGES_A_RANK if several else 1)


def _plan(plan: Plan, mesh: Mesh, stages: int, blocks: list[str]) -> tuple[Plan, list[str]]:
    """The plan on the twin: stages cut evenly, residencies as at the same height of the stack."""
    micro_batch, notes = min(plan.micro_batch, 2), []
    accumulate = 2 * stages if mesh.pp > 1 else min(plan.accumulate, 2)
    if accumulate != plan.accumulate or micro_batch != plan.micro_batch:
        notes.append(f"micro-batches {plan.accumulate} × {plan.micro_batch} → {accumulate} × {micro_batch}")
    pipeline = plan.pipeline
    if mesh.pp > 1 and pipeline is not None:
        if pipeline.stages != stages:
            notes.append(f"stages {pipeline.stages} → {stages}")
        pipeline = replace(pipeline, cuts=stack.even_cuts(blocks, stages))
    reshard = plan.reshard
    if not isinstance(reshard, bool):
        reshard = 2 if mesh.dp_shard == 4 else True
    model = {key: value for key, value in plan.model.items() if key not in ("shapes", "digest", "parameters", "blocks")}
    small = plan.with_(
        model=model, mesh=mesh, pipeline=pipeline if mesh.pp > 1 else None, micro_batch=micro_batch,
        accumulate=accumulate, reshard=reshard, blocks=_residencies(plan, blocks), predicted={},
    )  # fmt: skip
    return small, notes


def _residencies(plan: Plan, blocks: list[str]) -> dict[str, Any]:
    known = known_blocks(plan)
    if not plan.blocks or not blocks:
        return {}
    if not known:
        return dict(stack.compress(stack.expand(plan.blocks, blocks)))
    whole = list(stack.expand(plan.blocks, known).values())
    return {block: whole[place * len(whole) // len(blocks)] for place, block in enumerate(blocks)}


def _measure(source: Source) -> tuple[int, list[str]]:
    """Parameters and blocks, without memory for either."""
    with torch.device("meta"):
        model = load(source).model
    return sum(p.numel() for p in model.parameters()), find_blocks(model)


# --- smaller sources -------------------------------------------------------------------------------------------------


def _sources(source: Source, layers: int) -> Iterator[tuple[Source, tuple[str, ...]]]:
    """Ever larger stand-ins for a source, each with what was scaled; the last is the source itself."""
    kind, _, name = source.model.partition(":")
    if source.model in zoo.names():
        yield _zoo(source, layers)
    elif kind == "hf":
        yield from _transformers(source, name, layers)
    elif ".py:" in source.model:
        yield from _file(source)
    yield source, ()


def _zoo(source: Source, layers: int) -> tuple[Source, tuple[str, ...]]:
    """The family's small entry, with those settings of this one that are no sizes."""
    entry = zoo.get(source.model)
    small = next((e for e in zoo.ENTRIES.values() if e.module == entry.module and e.small), entry)
    config = {**entry.config, **source.overrides}
    sizes = {key: value for key, value in small.config.items() if not isinstance(value, bool | str)}
    for key in ("layers", "depth"):
        if key in sizes:
            sizes[key] = layers
    kept = {key: value for key, value in source.overrides.items() if key not in sizes}
    overrides = {**kept, **sizes}
    shorter = replace(source, overrides=overrides, seq=_shorter(source.seq or entry.seq), image=small.image)
    told = [_told(key, config.get(key), value) for key, value in sizes.items() if config.get(key) != value]
    return shorter, (*told, *_told_sizes(source.seq or entry.seq, source.image or entry.image, shorter))


def _transformers(source: Source, name: str, layers: int) -> Iterator[tuple[Source, tuple[str, ...]]]:
    from foretell.trace.hub import build as hub

    config = hub.config_of(source, name)
    found: dict[str, int] = {}
    for prefix, part in [
        ("", config),
        *((f"{key}.", getattr(config, key)) for key in getattr(config, "sub_configs", {})),
    ]:
        values = _integers(part)
        found.update({f"{prefix}{key}": small for key, small in _SMALL.items() if values.get(key, 0) > small})
        found.update({f"{prefix}{key}": layers for key in _LAYERS if values.get(key, 0) > layers})
        heads = next((values[key] for key in _SMALL if key.endswith(("heads", "n_head")) and key in values), 0)
        for key in _KEY_HEADS:
            if values.get(key, 0) > 1:
                found[f"{prefix}{key}"] = 4 if values[key] == heads else 2
    choices = [
        found,
        {k: v for k, v in found.items() if "vocab" not in k},
        {k: v for k, v in found.items() if k.endswith(_LAYERS)},
    ]
    for overrides in choices:
        told = tuple(_told(key, _value(config, key), value) for key, value in overrides.items())
        shorter = replace(source, overrides={**source.overrides, **overrides}, seq=_shorter(source.seq or TOKENS))
        yield shorter, (*told, f"tokens → {shorter.seq}")


def _integers(config: Any) -> dict[str, int]:
    """Sizes of a config under their own names, not under those that stand for them."""
    return {key: value for key, value in config.to_dict().items() if type(value) is int}


def _file(source: Source) -> Iterator[tuple[Source, tuple[str, ...]]]:
    """The `twin` of a user's file, where it has one."""
    path, _, name = source.model.rpartition(":")
    tree = ast.parse(Path(path).read_bytes(), path)
    if name != "twin" and any(isinstance(node, ast.FunctionDef) and node.name == "twin" for node in tree.body):
        yield replace(source, model=f"{path}:twin", overrides={}), (f"{name} → twin of the same file",)


def _shorter(seq: int | None) -> int | None:
    return None if seq is None else min(seq, TOKENS)


def _told_sizes(seq: int | None, image: int | None, shorter: Source) -> tuple[str, ...]:
    pairs: Mapping[str, tuple[int | None, int | None]] = {
        "tokens": (seq, shorter.seq),
        "pixels": (image, shorter.image),
    }
    return tuple(_told(name, was, now) for name, (was, now) in pairs.items() if was != now)


def _told(name: str, was: object, now: object) -> str:
    return f"{name} → {now}" if was is None else f"{name} {was} → {now}"


def _value(config: Any, path: str) -> object:
    for part in path.split("."):
        config = getattr(config, part, None)
    return config
