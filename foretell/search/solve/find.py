"""The best way to run a model on given hardware, the front of trade-offs, and why.

    traces of two micro-batches (cached) ─► sheet ─► explore the space by quick costs        space_explore
      ─► the best of each kind, costed exactly op by op where that takes no longer than it may  cost.plan
      ─► front, reasons, what other hardware would change                                     front, explain

Where nothing fits, the answer says how many bytes are missing and which changes would make it fit.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from foretell.errors import UserError
from foretell.hardware.types import Cluster
from foretell.lower.batch import BatchMismatch
from foretell.plan.recipe import model_of
from foretell.plan.types import Plan
from foretell.quantities import NO, TIGHT
from foretell.search.advice.relax import relaxations
from foretell.search.estimate.depth import Depth
from foretell.search.heterogeneous.price import fill_by_speed
from foretell.search.solve import costing, explain, reasons
from foretell.search.solve.costing import Costing
from foretell.search.solve.costing import Unsuited as Unsuited
from foretell.search.solve.found import Finalist as Finalist
from foretell.search.solve.found import SearchResult as SearchResult
from foretell.search.solve.front import Point, best_of, complaint, front, pareto, point_of, score
from foretell.search.solve.planned_batch import BatchAdvice
from foretell.search.solve.question import Question, ask
from foretell.search.space import constraints as space_wishes
from foretell.search.space.constraints import SearchConstraints
from foretell.search.space.degrees import context_degrees, expert_degrees
from foretell.search.space.explore import Explored, Explorer, distinct
from foretell.search.space.fill import Filled
from foretell.search.space.layouts import Room
from foretell.search.traces.shares import Shares
from foretell.simulate.plan import PlanCost
from foretell.trace.load.model import Source
from foretell.trace.record.collection import no_collection
from foretell.units import human_bytes

FINALISTS = 4
"""Kinds of plans that are costed exactly, as long as that is quick."""
SETTLED = 5
"""Kinds of plans whose memory is replayed through the caching allocator, at least."""
SETTLE_SECONDS = 4.0
"""Of this process, tracing aside, after which runners-up are no longer looked for."""
CAREFUL_BYTES = 64 << 20
"""And so much less still, since the two costs differ."""
NEAR = 0.03
"""Share by which quick costs may be off: so near the best, plans are traced for to be costed exactly."""
TRIED = 8
"""Plans that are costed exactly until one fits."""
EXACT_SECONDS = 8.0
"""Of this process after which no further plan is costed exactly, the best one aside."""
FRONT_SECONDS = 2.0
"""Of this process after which no further point of the front is replayed through the caching allocator, and left out."""
AGAIN_SECONDS = 3.0
"""For each search of a what-if."""
SURE_SECONDS = 10.0
"""For each search of a change that is told as a command."""
RUNNERS_UP = 8
TENSOR = (2, 4, 8, 16, 32, 64)


def find(
    source: Source, cluster: Cluster, hardware: str, wishes: SearchConstraints | None = None, *, exact: bool | None = None,
    what_if: bool = False, patience: float = float("inf"), **how: Any,
) -> SearchResult:  # fmt: skip
    """Search; `exact` says whether finalists are costed op by op: None where that is quick, True always, False never.

    `how` is as for `question.ask`.
    """
    return found_for(ask(source, cluster, hardware, wishes, **how), exact=exact, what_if=what_if, patience=patience)


def found_for(question: Question, *, exact: bool | None, what_if: bool = False, patience: float = float("inf")) -> SearchResult:
    """The same for a question."""
    finder = question.into(Finder, exact=exact)
    try:
        with no_collection():
            return finder.answer(what_if=what_if, patience=patience)
    except BatchMismatch as error:
        raise Unsuited(str(error)) from error
    finally:
        finder.keep_costs()


@dataclass
class Finder(Costing):
    """One question, and how it is answered."""

    # ------------------------------------------------------------------ rooms

    @functools.cached_property
    def shares(self) -> Shares:
        """What ranks can share of the model besides its layers."""
        return self.traces.shares(Plan(model=model_of(self.source), hardware=self.hardware))

    def room(self, cluster: Cluster, wishes: SearchConstraints, *, hard: bool = False) -> Room:
        """What plans are made for; `hard`: nothing fits that shares no positions."""
        sheet = self.sheet(cluster)
        experts = expert_degrees(sheet, cluster, wishes, lambda: self.shares)
        if experts != (1,):
            sheet.experts = (self.shares.paths, self.shares.experts)
        inside = min(cluster.count, cluster.devices_per_domain or cluster.devices_per_node)
        given = wishes.fixed.get("tp")
        sizes = [size for size in TENSOR if inside % size == 0 and given in (None, size)] if given != 1 else []
        sizes += [given] if given and given > 1 and given not in TENSOR else []
        allowed = [1]
        for size in sizes:
            reason = sheet.offered(self.recipe(cluster, cluster.count > 1), size)
            if reason is None:
                allowed.append(size)
            elif given == size:
                raise UserError(f"--tp {size}: {reason}", "another degree")
            else:
                self.note(f"tp {size} is not offered: {reason}")
        tied = any(len(group) > 1 and _same_block(group, sheet.blocks) for group in self.traces.facts.tied)
        return Room(
            cluster=cluster, blocks=len(sheet.blocks), wishes=wishes, tensor=tuple(allowed), tied_inside=tied,
            context=context_degrees(sheet, cluster, wishes, lambda: self.shares, max(allowed), hard=hard), experts=experts,
        )  # fmt: skip

    # ------------------------------------------------------------------ searching

    def explore(self, cluster: Cluster, wishes: SearchConstraints, patience: float = float("inf"), *, held: Depth = Depth.ALIVE) -> Explored:
        """Layouts that fit; where none does, ranks may share positions too. `held`: how bytes are found."""
        room = self.room(cluster, wishes)
        found = self._explored(room, patience, held)
        if found.points or found.stopped:
            return found
        more = self.room(cluster, wishes, hard=True)
        other = self._explored(more, patience, held) if more.context != room.context else found
        return other if other.points else found

    def _explored(self, room: Room, patience: float, held: Depth) -> Explored:
        cluster = room.cluster
        pricer = self.pricer(cluster, held=held)
        return Explorer(
            room=room, pricer=pricer, tokens_per_sample=self.sheet(cluster).length or 1, patience=patience,
            progress=self.progress,
            filler=functools.partial(fill_by_speed, both=False) if cluster.groups else None,
        ).run()  # fmt: skip

    def again(self, cluster: Cluster, wishes: SearchConstraints) -> Point | None:
        try:
            space_wishes.check(wishes, cluster)
            found = self.explore(cluster, wishes, AGAIN_SECONDS)
        except UserError:
            return None
        if found.stopped == "interrupted":
            raise KeyboardInterrupt
        return best_of(found.points, wishes)

    def sure(self, cluster: Cluster, hardware: str, wishes: SearchConstraints) -> Finalist | None:
        """The best plan for other hardware or other wishes, as a search of its own finds it."""
        capability, traces = cluster.device.compute_capability or (9, 0), self.traces
        if capability != traces.capability:
            traces = replace(traces, capability=capability, notes=[], _known={}, _crooked=set())
        other = Finder(self.source, cluster, hardware, wishes, self.options, traces, self.progress, self.exact, by_law=self.by_law)
        try:
            found = other.answer(what_if=False, patience=SURE_SECONDS, relax=False)
        except (UserError, Unsuited, BatchMismatch):
            return None
        if found.stopped == "interrupted":
            raise KeyboardInterrupt
        return found.best

    def answer(self, *, what_if: bool, patience: float, relax: bool = True) -> SearchResult:
        began = time.monotonic()
        sheet = self.sheet(self.cluster)
        law = self.law(sheet.blocks, sheet.length)
        space_wishes.check(self.wishes, self.cluster, len(sheet.blocks))
        explored = self.explore(self.cluster, self.wishes, patience)
        best = best_of(explored.points, self.wishes)
        if best is None:
            return replace(self._nothing(explored, began, relax), law=law)
        finalists, dropped = self._finalists(explored)
        if not finalists and not explored.stopped:  # all were short with what the caching allocator reserves: count that in
            explored = self.explore(self.cluster, self.wishes, patience, held=Depth.SHORT)
            finalists, dropped = self._finalists(explored)
        if not finalists:
            return replace(self._nothing(explored, began, relax, dropped), dropped=tuple(dropped), law=law)
        law = replace(law, used=finalists[0].plan.global_batch) if law is not None else None
        first = replace(finalists[0], plan=self._annotated(finalists[0], explored, law))
        table = self._what_if(self._as_quick(first.point)) if what_if and not explored.stopped else ()
        return SearchResult(
            best=first, runners_up=tuple(finalists[1:]), dropped=tuple(dropped),
            front=self._front(explored, [first, *finalists[1:]], dropped),
            binds=explain.binds(first.point), what_if=table, costed=explored.costed, there=explored.there,
            seconds=time.monotonic() - began, stopped=explored.stopped, notes=(*self.traces.notes, *self.notes),
            law=law, fewer=_fewer(explored, first.point.devices),
        )  # fmt: skip

    def _front(self, explored: Explored, finalists: Sequence[Finalist], dropped: Sequence[Finalist]) -> tuple[Finalist, ...]:
        """The front by quick costs; what is known exactly is told so."""
        known = {one.point.layout: one for one in finalists}
        gone = {one.point.layout for one in dropped}
        points = [p for p in explored.points if p.layout not in gone and p.layout not in known]
        points += [_quickly(one.point) for one in finalists]
        best = next(point for point in points if point.layout == finalists[0].point.layout)
        shown, began = [], time.process_time()
        for point in front(points, self.wishes, best):
            if time.process_time() - began > FRONT_SECONDS and point.layout not in known:
                continue
            sure = point if point.layout in known or explored.stopped == "interrupted" else self.settled(point)
            if sure is not None:
                shown.append(known.get(sure.layout) or self.finalist(sure))
        once = {one.point.layout: one for one in shown}
        return self._undominated(list(once.values()), finalists[0])

    def _undominated(self, shown: Sequence[Finalist], best: Finalist) -> tuple[Finalist, ...]:
        """By the figures that are shown, exact or quick: what the quick costs had on the front need not be on it. The best
        stays, and every other one says why it is not."""
        kept = {id(point) for point in pareto([one.point for one in shown])}
        found = [one if one.point is best.point or one.why else replace(one, why=self._why(best, one)) for one in shown]
        found = [one for one in found if id(one.point) in kept or one.point is best.point]
        return tuple(sorted(found, key=lambda one: one.point.each()[0]))

    def _as_quick(self, point: Point) -> Point:
        """As the quick cost had it, to be compared with quick costs."""
        pricer = self.pricer(self.cluster)
        filled = Filled(layout=point.layout, quick=pricer.quick(point.layout))
        return point_of(filled, self.cluster, self.sheet(self.cluster).length or 1)

    def _what_if(self, best: Point) -> tuple[explain.WhatIf, ...]:
        try:
            return explain.what_ifs(self.cluster, self.wishes, best, self.again)
        except KeyboardInterrupt:
            self.note("the table of changes was interrupted")
            return ()

    # ------------------------------------------------------------------ finalists

    def _finalists(self, explored: Explored) -> tuple[list[Finalist], list[Finalist]]:
        """The best of each kind, the first of them costed exactly; and those that then do not fit."""
        found: list[Finalist] = []
        dropped: list[Finalist] = []
        began = time.process_time()
        stopped = bool(explored.stopped)
        points = self._settled_all(explored)
        if self.exact is not False and not stopped:
            near = [point for point in points[:FINALISTS] if score(point, self.wishes)[0] <= score(points[0], self.wishes)[0] * (1 + NEAR)]
            self.prepare([self.finalist(point) for point in near])
        for number, point in enumerate(points):
            late = self.exact is not True and time.process_time() - began > EXACT_SECONDS
            enough = len(found) >= (1 if late else FINALISTS)
            one = self.finalist(point)
            if not stopped and not enough and number < TRIED:
                try:
                    one = self._refilled(self.costed(one, always=not found and self.exact is True, traces=not found), dropped)
                except KeyboardInterrupt:
                    stopped = True
            if one.why and one.cost is None:  # not legal, or the model cannot be split so
                dropped.append(one)
            elif one.cost is not None and not one.cost.fits:
                dropped.append(replace(one, why=_short(one.cost)))
            else:
                found.append(one)
        if not found:
            return [], dropped
        if not stopped:
            until = time.process_time() + costing.POLISH_SECONDS
            polished = [self.polished(one, until, first=not number) for number, one in enumerate(found[:FINALISTS])]
            changed = any(one is not other for one, other in zip(polished, found, strict=False))
            found = [*polished, *found[FINALISTS:]]
            if changed:  # what was best before need not be
                chosen = best_of([one.point for one in found], self.wishes)
                found.sort(key=lambda one: one.point is not chosen)
        best = self._best_exact(found)
        losers = [replace(one, why=self._why(best, one)) for one in found if one is not best]
        return [best, *losers[:RUNNERS_UP]], dropped

    def _refilled(self, one: Finalist, dropped: list[Finalist]) -> Finalist:
        """A candidate that was filled to the brim by its quick cost and then is short: filled anew, with that much less."""
        pricer = self.pricer(self.cluster, held=Depth.SHORT)
        for _ in range(costing.REFILLS):
            if one.cost is None or one.cost.fits:
                break
            less = max(0, -one.cost.worst.memory.margin_bytes) + CAREFUL_BYTES
            most = pricer.quick(one.point.layout).memory_bytes - less
            filled = self.filled(one.point.layout, pricer, most, most)
            if filled is None or not filled.fits or filled.layout == one.point.layout:
                break
            dropped.append(replace(one, why=_short(one.cost)))
            one = self.costed(self.finalist(point_of(filled, self.cluster, self.sheet(self.cluster).length or 1)))
        return one

    def _why(self, best: Finalist, one: Finalist) -> str:
        """Where a plan loses, by the same kind of cost of both."""
        exact = best.cost is not None and one.cost is not None
        pair = (best.point, one.point) if exact else (_quickly(best.point), _quickly(one.point))
        lost = explain.why_lost(*pair, self.wishes.objective)
        estimated = not exact and (one.point.per_second > best.point.per_second) != (pair[1].per_second > pair[0].per_second)
        return f"{lost}, where both are estimated from their blocks" if estimated else lost

    def _settled_all(self, explored: Explored) -> list[Point]:
        """The best of each kind with what the caching allocator reserves, the best first.

        That can only make a plan slower or larger: once the best so far beats what is next, only runners-up follow.
        """
        settled: list[Point] = []
        best, began = (float("inf"), float("inf")), time.process_time()
        for point in distinct(explored.points, self.wishes):
            late = time.process_time() - began > SETTLE_SECONDS
            if len(settled) >= (1 if late else SETTLED) and score(point, self.wishes) >= best:
                break
            found = point if explored.stopped == "interrupted" else self.settled(point)
            if found is not None and not complaint(found, self.wishes):
                settled.append(found)
                best = min(best, score(found, self.wishes))
        chosen = best_of(settled, self.wishes)
        settled.sort(key=lambda point: score(point, self.wishes))
        return [point for point in (chosen, *(one for one in settled if one is not chosen)) if point is not None]

    def _best_exact(self, found: Sequence[Finalist]) -> Finalist:
        """Of those costed exactly the best; the first where none was."""
        exact = [one for one in found if one.cost is not None and one.cost.time is not None]
        if not exact:
            return found[0]
        chosen = best_of([one.point for one in exact], self.wishes)
        best = next((one for one in exact if one.point is chosen), exact[0])
        if found[0].cost is None and score(found[0].point, self.wishes) < score(best.point, self.wishes):
            return found[0]
        return best

    def _annotated(self, one: Finalist, explored: Explored, law: BatchAdvice | None) -> Plan:
        """The plan with what a reader should know before running it."""
        notes = list(one.plan.notes)
        if one.verdict == TIGHT:
            notes.append("memory is tight: what is left is within what the prediction may be off by")
        if one.cost is None:
            notes.append("estimated from the costs of its blocks, not op by op")
        if explored.stopped:
            notes.append(f"the search was ended early: {explored.stopped}")
        notes += [one.placed.words()] if one.placed is not None else []
        notes += [f"Step Law: {line}" for line in law.lines()] if law is not None else []
        return one.plan.with_(notes=tuple(notes))

    # ------------------------------------------------------------------ nothing

    def _nothing(self, explored: Explored, began: float, relax: bool, dropped: Sequence[Finalist] = ()) -> SearchResult:
        """Why no plan can be had, and what would have to change."""
        unmet, notes = "", (*self.traces.notes, *self.notes)
        if explored.points:
            nearest = min(explored.points, key=lambda point: score(point, self.wishes))
            unmet = f"the best plan {complaint(nearest, self.wishes)}" if complaint(nearest, self.wishes) else ""
        tries = relax and not explored.stopped
        relaxed, tried = relaxations(self.cluster, self.hardware, self.wishes, self.again, self.sure) if tries else ((), 0)
        fits = any(one.cost is None for one in dropped)  # and is ruled out by something else
        near = explored.nearest if not fits else None
        filled = infeasible = None
        if near is not None:
            point = point_of(near, self.cluster, self.sheet(self.cluster).length or 1)
            filled = replace(self.finalist(point), why="does not fit")
            filled = replace(filled, plan=filled.plan.with_(predicted={**filled.plan.predicted, "verdict": NO}))
            known = filled if explored.stopped else self.costed(replace(filled, why=""))
            infeasible = known.cost.infeasible(self.cluster.device.name) if known.cost is not None else None
        if not explored.points and near is None and explored.there == 0:
            unmet = _no_layout(self.wishes, self.cluster)
        return SearchResult(
            best=None, nearest=filled, short_bytes=int(near.short) if near else 0, infeasible=infeasible, unmet=unmet,
            relaxations=relaxed, tried=tried, reasons=reasons.of_search(explored, dropped, self.wishes, self.cluster.device.memory_bytes),
            costed=explored.costed, there=explored.there, seconds=time.monotonic() - began, stopped=explored.stopped, notes=notes,
        )  # fmt: skip


def _fewer(explored: Explored, devices: int) -> tuple[int, int] | None:
    """The most devices below these with which nothing fits, and what is missing on each."""
    short = [(mesh.world, -int(filled.short)) for mesh, filled in explored.misfits.items() if mesh.world < devices]
    world, missing = max(short, default=(0, 0))
    return (world, -missing) if world and not any(point.devices == world for point in explored.points) else None


def _quickly(point: Point) -> Point:
    """A point as its quick cost has it."""
    share = point.quick.seconds / point.seconds
    return replace(
        point, seconds=point.quick.seconds, memory_bytes=point.quick.memory_bytes, joules=point.quick.joules,
        dollars=None if point.dollars is None else point.dollars * share,
    )  # fmt: skip


def _same_block(group: Sequence[str], blocks: Sequence[str]) -> bool:
    return any(sum(name.startswith(f"{block}.") for name in group) > 1 for block in blocks)


def _short(cost: PlanCost) -> str:
    return f"{human_bytes(-cost.worst.memory.margin_bytes)} short on a device when costed op by op"


def _no_layout(wishes: SearchConstraints, cluster: Cluster) -> str:
    batch = wishes.global_batch
    if batch is not None:
        return f"{batch} samples cannot be shared by the data ranks and stages that {cluster.count} devices make"
    return f"no mesh of {cluster.count} devices keeps the given degrees"
