"""A plan and what a trace is made from: source and recipe; and whether a model is the one a plan was made for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from foretell.errors import UserError
from foretell.plan import blocks as stack
from foretell.plan import paths
from foretell.plan.precision import in_recipe
from foretell.plan.types import OWN_KERNEL, Plan, computed
from foretell.trace.load.model import Source
from foretell.trace.recipe import Recipe

Shapes = Mapping[str, tuple[Sequence[int], str]]
"""Parameter → its shape and the name of its dtype, such as float32."""

RECOMPUTES = {"keep": "none", "recompute": "full", "selective": "selective"}
_USUAL_DTYPE = "float32"
_SHOWN = 6


# --- source and recipe -----------------------------------------------------------------------------------------------


def source_of(plan: Plan) -> Source:
    """Where the plan's model comes from, with one micro-batch."""
    named = {name: plan.model[name] for name in ("seq", "image", "loss") if plan.model.get(name) is not None}
    overrides = dict(plan.model.get("overrides", {}))
    return Source(model=str(plan.model["model"]), overrides=overrides, micro_batch=plan.micro_batch, **named)


def recipe_of(plan: Plan, mode: str | None = None) -> Recipe:
    """How one rank's step is traced.

    A recipe treats all blocks alike. `mode` says which residency to trace; without it, it is the one the plan's blocks
    share, and blocks of different residency are an error.
    """
    mode = _shared_mode(plan) if mode is None else mode
    return Recipe(
        optimizer=plan.optimizer, precision=in_recipe(plan.precision, plan.together.spread > 1),
        recompute=RECOMPUTES[computed(mode)], accumulate=plan.accumulate, clip=plan.clip, compile=plan.compile,
        shards=plan.mesh.dp_shard, adapters=plan.adapters, base=tuple(plan.base.items()),
        loss_chunks=plan.loss_chunks, state_format=plan.state_format if plan.coded else "fp32",
        kernels=own_kernels(plan),
    )  # fmt: skip


def own_kernels(plan: Plan) -> tuple[str, ...]:
    """Ops that foretell's own kernels do."""
    return tuple(sorted(op for op, kernel in plan.kernels.items() if kernel == OWN_KERNEL))


def known_blocks(plan: Plan) -> tuple[str, ...] | None:
    """The model's blocks as the plan names them, in order; None where it does not."""
    patterns = plan.model.get("blocks")
    return None if patterns is None else tuple(name for pattern in patterns for name in paths.unfold(pattern))


def _shared_mode(plan: Plan) -> str:
    known = known_blocks(plan)
    if known:
        modes = {computed(residency.mode) for residency in stack.expand(plan.blocks, known).values()}
    else:  # patterns are taken to name every block
        modes = {computed(residency.mode) for residency in plan.blocks.values()} or {"keep"}
    if len(modes) > 1:
        raise UserError(
            f"blocks of the plan are treated differently ({', '.join(sorted(modes))}) and one recipe has one way",
            "ask for one of them",
        )
    return modes.pop()


def model_of(source: Source, *, blocks: Sequence[str] | None = None, shapes: Shapes | None = None) -> dict[str, Any]:
    """What a plan says of its model; what is not known or not asked for is left out."""
    found: dict[str, Any] = {"model": source.model}
    if source.overrides:
        found["overrides"] = dict(source.overrides)
    found.update(
        {name: getattr(source, name) for name in ("seq", "image", "loss") if getattr(source, name) is not None}
    )
    if shapes is not None:
        found["parameters"] = sum(prod(shape) for shape, _ in shapes.values())
        found["digest"] = digest(shapes)
    if blocks is not None:
        found["blocks"] = _in_order(blocks)
    if shapes is not None:
        found["shapes"] = paths.fold({name: _shape_text(*shape) for name, shape in shapes.items()})
    return found


def _in_order(blocks: Sequence[str]) -> list[str]:
    """Blocks folded where that keeps the order they run in, else one by one."""
    folded = paths.fold_names(blocks)
    if [name for pattern in folded for name in paths.unfold(pattern)] == list(blocks):
        return list(folded)
    return [pattern for block in blocks for pattern in paths.fold_names([block])]


# --- which model -----------------------------------------------------------------------------------------------------


def digest(shapes: Shapes) -> str:
    """Sixteen hexadecimal digits that change with any parameter's name, shape or dtype."""
    lines = sorted(f"{name} {_shape_text(*shape)}" for name, shape in shapes.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def differences(plan: Plan, shapes: Shapes) -> tuple[str, ...]:
    """Where a model is not the one the plan was made for, in words; empty where it is, or where the plan does not say."""
    stored = plan.model.get("shapes")
    if stored is None:
        wanted = plan.model.get("digest")
        if wanted is None or wanted == digest(shapes):
            return ()
        return (f"the digest of all shapes is {wanted} in the plan and {digest(shapes)} in the model",)
    wanted = {name: text for pattern, text in stored.items() for name in paths.unfold(pattern)}
    found = {name: _shape_text(*shape) for name, shape in shapes.items()}
    unlike = {
        name: (wanted.get(name), found.get(name))
        for name in dict.fromkeys((*wanted, *found))
        if wanted.get(name) != found.get(name)
    }
    return tuple(_told(pattern, *both) for pattern, both in paths.fold(unlike).items())


def refuse_other_model(plan: Plan, shapes: Shapes) -> None:
    """Raise if a model is not the one the plan was made for, saying which shapes differ."""
    unlike = differences(plan, shapes)
    if unlike:
        more = f"; and {len(unlike) - _SHOWN} more" if len(unlike) > _SHOWN else ""
        raise UserError(
            f"the plan is for another model: {'; '.join(unlike[:_SHOWN])}{more}",
            "give the model and the settings the plan was made for, or make a plan for this one",
            "\n".join(unlike) if more else "",
        )


def _told(pattern: str, wanted: str | None, found: str | None) -> str:
    if found is None:
        return f"{pattern} ({wanted}) is not in the model"
    if wanted is None:
        return f"{pattern} ({found}) is not in the plan"
    return f"{pattern} is {wanted} in the plan and {found} in the model"


def _shape_text(shape: Sequence[int], dtype: str) -> str:
    """`3072x768`; the dtype is told where it is not the usual one."""
    size = "x".join(str(int(size)) for size in shape) or "scalar"
    name = str(dtype).removeprefix("torch.")
    return size if name == _USUAL_DTYPE else f"{size} {name}"
