"""The default plan: what `fit` predicts, and `run` would run, where nobody made a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretell.plan import blocks as stack
from foretell.plan.precision import in_plan, in_recipe
from foretell.plan.recipe import RECOMPUTES
from foretell.plan.types import OWN_KERNEL, Mesh, Plan, Residency
from foretell.trace.recipe import Recipe


def default_plan(
    recipe: Recipe, model: Mapping[str, Any], hardware: str, *, micro_batch: int = 1, blocks: Sequence[str] = (), **more: Any
) -> Plan:
    """The plan that a recipe stands for: fully_shard over as many ranks as it has. Parameters that are frozen by name, and
    whether anything is trained, are not in it."""
    mode = mode_of(recipe)
    given = {
        "mesh": Mesh(dp_replicate=recipe.replicas, dp_shard=recipe.shards), "sync": recipe.sync,
        "micro_batch": micro_batch, "accumulate": recipe.accumulate,
        "precision": in_plan(recipe.precision) or recipe.precision, "optimizer": recipe.optimizer, "clip": recipe.clip,
        "blocks": stack.compress(dict.fromkeys(blocks, Residency(mode=mode))), "compile": recipe.compile,
        "adapters": recipe.adapters, "base": dict(recipe.base), "loss_chunks": recipe.loss_chunks, "state_format": recipe.state_format,
        "kernels": dict.fromkeys(recipe.kernels, OWN_KERNEL),
    }  # fmt: skip
    return Plan(model=model, hardware=hardware, **{**given, **more})


def mode_of(recipe: Recipe) -> str:
    """What a plan calls a recipe's recompute."""
    if recipe.recompute == "host":
        return "recompute-host"
    return {recompute: mode for mode, recompute in RECOMPUTES.items()}[recipe.recompute]


def in_no_plan(recipe: Recipe) -> str:
    """What a recipe asks for that a plan cannot say; empty where a plan says all of it, and `run` would run that."""
    precision = in_plan(recipe.precision)
    asked = {
        "inference": recipe.mode != "train", "frozen parameters": bool(recipe.freeze),
        "channels-last layout": recipe.channels_last,
        recipe.precision: precision is None or in_recipe(precision, recipe.shards > 1) != recipe.precision,
    }  # fmt: skip
    return next((what for what, given in asked.items() if given), "")
