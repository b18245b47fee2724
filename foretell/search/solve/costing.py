"""What plans for one question cost: sheets and quick costs first, then op by op; and their last changes.

    layout ─► quick cost ─► with every block replayed in the allocator (`settled`) ─► a plan (`finalist`) ─► op by op (`costed`)
           ─► cuts and places of ranks, where devices or links are unlike (`polished`)
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from foretell.errors import UserError
from foretell.hardware.types import Cluster
from foretell.lower.batch import BatchMismatch
from foretell.plan import legal
from foretell.plan.precision import default, in_recipe
from foretell.plan.recipe import model_of
from foretell.plan.types import Plan
from foretell.price.machine import machine
from foretell.price.speeds import profile_for
from foretell.quantities import ASSUMED, FITS, TIGHT
from foretell.search.block_costs.kept import Costs, Exact, kept
from foretell.search.block_costs.sheet import Sheet
from foretell.search.block_costs.source import Sources
from foretell.search.estimate.depth import Depth
from foretell.search.estimate.plan import Layout, plan_of
from foretell.search.heterogeneous import polish
from foretell.search.heterogeneous.price import MixedPricer, fill_by_speed
from foretell.search.solve import explain
from foretell.search.solve.found import Finalist
from foretell.search.solve.front import TIGHT as CLEAR
from foretell.search.solve.front import Point, point_of, score
from foretell.search.solve.question import Question
from foretell.search.space.fill import Filled, fill
from foretell.search.space.price import SheetPricer
from foretell.simulate.plan import KEEP, PlanCost, predict_plan
from foretell.trace.load.model import is_script

EXACT_OPS = 15_000
"""Ops of a step, of all ranks of a pipeline, above which a plan is costed exactly only when asked for: about a second."""
REFILLS = 3
"""Times that a candidate which is short when all its blocks are replayed, or when costed op by op, is filled anew."""
POLISH_SECONDS = 0.6
"""Of this process, for moving the cuts of one plan, by each kind of cost."""


class Unsuited(Exception):
    """The model or the device cannot be costed by a sheet; says why."""


@dataclass
class Costing(Question):
    """One question, and what costing plans for it needs."""

    exact: bool | None = None
    pricers: dict[object, MixedPricer] = field(default_factory=dict)
    sheets: dict[str, Sheet] = field(default_factory=dict)
    named: Mapping[str, Any] = field(default_factory=dict)
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
                    self.sources, known, cluster, optimizer=self.wishes.optimizer, clip=self.wishes.clip,
                    state_format=self.wishes.coded, first=self.recipe(cluster, cluster.count > 1),
                )  # fmt: skip
            except BatchMismatch as error:
                raise Unsuited(str(error)) from error
            self.sheets[key].half_of = self.sources.shorter(self.sheets[key].length)
            self.sheets[key].costs = self._kept_costs(cluster)
            self.named = self.named or self.about(self.sheets[key].blocks)
        return self.sheets[key]

    def _kept_costs(self, cluster: Cluster) -> Costs:
        """What is on disk of short stacks; nothing where nothing is to be kept."""
        traces = self.traces
        if not traces.cache or traces.own or is_script(self.source.model):  # a script's step depends on more than its source says
            return Costs()
        source = {**vars(self.source), "overrides": dict(self.source.overrides)}
        asked = {"source": source, "hints": dict(traces.hints), "optimizer": self.wishes.optimizer, "clip": self.wishes.clip}
        asked |= {"state_format": self.wishes.coded} if self.wishes.coded != "fp32" else {}
        return kept({**asked, "capability": traces.capability}, cluster, profile_for(cluster, self.options.profile_of), traces.files)

    def keep_costs(self) -> None:
        for sheet in self.sheets.values():
            sheet.costs.keep()

    def recipe(self, cluster: Cluster, data: bool) -> str:
        return in_recipe(self.wishes.precision or default(cluster), data)

    @functools.cached_property
    def sources(self) -> Sources:
        """Traces of the model, whole samples and shorter ones."""
        wishes = self.wishes
        base = Plan(model=model_of(self.source), hardware=self.hardware, optimizer=wishes.optimizer, clip=wishes.clip, state_format=wishes.coded)
        return Sources(self.traces, base)

    def note(self, words: str) -> None:
        if words not in self.notes:
            self.notes.append(words)

    # ------------------------------------------------------------------ quick costs

    def pricer(self, cluster: Cluster, *, held: Depth = Depth.ALIVE) -> SheetPricer | MixedPricer:
        """What layouts cost; of unlike devices, each place of a pipeline by its own."""
        if not cluster.groups:
            return SheetPricer(self.sheet(cluster), cluster, held=held)
        key = (repr(cluster), held)
        if key not in self.pricers:
            self.pricers[key] = MixedPricer(cluster, self.sheet, held)
        return self.pricers[key]

    def filled(self, layout: Layout, pricer: SheetPricer | MixedPricer, most: float, roomy: float) -> Filled | None:
        """A layout made whole, with other cuts and another residency where it has some; where devices are unlike, the better of that
        and of its own cuts and places."""
        if not isinstance(pricer, MixedPricer):
            return fill(replace(layout, cuts=(), modes=()), pricer, most, roomy)
        ways = [fill_by_speed(layout, pricer, most, roomy)]
        if layout.cuts:
            ways.append(fill(replace(layout, modes=()), pricer, most, roomy, layout.cuts))
        return min((one for one in ways if one is not None), key=lambda one: (one.short, one.quick.seconds), default=None)

    def settled(self, point: Point) -> Point | None:
        """A candidate with what the caching allocator reserves for all its blocks under the device's limit; filled anew where it does
        not fit so, or is tight and was not meant to be."""
        capacity, short = self.cluster.device.memory_bytes, self.pricer(self.cluster, held=Depth.SHORT)
        most, roomy = min(capacity * (1 - self.wishes.margin), short.limit(point.layout)), capacity * (1 - CLEAR)
        found = self._replayed(point.layout, most, roomy)
        if found is None or not found.tight or short.quick(found.layout).memory_bytes > roomy or roomy >= most:
            return found
        other = self._replayed(point.layout, roomy, roomy)
        return found if other is None else min(found, other, key=lambda one: score(one, self.wishes))

    def _replayed(self, layout: Layout, most: float, roomy: float) -> Point | None:
        """A layout, or one that is filled with less, that fits with all its blocks replayed; None where none does."""
        short, whole = (self.pricer(self.cluster, held=held) for held in (Depth.SHORT, Depth.WHOLE))
        for _ in range(1 + REFILLS):
            seen = whole.quick(layout)
            if seen.fits and seen.memory_bytes <= most:
                return point_of(Filled(layout=layout, quick=seen), self.cluster, self.sheet(self.cluster).length or 1)
            gaps = seen.memory_bytes - short.quick(layout).memory_bytes
            if gaps < 0:  # by its short stack it would be filled with less than there is room for
                filled = fill(replace(layout, modes=()), whole, most, roomy, layout.cuts or None)
            else:
                filled = self.filled(layout, short, most - gaps, roomy - gaps)
            if filled is None or not filled.fits or filled.layout == layout:
                break
            layout = filled.layout
        return None

    # ------------------------------------------------------------------ plans

    def finalist(self, point: Point) -> Finalist:
        """A candidate as a plan."""
        plan = plan_of(point.layout, self.sheet(self.cluster), self.named, self.hardware)
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

    def checked(self, one: Finalist) -> Finalist:
        """The same, with a reason where it is not legal."""
        wrong = legal.complaints(one.plan, self.facts(self.sheet(self.cluster).blocks))
        return replace(one, why=str(wrong[0])) if wrong else one

    def costed(self, one: Finalist, *, always: bool = False, traces: bool = True) -> Finalist:
        """The same costed op by op, where its traces are there or may be made (`traces`); with a reason where it is not legal."""
        plan, one = one.plan, self.checked(one)
        if one.why:
            return one
        modes = self._modes(one)
        if self.exact is False or (not always and not self._soon(one, modes, traces)):
            return one
        self.progress(f"costing op by op: {explain.told(one.point.layout)}")
        try:
            cost = self._exactly(plan, modes)
        except UserError as error:
            return replace(one, why=error.problem)
        return self._with(one, cost)

    def _exactly(self, plan: Plan, modes: Sequence[str]) -> PlanCost:
        """Op by op, or as it was found before; with the notes of the traces that are then not read."""

        def made() -> Exact:
            cost = predict_plan(self.traces.of(plan, modes), plan, self.cluster, self.options)
            return Exact.of(cost, self.traces.notes)

        found: Exact = self.sheet(self.cluster).costs.of("plans", self._asked(plan), made)
        self.traces.notes.extend(note for note in found.told if note not in self.traces.notes)
        return found.cost(plan)

    def _asked(self, plan: Plan) -> object:
        """What the cost of a plan depends on, besides what all costs of a model on a cluster do."""
        how = self.options
        return replace(plan, predicted={}, notes=()), how.expandable, how.pace, how.filled

    def _with(self, one: Finalist, cost: PlanCost) -> Finalist:
        point = one.point
        if cost.time is not None:
            share = cost.time.step_seconds / point.seconds
            point = replace(
                point, seconds=cost.time.step_seconds, memory_bytes=cost.worst.memory.device_bytes,
                dollars=None if point.dollars is None else point.dollars * share,
                joules=cost.joules,
            )  # fmt: skip
        money = {f"{name}_per_step": value for name, value in (("dollars", point.dollars), ("joules", point.joules)) if value}
        return replace(one, point=point, cost=cost, plan=one.plan.with_(predicted={**cost.predicted(), **money}))

    @staticmethod
    def _modes(one: Finalist) -> list[str]:
        """Residencies whose traces a plan is costed from."""
        found = set(one.point.layout.modes) or {KEEP}
        return sorted(found if len(found) == 1 else {KEEP, *found})

    def prepare(self, finalists: Sequence[Finalist]) -> None:
        """Make what these are costed op by op from, all at once, where that is soon done."""
        soon = [one for one in finalists if not self.checked(one).why and self._soon(one, self._modes(one), True)]
        wanted = [(one.plan, mode) for one in soon if not self._known(one) for mode in self._modes(one)]
        with contextlib.suppress(UserError):  # it is said when one is costed
            self.traces.prepare(wanted)

    def _soon(self, one: Finalist, modes: Sequence[str], traces: bool) -> bool:
        """Whether replaying a plan takes a moment, and its traces are there, or are quickly made."""
        layout = one.point.layout
        if self._ops(layout) > EXACT_OPS:
            return False
        if self._known(one) or (traces and layout.mesh.tp * layout.mesh.cp * layout.mesh.ep == 1):
            return True
        return all(self.traces.at_hand(one.plan, mode) for mode in modes)

    def _known(self, one: Finalist) -> bool:
        return self.sheet(self.cluster).costs.knows("plans", self._asked(one.plan))

    def _ops(self, layout: Layout) -> int:
        """Ops of a step that are replayed one by one."""
        pieces = self.sheet(self.cluster).material
        ops = sum(
            (len(piece.forward) + len(piece.backward)) * (pieces.kinds.count(key) if isinstance(key, int) else 1)
            for key, piece in pieces.pieces.items()
        )
        return ops * (layout.accumulate if layout.mesh.pp > 1 else 2)

    # ------------------------------------------------------------------ unlike devices and links

    def polished(self, one: Finalist, until: float, *, first: bool = False) -> Finalist:
        """Where devices or links are unlike: with cuts a block further and ranks on other devices, as far as that gains.

        `until` is when only the first plan is placed still.
        """
        if not polish.matters(self.cluster, one.point.layout):
            return one
        layout = one.point.layout
        if self.cluster.groups and layout.mesh.pp > 1 and layout.interleave == 1:
            one = self._moved(one, until)
        return self._placed(one) if first or time.process_time() < until else one

    def _moved(self, one: Finalist, until: float) -> Finalist:
        """Cuts a block further: by the quick cost, then op by op where the plan was costed so."""
        pricer, sheet = self.pricer(self.cluster, held=Depth.SHORT), self.sheet(self.cluster)
        capacity = self.cluster.device.memory_bytes
        most = min(capacity * (1 - self.wishes.margin), pricer.limit(one.point.layout))
        roomy = most if one.point.tight else min(most, capacity * (1 - CLEAR))
        known: dict[Layout, Finalist] = {one.point.layout: one}

        def quickly(layout: Layout) -> float:
            seen = pricer.quick(layout)
            return seen.seconds if seen.fits and seen.memory_bytes <= roomy else float("inf")

        def exactly(layout: Layout) -> float:
            if layout not in known:
                known[layout] = self.costed(self.of_layout(layout))
            cost = known[layout].cost
            return cost.time.step_seconds if cost is not None and cost.time is not None and cost.fits else float("inf")

        busy, blocks = one.point.quick.stage_seconds, len(sheet.blocks)
        starts = [one.point.layout]
        if time.process_time() < until:
            even = fill(replace(one.point.layout, cuts=(), modes=(), placement=()), pricer, most, roomy)
            starts += [even.layout] if even is not None and even.fits else []
        best = polish.descended(min(starts, key=quickly), blocks, busy, quickly, until)
        if one.cost is None:
            moved = one if best == one.point.layout else self.of_layout(best)
            return moved if moved.point.quick.fits else one
        best = polish.descended(min([*starts, best], key=exactly), blocks, busy, exactly, time.process_time() + POLISH_SECONDS)
        return known[best]

    def of_layout(self, layout: Layout) -> Finalist:
        seen = self.pricer(self.cluster, held=Depth.WHOLE).quick(layout)
        return self.finalist(point_of(Filled(layout=layout, quick=seen), self.cluster, self.sheet(self.cluster).length or 1))

    def _placed(self, one: Finalist) -> Finalist:
        """On other devices, where the plan is predicted quicker there by the same kind of cost."""
        layout, sheet = one.point.layout, self.sheet(self.cluster)
        works = SheetPricer(sheet, self.cluster).works(layout)
        sent = polish.messages_of(one.cost) if one.cost is not None else polish.estimated(layout, works, sheet.kinds)
        order = polish.other_order(one.plan, self.cluster, sent, one.point.seconds)
        if order is None:
            return one
        other = self.of_layout(replace(layout, placement=order.order))
        other = self.costed(other, always=one.cost is not None) if one.cost is not None else self.checked(other)
        good = not other.why and (other.cost is None or other.cost.fits) and other.point.quick.fits
        if not good or other.point.seconds >= one.point.seconds * (1 - polish.GAIN):
            return one
        return replace(other, placed=replace(order, seconds=other.point.seconds))
