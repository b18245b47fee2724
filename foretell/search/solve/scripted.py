"""Plans for a training script: what it does decides what may be asked, and its step is traced by following it (`traces.scripted`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from foretell.errors import ModelError, UserError
from foretell.hardware.types import Cluster
from foretell.plan.precision import in_plan
from foretell.plan.types import AXES
from foretell.search.solve.choose import Choice, choose
from foretell.search.space.constraints import SearchConstraints
from foretell.search.traces.scripted import AS_IT_IS, ScriptFacts, facts_of
from foretell.trace.sandbox import user_code
from foretell.trace.sandbox.process import TIME_LIMIT, Progress
from foretell.trace.script.words import parse
from foretell.units import human_bytes

_SHARED = ("tp", "cp", "ep", "pp")
"""Axes that would change the model's own code."""


def wishes_of(facts: ScriptFacts, wishes: SearchConstraints, cluster: Cluster) -> SearchConstraints:
    """What is wished for with what the script says itself; raises what no change to it could give."""
    name, devices = facts.script.name, cluster.count
    if devices > 1 and len(facts.modules) > 1:
        raise ModelError(f"{name} has several modules ({', '.join(facts.modules)}): plans of several devices are made for one", "--on one device")
    own = in_plan(facts.recipe.precision)
    if own is None:
        raise ModelError(f"{name} computes in {facts.recipe.precision}, which no plan has", AS_IT_IS)
    if wishes.precision not in (None, own) and (own, wishes.precision) != ("fp32", "bf16-mixed"):
        raise UserError(f"--precision {wishes.precision}: {name} computes in {own}", f"--precision {own}, or change the script")
    for axis in _SHARED:
        if wishes.fixed.get(axis, 1) > 1:
            raise UserError(f"--{axis} {wishes.fixed[axis]}: ranks of a script share batches and parameters only", f"leave --{axis} out")
    if wishes.coded != "fp32":
        raise UserError(f"--state-format {wishes.state_format}: {name} makes its optimizer itself", "leave --state-format out")
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
        raise ModelError(f"gradients of {name} stay for the next forward, and take more than {cluster.device.name} has", AS_IT_IS)
    return replace(
        wishes, margin=wishes.margin + kept, precision=wishes.precision or own, optimizer=facts.recipe.optimizer,
        clip=facts.recipe.clip, global_batch=batch, micro_batch=micro,
        may_code=False, compile=("none",),
        fixed={axis: degree for axis, degree in {**wishes.fixed, **dict.fromkeys(_SHARED, 1)}.items() if axis in AXES},
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
