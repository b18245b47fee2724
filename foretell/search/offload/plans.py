"""Plans with states, weights or activations elsewhere, as callers of `choose` know them."""

from __future__ import annotations

from dataclasses import replace

from foretell.errors import UserError
from foretell.plan.precision import default, missing, moving_states
from foretell.plan.types import FP16, MASTER
from foretell.search.advice.relax import Relaxation
from foretell.search.offload.found import Spilled, Tried
from foretell.search.offload.search import Spill, meshes, spill
from foretell.search.offload.words import helps, lines
from foretell.search.solve import engine
from foretell.search.solve.choice import Choice, explained, kind_of, told, why_slower
from foretell.search.solve.question import Question
from foretell.search.solve.reasons import of_candidates
from foretell.search.space.caps import host_of, unknown_host
from foretell.units import GIB

ANY_HOST = 1 << 60
"""Bytes of host memory, where nobody knows how much there is."""


def or_moved(found: Choice, question: Question, patience: float = float("inf")) -> Choice:
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
        return replace(found, relaxations=(*found.relaxations, *_in_any_host(question)), tried=found.tried + 1)
    moved = spilled(question, patience)
    if moved.best is not None:
        return moved
    again = tuple(replace(one, why=f"more with states elsewhere {one.why}") for one in moved.reasons)
    relaxed = (*found.relaxations, *moved.relaxations)
    return replace(found, relaxations=relaxed, tried=found.tried + moved.tried, reasons=(*found.reasons, *again))


def thriftiest(question: Question) -> Tried | None:
    """The plan that needs least of a device, of those that move what can be moved; None where nothing may be."""
    found = [question.into(Spill, mesh=mesh).thriftiest() for mesh in meshes(question.cluster, question.wishes)]
    return min(found, key=lambda one: (not one.fits, one.short), default=None)


def _in_any_host(question: Question) -> tuple[Relaxation, ...]:
    """Where nobody knows how much memory the host has: what it would need."""
    try:
        best = thriftiest(replace(question, wishes=replace(question.wishes, host=ANY_HOST)))
    except UserError:
        best = None
    if best is None or not best.fits:
        return ()
    host = -(-best.host_bytes // GIB)
    return (_relaxation(best, f"--host {host}GiB", f"states in {host} GiB of host memory"),)


def _helped(question: Question, found: Spilled) -> tuple[tuple[Relaxation, ...], int]:
    """What would help, tried; the first of the formats that does."""
    made, tried = list[Relaxation](), 0
    for flag, wishes, changed in helps(found, question.wishes, bf16=not missing("bfloat16", question.cluster)):
        if "--precision" in flag and made and "--precision" in made[-1].flag:
            break
        tried += 1
        try:
            best = thriftiest(replace(question, wishes=wishes))
        except UserError:
            continue
        if best is not None and best.fits:
            made.append(_relaxation(best, flag, changed))
            if "--state-format" in flag:
                break
    return tuple(made), tried


def _relaxation(best: Tried, flag: str, change: str) -> Relaxation:
    memory, time = best.cost.worst.memory, best.cost.time
    return Relaxation(
        change=change, plan=told(best.plan), verdict=best.cost.verdict, memory_bytes=memory.device_bytes,
        capacity_bytes=memory.capacity_bytes, seconds=time.step_seconds if time is not None else None, flag=flag,
    )  # fmt: skip


def spilled(question: Question, patience: float = float("inf")) -> Choice:
    """The best plan with what does not fit on a device elsewhere."""
    if not meshes(question.cluster, question.wishes):
        raise UserError(
            f"--precision {MASTER} is planned for like devices that share parameters alone, and --on or a degree asks for more",
            "leave out --tp, --pp, --cp and --ep, or use bf16-mixed",
        )
    found, wishes, cluster = spill(question, patience), question.wishes, question.cluster
    if wishes.precision is None and moving_states(cluster) != default(cluster):
        told = f"computed in {moving_states(cluster)}: {default(cluster)} is not run with optimizer states elsewhere"
        found = replace(found, notes=(*found.notes, told))
    if found.best is None:
        helped, count = _helped(question, found)
        dropped = tuple(replace(one, why=one.over) for one in found.tried)
        return Choice(best=None, dropped=tuple(map(explained, dropped)), infeasible=found.infeasible, costed=found.costed,
                      notes=found.notes, relaxations=helped, tried=count, reasons=of_candidates(dropped))  # fmt: skip
    where = lines(found)
    best, *others = (replace(one, plan=one.plan.with_(predicted=one.cost.predicted())) for one in (found.best, *found.tried))
    best = replace(best, plan=best.plan.with_(notes=where))
    losers = engine.each_kind(others, lambda one: (one.plan.micro_batch, kind_of(one.plan), bool(one.plan.states), bool(one.plan.weights)))
    slower = tuple(replace(one, why=why_slower(best, one)) for one in losers)
    return Choice(best=best, runners_up=slower, costed=found.costed, notes=found.notes, where=where)
