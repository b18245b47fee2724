"""Plans for a training script: its step is followed once for every micro-batch, residency and precision that a plan may have.

    python train.py ── followed as it is ──► micro-batch, accumulation, precision, optimizer, clipping: what plans must keep
                    ── followed with a change ──► traces of other micro-batches, of blocks computed again, of 16-bit parameters
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from foretell.errors import ModelError, UserError
from foretell.hardware.types import Cluster
from foretell.plan.precision import in_plan
from foretell.plan.types import AXES
from foretell.search.solve.choose import Choice, choose
from foretell.search.space.constraints import SearchConstraints
from foretell.trace.load.model import Source
from foretell.trace.recipe import Recipe
from foretell.trace.sandbox import user_code
from foretell.trace.sandbox.child import WORKERS
from foretell.trace.sandbox.process import TIME_LIMIT, Progress
from foretell.trace.script.child import request
from foretell.trace.script.kept import followed
from foretell.trace.script.second import first_of
from foretell.trace.script.words import ScriptCommand, model_of, of_model, parse
from foretell.trace.store.file import dumps
from foretell.trace.types import GRADIENT
from foretell.units import human_bytes

_AS_IT_IS = "fit says what it needs as it is"
_SHARED = ("tp", "cp", "ep", "pp")
"""Axes that would change the model's own code."""


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
        raise UserError(f"a plan is made for a script of one process, and {script.name} forms a group of {reply['world']}", _AS_IT_IS)
    if "round" in trace.programs:
        raise ModelError(f"{script.name} has optimizers that take turns: plans are made for one", _AS_IT_IS)
    return ScriptFacts(
        script=script, recipe=Recipe.from_json(trace.meta["recipe"]), micro_batch=int(reply["micro_batch"]),  # type: ignore[arg-type]
        resizes=bool(reply["loads"]), modules=tuple(reply["named"]["outer"]), blocks=tuple(trace.meta["blocks"]),  # type: ignore[arg-type]
        held=bool(reply["held"]), own_steps=bool(reply["places"].get("step", ["", 0, False])[2]),
        gradient_bytes=sum(one.nbytes for one in trace.storages.values() if one.role == GRADIENT),
        named=reply["named"], places=reply["places"], notes=tuple(reply["notes"]),
    )  # fmt: skip


def wishes_of(facts: ScriptFacts, wishes: SearchConstraints, cluster: Cluster) -> SearchConstraints:
    """What is wished for with what the script says itself; raises what no change to it could give."""
    name, devices = facts.script.name, cluster.count
    if devices > 1 and len(facts.modules) > 1:
        raise ModelError(f"{name} has several modules ({', '.join(facts.modules)}): plans of several devices are made for one", "--on one device")
    own = in_plan(facts.recipe.precision)
    if own is None:
        raise ModelError(f"{name} computes in {facts.recipe.precision}, which no plan has", _AS_IT_IS)
    if wishes.precision not in (None, own) and (own, wishes.precision) != ("fp32", "bf16-mixed"):
        raise UserError(f"--precision {wishes.precision}: {name} computes in {own}", f"--precision {own}, or change the script")
    for axis in _SHARED:
        if wishes.fixed.get(axis, 1) > 1:
            raise UserError(f"--{axis} {wishes.fixed[axis]}: ranks of a script share batches and parameters only", f"leave --{axis} out")
    batch = wishes.global_batch or facts.micro_batch * facts.recipe.accumulate
    if wishes.micro_batch not in (None, facts.micro_batch) and not facts.resizes:
        raise UserError(
            f"--micro-batch {wishes.micro_batch}: {name} makes batches of {facts.micro_batch} without a DataLoader", "change it in the script"
        )
    micro = wishes.micro_batch if facts.resizes else facts.micro_batch
    if batch % (micro or 1):
        near = max(1, batch // (micro or 1)) * (micro or 1)
        raise UserError(f"{batch} samples a step are no multiple of {micro}, which {name} makes at once", f"--global-batch {near}")
    kept = facts.gradient_bytes / cluster.device.memory_bytes if facts.held and not facts.own_steps else 0.0
    if wishes.margin + kept >= 1:
        raise ModelError(f"gradients of {name} stay for the next forward, and take more than {cluster.device.name} has", _AS_IT_IS)
    return replace(
        wishes, margin=wishes.margin + kept, precision=wishes.precision or own, optimizer=facts.recipe.optimizer,
        clip=facts.recipe.clip, global_batch=batch, micro_batch=micro,
        compile=("none",), fixed={axis: degree for axis, degree in {**wishes.fixed, **dict.fromkeys(_SHARED, 1)}.items() if axis in AXES},
    )  # fmt: skip


def choose_for(
    words: Sequence[str], cluster: Cluster, hardware: str, wishes: SearchConstraints, *, cache: bool = True, time_limit: float = TIME_LIMIT,
    progress: Progress = lambda _: None, **how: Any,
) -> Choice:  # fmt: skip
    """The best plan for a script, of those that a change to its file can give."""
    script = parse(words)
    user_code.before([str(Path(script.file).resolve()) if script.file else f"module {script.module}"])
    if cluster.device.backend == "cpu":
        raise UserError(f"{cluster.device.name} is a CPU, and scripts are followed for GPUs", "name one, such as --on H100:8")
    capability = cluster.device.compute_capability or (9, 0)
    facts = facts_of(words, capability, cache=cache, time_limit=time_limit, progress=progress)
    asked = wishes_of(facts, wishes, cluster)
    found = choose(facts.source, cluster, hardware, asked, cache=cache, time_limit=time_limit, progress=progress, moves=False, **how)
    ours = {f"--{axis}" for axis in _SHARED} | {f"--{name.replace('_', '-')}" for name in ("micro_batch", "margin") if not getattr(wishes, name)}
    found = replace(found, relaxations=tuple(one for one in found.relaxations if ours.isdisjoint(one.drops)))  # limits that nobody gave
    held = f"a library zeroes gradients after the forward: {human_bytes(facts.gradient_bytes)} of each device are left free for them"
    more = (held,) if facts.held and not facts.own_steps else ()
    if more and found.best is not None:
        best = replace(found.best, plan=found.best.plan.with_(notes=(*found.best.plan.notes, *more)))
        found = replace(found, best=best)
    return replace(found, notes=(*facts.notes, *more, *found.notes))


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
        raise ModelError(f"{script.name} gives {reply['micro_batch']} samples where its loader was asked for {micro_batch}", _AS_IT_IS)

