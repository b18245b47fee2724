"""What a script spreads over its ranks, as data in its trace: for `lower.spread`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from foretell.errors import ModelError
from foretell.trace import types
from foretell.trace.script.ranks import ScriptRanks
from foretell.trace.script.second import Second, plain
from foretell.trace.script.shards import spread_of


def spread_told(ranks: ScriptRanks, trace: types.Trace, model: nn.Module, second: Second) -> types.Trace:
    """The trace with how its script spreads it; as it is where there is one rank and nothing around the model.

    Of several ranks the first step is spread; when the next one lets go of its gradients is told beside it.
    """
    if (ranks.units or ranks.wrapped) and second.keeps():
        raise ModelError("zero_grad(set_to_none=False) keeps gradients between steps, which is not followed in scripts of several ranks yet",
                         "leave that argument out")  # fmt: skip
    if ranks.units and ranks.wrapped:
        raise ModelError(f"fully_shard ({ranks.units[0].line}) beside DistributedDataParallel is not followed yet", "one of the two")
    if ranks.units:
        told = spread_of(ranks, model)
    elif ranks.wrapped:
        told = _replicas(ranks, trace, model)
    elif ranks.world > 1:
        told = {"kind": "copies", "world": ranks.world, "replicate": ranks.world, "shards": 1, "how": {}}
    else:
        return trace
    told["held"] = second.held
    trace = plain(trace)
    recipe = {**trace.meta["recipe"], "shards": told["shards"]}  # type: ignore[dict-item]
    ranks.tell(_words(told, ranks))
    return replace(trace, meta={**trace.meta, "recipe": recipe, "spread": told})


def about(ranks: ScriptRanks) -> dict[str, Any]:
    """What whoever asked compares between ranks."""
    return {"rank": ranks.rank, "world": ranks.world, "stepped": ranks.stepped, "taken": ranks.taken}


def _replicas(ranks: ScriptRanks, trace: types.Trace, model: nn.Module) -> dict[str, Any]:
    paths = {id(module): path for path, module in model.named_modules()}
    inside = [one for one in ranks.wrapped if id(one) in paths]
    how = {
        "paths": [paths[id(one)] for one in inside] or [""], "view": all(one.view for one in inside) and "round" not in trace.programs,
        "cap": min((one.cap for one in inside if one.cap), default=0), "nbytes": sum(one.nbytes for one in ranks.wrapped),
        "unused": any(one.unused for one in inside), "buffers": any(one.sends_buffers for one in inside), "last_only": _last_only(ranks),
    }  # fmt: skip
    return {"kind": "ddp", "world": ranks.world, "replicate": ranks.world, "shards": 1, "how": how}


def _last_only(ranks: ScriptRanks) -> bool:
    """Whether the last micro-batch of a step alone sums gradients; else all do."""
    order = [ranks.summed[micro] for micro in sorted(ranks.summed)]
    if all(order):
        return False
    if order[-1] and not any(order[:-1]):
        return True
    said = ", ".join("sums" if one else "does not" for one in order)
    raise ModelError(f"of the micro-batches before the first step ({ranks.stepped}) the last must sum gradients alone, or all must; these: {said}",
                     "no_sync() around all of them but the last")  # fmt: skip


def _words(told: dict[str, Any], ranks: ScriptRanks) -> str:
    world, how = told["world"], told["how"]
    if told["kind"] == "ddp":
        view = "gradients are views of them" if how["view"] else "beside gradients"
        return f"DistributedDataParallel over {world} ranks, buckets {view}; numbers are of one rank"
    if told["kind"] == "fsdp":
        groups = f"{told['replicate']} groups of {told['shards']} ranks" if told["replicate"] > 1 else f"{world} ranks"
        return f"fully_shard over {groups}, {len(how['units'])} units and the root; numbers are of the rank with the largest shards"
    sent = "they send what the script sends" if ranks.sends else "they send nothing in a step"
    return f"nothing spreads the model: each of {world} ranks has all of it; {sent}"
