"""Plans with states, weights or activations elsewhere, as callers of `choose` know them."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from foretell.errors import UserError
from foretell.plan.precision import default, missing, moving_states
from foretell.plan.types import FP16, MASTER
from foretell.search.caps import host_of, unknown_host
from foretell.search.choice import Candidate, Choice, explained, kind_of, why_slower
from foretell.search.costing import Question
from foretell.search.reasons import of_candidates
from foretell.search.spill import meshes, spill
from foretell.search.spill_words import helps, lines


def or_moved(found: Choice, question: Question) -> Choice:
    """Where nothing fits on the devices: with states in host memory, if they may be moved and there is room."""
    wishes, cluster = question.wishes, question.cluster
    limited = wishes.deadline_seconds is not None or wishes.budget is not None
    stopped = found.found is not None and found.found.stopped
    ways = [mesh for mesh in meshes(cluster, wishes) if (wishes.global_batch or 0) % (mesh.data * (wishes.micro_batch or 1)) == 0]
    if not ways or limited or not wishes.optimizer.startswith("adam") or stopped or wishes.precision == FP16:
        return found
    if host_of(cluster, wishes) is None:
        if wishes.hbm is not None:
            raise unknown_host(cluster)
        return replace(found, notes=(*found.notes, "optimizer states may fit in host memory: say how much of it plans may use with --host"))
    moved = spilled(question)
    if moved.best is not None:
        return moved
    again = tuple(replace(one, why=f"more with states elsewhere {one.why}") for one in moved.reasons)
    return replace(found, where=moved.where, notes=(*found.notes, *moved.where), reasons=(*found.reasons, *again))


def spilled(question: Question) -> Choice:
    """The best plan with what does not fit on a device elsewhere."""
    if not meshes(question.cluster, question.wishes):
        raise UserError(
            f"--precision {MASTER} is planned for like devices that share parameters alone, and --on or a degree asks for more",
            "leave out --tp, --pp, --cp and --ep, or use bf16-mixed",
        )
    found, wishes, cluster = spill(question), question.wishes, question.cluster
    if wishes.precision is None and moving_states(cluster) != default(cluster):
        told = f"computed in {moving_states(cluster)}: {default(cluster)} is not run with optimizer states elsewhere"
        found = replace(found, notes=(*found.notes, told))
    if found.best is None:
        shapes = question.traces.facts.shapes.values()
        where = helps(found, sum(prod(shape) for shape, _ in shapes), bf16=not missing("bfloat16", cluster))
        dropped = tuple(Candidate(plan=one.plan, cost=one.cost, why=one.over) for one in found.tried)
        return Choice(best=None, dropped=tuple(map(explained, dropped)), infeasible=found.infeasible, costed=found.costed,
                      notes=found.notes, where=where, reasons=of_candidates(dropped))  # fmt: skip
    where = lines(found)
    tried = [Candidate(plan=one.plan.with_(predicted=one.cost.predicted()), cost=one.cost) for one in (found.best, *found.tried)]
    best = replace(tried[0], plan=tried[0].plan.with_(notes=where))
    losers: dict[Any, Candidate] = {}
    for one in tried[1:]:
        kind = (one.plan.micro_batch, kind_of(one.plan), bool(one.plan.states), bool(one.plan.weights))
        losers.setdefault(kind, replace(one, why=why_slower(best, one)))
    return Choice(best=best, runners_up=tuple(losers.values()), costed=found.costed, notes=found.notes, where=where)
