"""Plans for a training script: its step is followed once for every micro-batch, residency and precision that a plan may have.

    python train.py ── followed as it is ──► micro-batch, accumulation, precision, optimizer, clipping: what plans must keep
                    ── followed with a change ──► traces of other micro-batches, of blocks computed again, of 16-bit parameters
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from foretell.errors import ModelError, UserError
from foretell.trace.load.model import Source
from foretell.trace.recipe import Recipe
from foretell.trace.sandbox.child import WORKERS
from foretell.trace.sandbox.process import TIME_LIMIT, Progress
from foretell.trace.script.child import request
from foretell.trace.script.kept import followed
from foretell.trace.script.second import first_of
from foretell.trace.script.words import ScriptCommand, model_of, of_model, parse
from foretell.trace.store.file import dumps
from foretell.trace.types import GRADIENT

AS_IT_IS = "fit says what it needs as it is"


@dataclass(frozen=True, kw_only=True)
class ScriptFacts:
    """What a script does, as it is."""

    script: ScriptCommand
    recipe: Recipe
    micro_batch: int
    resizes: bool
    """Whether its loaders can be asked for other micro-batches."""
    modules: tuple[str, ...]
    """Names of its modules, where there are several."""
    blocks: tuple[str, ...]
    held: bool
    """Whether gradients are there when the next forward begins."""
    own_steps: bool
    """Whether the script's own lines step: a change to them may free gradients earlier."""
    gradient_bytes: int
    named: Mapping[str, Any]
    places: Mapping[str, Any]
    notes: tuple[str, ...]

    @property
    def source(self) -> Source:
        return Source(model=model_of(self.script.words))


def facts_of(
    words: Sequence[str], capability: tuple[int, int], *, hints: Mapping[str, float] | None = None, cache: bool = True,
    time_limit: float = TIME_LIMIT, progress: Progress = lambda _: None,
) -> ScriptFacts:  # fmt: skip
    """Follow a script as it is."""
    script = parse(words)
    if script.ranks != 1:
        raise UserError(
            f"a plan is made for a script of one process, and '{script.text}' starts {script.ranks or 'several'}",
            f"give the script that runs on one device: -- python {script.name}",
        )
    asked = request(script, capability, dict(hints or {}), False)
    trace, reply = followed(asked, cache=cache, time_limit=time_limit, progress=progress)
    if reply["world"] > 1:
        raise UserError(f"a plan is made for a script of one process, and {script.name} forms a group of {reply['world']}", AS_IT_IS)
    if "round" in trace.programs:
        raise ModelError(f"{script.name} has optimizers that take turns: plans are made for one", AS_IT_IS)
    return ScriptFacts(
        script=script, recipe=Recipe.from_json(trace.meta["recipe"]), micro_batch=int(reply["micro_batch"]),  # type: ignore[arg-type]
        resizes=bool(reply["loads"]), modules=tuple(reply["named"]["outer"]), blocks=tuple(trace.meta["blocks"]),  # type: ignore[arg-type]
        held=bool(reply["held"]), own_steps=bool(reply["places"].get("step", ["", 0, False])[2]),
        gradient_bytes=sum(one.nbytes for one in trace.storages.values() if one.role == GRADIENT),
        named=reply["named"], places=reply["places"], notes=tuple(reply["notes"]),
    )  # fmt: skip


def follow_all(
    requests: Sequence[Mapping[str, Any]], progress: Progress, *, cache: bool, time_limit: float
) -> list[tuple[str, dict[str, Any]]]:
    """Answers as `search.traces.child` gives them of a model: one micro-batch of the script, changed as each request asks."""

    def one(asked: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        source, recipe = asked["source"], Recipe.from_json(asked["recipe"])
        if asked.get("tp") or asked.get("cp") or asked.get("ep"):
            raise UserError("ranks of a script share batches and parameters only", "leave other axes out")
        script = of_model(source["model"])
        change = {"micro_batch": source["micro_batch"], "recompute": recipe.recompute, "precision": recipe.precision}
        progress(f"{script.text}, micro-batch {source['micro_batch']}" + (f", recompute {recipe.recompute}" if recipe.recompute != "none" else ""))
        trace, reply = followed(
            request(script, tuple(asked["capability"]), asked["hints"], False, 0, _needed(change)), cache=cache, time_limit=time_limit,
        )  # fmt: skip
        _refuse_other(script, reply, source["micro_batch"])
        told = {"files": reply["files"], "notes": reply["notes"], "shapes": reply["shapes"], "tied": reply["tied"]}
        return dumps(first_of(trace, recipe.to_json())), told

    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(one, requests))


def _needed(change: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in change.items() if value not in ("none", "")}


def _refuse_other(script: ScriptCommand, reply: Mapping[str, Any], micro_batch: int) -> None:
    """A script without a loader has one micro-batch only, whatever is asked for: its plans have that one (`wishes_of`)."""
    if reply["loads"] and reply["micro_batch"] != micro_batch:
        raise ModelError(f"{script.name} gives {reply['micro_batch']} samples where its loader was asked for {micro_batch}", AS_IT_IS)

