"""The best way to run a model on given hardware, the front of trade-offs, and why.

    traces of two micro-batches (cached) ─► sheet ─► explore the space by quick costs        space_explore
      ─► the best of each kind, costed exactly op by op where that takes no longer than it may  cost.plan
      ─► front, reasons, what other hardware would change                                     front, explain

Where nothing fits, the answer says how many bytes are missing and which changes would make it fit.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from foretell.cost.machine import machine
from foretell.cost.plan import KEEP, Options, PlanCost, predict_plan
from foretell.cost.plan_batch import Unlike
from foretell.cost.plan_parts import profile_for
from foretell.cost.prediction import ASSUMED, FITS, NO, TIGHT, Infeasible
from foretell.errors import UserError
from foretell.hardware.types import Cluster
from foretell.plan import legal
from foretell.plan.recipe import model_of
from foretell.plan.types import Mesh, Plan
from foretell.search import explain, space_wishes
from foretell.search.front import TIGHT as CLEAR
from foretell.search.front import Point, best_of, complaint, front, point_of, score
from foretell.search.quick import Layout, plan_of
from foretell.search.sheet import Sheet
from foretell.search.sheet_ops import Source as Pieces
from foretell.search.space import Room
from foretell.search.space_explore import Explored, Explorer, distinct
from foretell.search.space_fill import Filled, fill
from foretell.search.space_price import SheetPricer
from foretell.search.space_wishes import Wishes
from foretell.search.traces import PAIR, Traces
from foretell.trace.load import Source

FINALISTS = 4
"""Kinds of plans that are costed exactly, as long as that is quick."""
SETTLED = 5
"""Kinds of plans whose memory is replayed through the caching allocator, at least."""
SETTLE_SECONDS = 1.5
"""After which one of them is enough."""
REFILLS = 3
"""Times that a candidate which is short when costed op by op is filled anew."""
CAREFUL_BYTES = 64 << 20
"""And so much less still, since the two costs differ."""
TRIED = 8
"""Plans that are costed exactly until one fits."""
EXACT_SECONDS = 4.0
"""After which no further plan is costed exactly, the best one aside."""
EXACT_OPS = 15_000
"""Ops of a step, of all ranks of a pipeline, above which a plan is costed exactly only when asked for: about a second."""
FRONT_SECONDS = 1.0
"""After which no further point of the front is replayed through the caching allocator, and left out."""
AGAIN_SECONDS = 3.0
"""For each search of a what-if."""
RUNNERS_UP = 8
TENSOR = (2, 4, 8, 16, 32, 64)

Progress = Callable[[str], None]


class Unsuited(Exception):
    """The model or the device cannot be costed by a sheet; says why."""


@dataclass(frozen=True, kw_only=True)
class Finalist:
    """A plan that was considered to the end."""

    point: Point
    plan: Plan
    """With what is predicted of it."""
    cost: PlanCost | None = None
    """None where it was not costed op by op."""
    why: str = ""
    """Why it is not the best."""

    @property
    def verdict(self) -> str:
        return self.cost.verdict if self.cost is not None else TIGHT if self.point.tight else FITS


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best plan, those that lost, and the front."""

    best: Finalist | None
    runners_up: tuple[Finalist, ...] = ()
    dropped: tuple[Finalist, ...] = ()
    """That were expected to fit and do not when costed exactly."""
    front: tuple[Finalist, ...] = ()
    """Plans that no other beats in time, memory, money and energy together; the fastest first."""
    binds: tuple[str, ...] = ()
    what_if: tuple[explain.WhatIf, ...] = ()
    nearest: Finalist | None = None
    """Where nothing fits: the plan that comes nearest."""
    short_bytes: int = 0
    """That it lacks on each device."""
    infeasible: Infeasible | None = None
    """Who holds the bytes of that plan, where it was costed op by op."""
    relaxations: tuple[explain.Relaxation, ...] = ()
    unmet: str = ""
    """A limit of the whole run that no plan keeps."""
    costed: int = 0
    there: int = 0
    seconds: float = 0.0
    stopped: str = ""
    notes: tuple[str, ...] = ()

    @property
    def needs(self) -> str:
        """What would have to change, in one line."""
        if self.unmet:
            words = [f"{one.change} ({explain.told(one.point.layout)})" for one in self.relaxations]
            return f"{self.unmet}" + (f"; possible: {', or '.join(words)}" if words else "")
        return explain.needs(self.short_bytes, self.relaxations)


def find(
    source: Source, cluster: Cluster, hardware: str, wishes: Wishes | None = None, *, options: Options | None = None,
    hints: Mapping[str, float] | None = None, cache: bool = True, progress: Progress = lambda _: None,
    exact: bool | None = None, what_if: bool = False, patience: float = float("inf"), traces: Traces | None = None,
) -> Found:  # fmt: skip
    """Search; `exact` says whether finalists are costed op by op: None where that is quick, True always, False never."""
    how = options or Options()
    how = replace(how, profile_of=functools.cache(how.profile_of))
    device = cluster.device
    known = traces or Traces(
        capability=device.compute_capability or (9, 0), hints=dict(hints or {}), cache=cache, progress=progress
    )
    asked = wishes or Wishes()
    space_wishes.check(asked, cluster)
    finder = Finder(source, cluster, hardware, asked, how, known, progress, exact)
    return finder.answer(what_if=what_if, patience=patience)


@dataclass
class Finder:
    """One question, and what answering it needs."""

    source: Source
    cluster: Cluster
    hardware: str
    wishes: Wishes
    options: Options
    traces: Traces
    progress: Progress
    exact: bool | None = None
    sheets: dict[str, Sheet] = field(default_factory=dict)
    pieces: dict[str, Pieces] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    # ------------------------------------------------------------------ sheets

    def sheet(self, cluster: Cluster) -> Sheet:
        """What blocks cost on a cluster's device."""
        key = repr(cluster.device)
        if key not in self.sheets:
            known = machine(cluster.device, profile_for(cluster, self.options.profile_of))
            if known is None:
                raise Unsuited(f"nothing is known of the speed of {cluster.device.name}")
            try:
                self.sheets[key] = Sheet(
                    self._pieces, known, cluster, optimizer=self.wishes.optimizer, clip=self.wishes.clip,
                    first=self._recipe(cluster.count > 1),
                )  # fmt: skip
            except Unlike as error:
                raise Unsuited(str(error)) from error
            if not self.about:
                shapes = self.traces.facts.shapes
                self.about = model_of(self.source, blocks=self.sheets[key].blocks, shapes=shapes or None)
        return self.sheets[key]

    def _recipe(self, data: bool) -> str:
        precision = self.wishes.precision or "bf16-mixed"
        return precision if precision != "bf16-mixed" else "fsdp-bf16" if data else "bf16-autocast"

    def _pieces(self, recipe: str, tp: int) -> Pieces:
        if tp > 1:
            raise KeyError((recipe, tp))  # the sheet splits the pieces itself
        if recipe not in self.pieces:
            precision = "bf16-mixed" if recipe in ("fsdp-bf16", "bf16-autocast") else recipe
            base = Plan(
                model=model_of(self.source), hardware=self.hardware, mesh=Mesh(dp_shard=2 if recipe == "fsdp-bf16" else 1),
                precision=precision, optimizer=self.wishes.optimizer, clip=self.wishes.clip,
            )  # fmt: skip
            plans = [base.with_(micro_batch=size) for size in PAIR]
            self.traces.prepare([(plan, KEEP) for plan in plans])
            small, large = (self.traces.of(plan, [KEEP])[KEEP] for plan in plans)
            self.pieces[recipe] = Pieces(small, large, PAIR)
        return self.pieces[recipe]

    def room(self, cluster: Cluster, wishes: Wishes) -> Room:
        sheet = self.sheet(cluster)
        inside = min(cluster.count, cluster.devices_per_domain or cluster.devices_per_node)
        given = wishes.fixed.get("tp")
        sizes = [size for size in TENSOR if inside % size == 0 and given in (None, size)] if given != 1 else []
        sizes += [given] if given and given > 1 and given not in TENSOR else []
        allowed = [1]
        for size in sizes:
            reason = sheet.offered(self._recipe(cluster.count > size), size)
            if reason is None:
                allowed.append(size)
            elif given == size:
                raise UserError(f"--tp {size}: {reason}", "another degree")
            else:
                self._note(f"tp {size} is not offered: {reason}")
        tied = any(len(group) > 1 and _same_block(group, sheet.blocks) for group in self.traces.facts.tied)
        return Room(cluster=cluster, blocks=len(sheet.blocks), wishes=wishes, tensor=tuple(allowed), tied_inside=tied)

    def _note(self, words: str) -> None:
        if words not in self.notes:
            self.notes.append(words)

    # ------------------------------------------------------------------ searching

    def explore(self, cluster: Cluster, wishes: Wishes, patience: float = float("inf")) -> Explored:
        room = self.room(cluster, wishes)
        pricer = SheetPricer(self.sheet(cluster), cluster)
        return Explorer(
            room=room, pricer=pricer, tokens_per_sample=self.sheet(cluster).length or 1, patience=patience, progress=self.progress
        ).run()

    def again(self, cluster: Cluster, wishes: Wishes) -> Point | None:
        try:
            space_wishes.check(wishes, cluster)
            found = self.explore(cluster, wishes, AGAIN_SECONDS)
        except UserError:
            return None
        if found.stopped == "interrupted":
            raise KeyboardInterrupt
        return best_of(found.points, wishes)

    def answer(self, *, what_if: bool, patience: float) -> Found:
        began = time.monotonic()
        sheet = self.sheet(self.cluster)
        space_wishes.check(self.wishes, self.cluster, len(sheet.blocks))
        explored = self.explore(self.cluster, self.wishes, patience)
        best = best_of(explored.points, self.wishes)
        if best is None:
            return self._nothing(explored, began)
        finalists, dropped = self._finalists(explored)
        if not finalists:
            return replace(self._nothing(explored, began), dropped=tuple(dropped))
        first = replace(finalists[0], plan=self._annotated(finalists[0], explored))
        table = self._what_if(self._as_quick(first.point)) if what_if and not explored.stopped else ()
        return Found(
            best=first, runners_up=tuple(finalists[1:]), dropped=tuple(dropped),
            front=self._front(explored, [first, *finalists[1:]], dropped),
            binds=explain.binds(first.point), what_if=table, costed=explored.costed, there=explored.there,
            seconds=time.monotonic() - began, stopped=explored.stopped, notes=(*self.traces.notes, *self.notes),
        )  # fmt: skip

    def _front(self, explored: Explored, finalists: Sequence[Finalist], dropped: Sequence[Finalist]) -> tuple[Finalist, ...]:
        """The front by quick costs; what is known exactly is told so."""
        known = {one.point.layout: one for one in finalists}
        gone = {one.point.layout for one in dropped}
        points = [p for p in explored.points if p.layout not in gone and p.layout not in known]
        points += [_quickly(one.point) for one in finalists]
        best = next(point for point in points if point.layout == finalists[0].point.layout)
        shown, began = [], time.monotonic()
        for point in front(points, self.wishes, best):
            if time.monotonic() - began > FRONT_SECONDS and point.layout not in known:
                continue
            sure = point if point.layout in known or explored.stopped == "interrupted" else self.settled(point)
            if sure is not None:
                shown.append(known.get(sure.layout) or self._finalist(sure))
        once = {one.point.layout: one for one in shown}
        return tuple(sorted(once.values(), key=lambda one: _quickly(one.point).each()[0]))

    def _as_quick(self, point: Point) -> Point:
        """As the quick cost had it, to be compared with quick costs."""
        pricer = SheetPricer(self.sheet(self.cluster), self.cluster)
        filled = Filled(layout=point.layout, quick=pricer.quick(point.layout))
        return point_of(filled, self.cluster, self.sheet(self.cluster).length or 1)

    def _what_if(self, best: Point) -> tuple[explain.WhatIf, ...]:
        try:
            return explain.what_ifs(self.cluster, self.wishes, best, self.again)
        except KeyboardInterrupt:
            self._note("the table of changes was interrupted")
            return ()

    # ------------------------------------------------------------------ finalists

    def _finalists(self, explored: Explored) -> tuple[list[Finalist], list[Finalist]]:
        """The best of each kind, the first of them costed exactly; and those that then do not fit."""
        found: list[Finalist] = []
        dropped: list[Finalist] = []
        began = time.monotonic()
        stopped = bool(explored.stopped)
        for number, point in enumerate(self._settled_all(explored)):
            late = time.monotonic() - began > EXACT_SECONDS
            enough = len(found) >= (1 if late else FINALISTS)
            one = self._finalist(point)
            if not stopped and not enough and number < TRIED:
                try:
                    one = self._refilled(self.costed(one, always=not found and self.exact is True), dropped)
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
        best = self._best_exact(found)
        losers = [replace(one, why=self._why(best, one)) for one in found if one is not best]
        return [best, *losers[:RUNNERS_UP]], dropped

    def _refilled(self, one: Finalist, dropped: list[Finalist]) -> Finalist:
        """A candidate that was filled to the brim by its quick cost and then is short: filled anew, with that much less."""
        pricer = SheetPricer(self.sheet(self.cluster), self.cluster, reserve=True)
        for _ in range(REFILLS):
            if one.cost is None or one.cost.fits:
                break
            less = max(0, -one.cost.worst.memory.margin_bytes) + CAREFUL_BYTES
            most = pricer.quick(one.point.layout).memory_bytes - less
            filled = fill(replace(one.point.layout, cuts=(), modes=()), pricer, most, most)
            if filled is None or not filled.fits or filled.layout == one.point.layout:
                break
            dropped.append(replace(one, why=_short(one.cost)))
            one = self.costed(self._finalist(point_of(filled, self.cluster, self.sheet(self.cluster).length or 1)))
        return one

    def _why(self, best: Finalist, one: Finalist) -> str:
        """Where a plan loses, by the same kind of cost of both."""
        exact = best.cost is not None and one.cost is not None
        pair = (best.point, one.point) if exact else (_quickly(best.point), _quickly(one.point))
        return explain.why_lost(*pair, self.wishes.objective)

    def _settled_all(self, explored: Explored) -> list[Point]:
        """The best of each kind with what the caching allocator reserves, the best first.

        That can only make a plan slower or larger: once the best so far beats what is next, only runners-up follow.
        """
        settled: list[Point] = []
        best, began = (float("inf"), float("inf")), time.monotonic()
        for point in distinct(explored.points, self.wishes):
            late = time.monotonic() - began > SETTLE_SECONDS
            if len(settled) >= (1 if late else SETTLED) and (late or score(point, self.wishes) >= best):
                break
            found = point if explored.stopped == "interrupted" else self.settled(point)
            if found is not None and not complaint(found, self.wishes):
                settled.append(found)
                best = min(best, score(found, self.wishes))
        chosen = best_of(settled, self.wishes)
        settled.sort(key=lambda point: score(point, self.wishes))
        return [point for point in (chosen, *(one for one in settled if one is not chosen)) if point is not None]

    def settled(self, point: Point) -> Point | None:
        """A candidate with what the caching allocator reserves; filled anew where it does not fit so."""
        pricer = SheetPricer(self.sheet(self.cluster), self.cluster, reserve=True)
        full, capacity = pricer.quick(point.layout), self.cluster.device.memory_bytes
        most = min(capacity * (1 - self.wishes.margin), pricer.limit(point.layout))
        filled: Filled | None = Filled(layout=point.layout, quick=full)
        if not full.fits or full.memory_bytes > most:
            filled = fill(replace(point.layout, cuts=(), modes=()), pricer, most, capacity * (1 - CLEAR))
        if filled is None or not filled.fits:
            return None
        return point_of(filled, self.cluster, self.sheet(self.cluster).length or 1)

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

    def _finalist(self, point: Point) -> Finalist:
        """A candidate as a plan."""
        plan = plan_of(point.layout, self.sheet(self.cluster), self.about, self.hardware)
        return Finalist(point=point, plan=plan.with_(predicted=self.predicted(point)))

    def predicted(self, point: Point) -> dict[str, Any]:
        """What the quick cost says, as a plan file holds it."""
        quick, unit = point.quick, "tokens" if self.sheet(self.cluster).length else "samples"
        found: dict[str, Any] = {
            "verdict": TIGHT if point.tight else FITS, "memory_bytes": point.memory_bytes,
            "capacity_bytes": point.capacity_bytes, "memory_bytes_by_rank": list(quick.stage_memory),
            "step_seconds": quick.seconds, "low_seconds": quick.low, "high_seconds": quick.high,
            f"{unit}_per_second": point.per_second, f"{unit}_per_step": point.per_step, "binds": quick.binds,
            "breakdown": dict(quick.parts), "provenance": {"memory": ASSUMED, "time": ASSUMED}, "quick": True,
        }  # fmt: skip
        if point.dollars is not None:
            found["dollars_per_step"] = point.dollars
        if point.joules is not None:
            found["joules_per_step"] = point.joules
        return found

    def costed(self, one: Finalist, *, always: bool = False) -> Finalist:
        """The same costed op by op, where its traces are there or may be made; with a reason where it is not legal."""
        plan = one.plan
        facts = replace(
            legal.with_hardware(legal.Facts(blocks=self.sheet(self.cluster).blocks, tied=self.traces.facts.tied), self.cluster),
            global_batch=self.wishes.global_batch,
        )  # fmt: skip
        wrong = legal.complaints(plan, facts)
        if wrong:
            return replace(one, why=str(wrong[0]))
        modes = sorted({KEEP, *one.point.layout.modes}) if one.point.layout.modes else [KEEP]
        if len(set(one.point.layout.modes)) == 1:
            modes = list(set(one.point.layout.modes))
        if self.exact is False or (not always and not self._soon(one, modes)):
            return one
        self.progress(f"costing op by op: {explain.told(one.point.layout)}")
        try:
            cost = predict_plan(self.traces.of(plan, modes), plan, self.cluster, self.options)
        except UserError as error:
            return replace(one, why=error.problem)
        return self._with(one, cost)

    def _with(self, one: Finalist, cost: PlanCost) -> Finalist:
        point = one.point
        if cost.time is not None:
            share = cost.time.step_seconds / point.seconds
            point = replace(
                point, seconds=cost.time.step_seconds, memory_bytes=cost.worst.memory.device_bytes,
                dollars=None if point.dollars is None else point.dollars * share,
                joules=None if point.joules is None else point.joules * share,
            )  # fmt: skip
        money = {f"{name}_per_step": value for name, value in (("dollars", point.dollars), ("joules", point.joules)) if value}
        return replace(one, point=point, cost=cost, plan=one.plan.with_(predicted={**cost.predicted(), **money}))

    def _soon(self, one: Finalist, modes: Sequence[str]) -> bool:
        """Whether traces are there already, and replaying them takes a moment."""
        layout = one.point.layout
        there = all(self.traces.at_hand(one.plan, mode) for mode in modes)
        return self._small(layout) and (there or layout.mesh.tp == 1)

    def _small(self, layout: Layout) -> bool:
        pieces = next(iter(self.pieces.values())).first
        ops = sum(
            (len(piece.forward) + len(piece.backward)) * (pieces.kinds.count(key) if isinstance(key, int) else 1)
            for key, piece in pieces.pieces.items()
        )
        return ops * (layout.accumulate if layout.mesh.pp > 1 else 2) <= EXACT_OPS

    def _annotated(self, one: Finalist, explored: Explored) -> Plan:
        """The plan with what a reader should know before running it."""
        notes = list(one.plan.notes)
        if one.verdict == TIGHT:
            notes.append("memory is tight: what is left is within what the prediction may be off by")
        if one.cost is None:
            notes.append("estimated from the costs of its blocks, not op by op")
        if explored.stopped:
            notes.append(f"the search was ended early: {explored.stopped}")
        return one.plan.with_(notes=tuple(notes))

    # ------------------------------------------------------------------ nothing

    def _nothing(self, explored: Explored, began: float) -> Found:
        """Why no plan can be had, and what would have to change."""
        unmet = ""
        if explored.points:
            nearest = min(explored.points, key=lambda point: score(point, self.wishes))
            unmet = f"the best plan {complaint(nearest, self.wishes)}" if complaint(nearest, self.wishes) else ""
        relaxed = () if explored.stopped else explain.relaxations(self.cluster, self.wishes, self.again)
        near = explored.nearest
        filled = infeasible = None
        if near is not None:
            point = point_of(near, self.cluster, self.sheet(self.cluster).length or 1)
            filled = replace(self._finalist(point), why="does not fit")
            filled = replace(filled, plan=filled.plan.with_(predicted={**filled.plan.predicted, "verdict": NO}))
            known = filled if explored.stopped else self.costed(replace(filled, why=""))
            infeasible = known.cost.infeasible(self.cluster.device.name) if known.cost is not None else None
        if not explored.points and near is None and explored.there == 0:
            unmet = _no_layout(self.wishes, self.cluster)
        return Found(
            best=None, nearest=filled, short_bytes=int(near.short) if near else 0, infeasible=infeasible, unmet=unmet,
            relaxations=relaxed,
            costed=explored.costed, there=explored.there, seconds=time.monotonic() - began, stopped=explored.stopped,
            notes=(*self.traces.notes, *self.notes),
        )  # fmt: skip


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
    from foretell.units import human_bytes

    return f"{human_bytes(-cost.worst.memory.margin_bytes)} short on a device when costed op by op"


def _no_layout(wishes: Wishes, cluster: Cluster) -> str:
    batch = wishes.global_batch
    if batch is not None:
        return f"{batch} samples cannot be shared by the data ranks and stages that {cluster.count} devices make"
    return f"no mesh of {cluster.count} devices keeps the given degrees"
