"""The plan that another tool's file describes, costed op by op. What the file leaves open is tried: micro-batches are doubled until one does
not fit, then blocks are recomputed, selectively and whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from foretell.errors import UserError
from foretell.lower.blocks import blocks_of
from foretell.plan import legal
from foretell.plan.blocks import compress, expand
from foretell.plan.described import RESIDENCIES, DescribedLayout
from foretell.plan.precision import default
from foretell.plan.recipe import model_of
from foretell.plan.types import Plan, Residency
from foretell.search.solve import engine
from foretell.search.solve.choice import Choice, explained, told, why_slower
from foretell.search.solve.found import Candidate
from foretell.search.solve.question import Question
from foretell.search.solve.reasons import of_candidates
from foretell.search.space.layouts import micro_batches
from foretell.search.space.preferences import MOST_PLANS, WORTH
from foretell.simulate.plan import KEEP, predict_plan


@dataclass
class DescribedSearch(Question):
    """Plans that a file leaves open, one where it says all."""

    costed: int = 0
    found: list[Candidate] = field(default_factory=list)
    named: Mapping[str, Any] = field(default_factory=dict)
    blocks: tuple[str, ...] = ()

    @property
    def given(self) -> DescribedLayout:
        assert self.wishes.described is not None
        return self.wishes.described

    def answer(self, patience: float = float("inf")) -> Choice:
        ended = engine.search(self, patience=patience, most=MOST_PLANS)
        if ended == "interrupted" and not self.found:
            raise KeyboardInterrupt
        notes = (*self.traces.notes, *((f"the search was ended early: {ended}",) if ended else ()))
        fitting = sorted((one for one in self.found if one.fits), key=_speed, reverse=True)
        dropped = tuple(explained(one) for one in self.found if not one.fits)
        if not fitting:
            costs = [one.cost for one in self.found if one.cost is not None]
            nearest = max(costs, key=lambda cost: cost.worst.memory.margin_bytes, default=None)
            infeasible = nearest.infeasible(self.cluster.device.name) if nearest is not None else None
            return Choice(best=None, dropped=dropped, infeasible=infeasible, costed=self.costed, notes=notes, reasons=of_candidates(dropped))
        best, *others = fitting
        slower = tuple(replace(one, why=why_slower(best, one)) for one in others)
        return Choice(best=best, runners_up=slower, dropped=dropped, costed=self.costed, notes=notes)

    # ------------------------------------------------------------------ plans

    def base(self) -> Plan:
        """What all of them have in common."""
        given, wishes = self.given, self.wishes
        plan = Plan(
            model=model_of(self.source), hardware=self.hardware, mesh=given.mesh, precision=wishes.precision or default(self.cluster),
            optimizer=wishes.optimizer, clip=wishes.clip, state_format=wishes.coded, reshard=given.reshard, split=given.split(),
            compile=wishes.compile[0] if wishes.compile else "none", micro_batch=given.micro_batch or 1,
        )  # fmt: skip
        self.blocks = blocks_of(self.traces.of(plan, [KEEP])[KEEP])
        self.named = self.about(self.blocks)
        return plan.with_(model=self.named, pipeline=given.pipeline(self.blocks))

    def batches(self) -> list[tuple[int, int]]:
        given = self.given
        if given.micro_batch is not None and given.accumulate is not None:
            return [(given.micro_batch, given.accumulate)]
        wishes = replace(self.wishes, micro_batch=given.micro_batch, global_batch=given.global_batch)
        found = micro_batches(wishes, given.mesh)
        return found if given.accumulate is None else [(micro, given.accumulate) for micro, _ in found]

    def candidates(self) -> Iterator[Plan]:
        base = self.base()
        said = self.given.residency(self.blocks)
        ways = [said] if said is not None else [dict.fromkeys(self.blocks, Residency(mode=mode)) for mode in _TRIED]
        batches, at = self.batches(), 0
        if not batches:
            raise UserError(f"{self.given.global_batch} samples a step cannot be shared by {self.given.mesh.data} data ranks", "another batch")
        for way in ways:
            while at < len(batches):
                micro, rounds = batches[at]
                yield base.with_(micro_batch=micro, accumulate=rounds, blocks=compress(way))
                last = self.found[-1]
                if last.cost is None or (last.fits and self._past_the_best(last)):
                    return
                if not last.fits:
                    break
                at += 1
            if at == len(batches) or not self.blocks:
                return

    def _past_the_best(self, last: Candidate) -> bool:
        """Whether the last doubling of the micro-batch did not make the plan faster."""
        before = self.found[-2] if len(self.found) > 1 else None
        return before is not None and before.fits and before.plan.blocks == last.plan.blocks and _speed(last) < _speed(before) * (1 + WORTH)

    def hopeless(self, one: Plan) -> bool:
        return False

    def cost(self, one: Plan) -> None:
        wrong = legal.complaints(one, self.facts(self.blocks))
        if wrong:
            self.found.append(Candidate(plan=one, why=str(wrong[0])))
            return
        modes = {residency.mode for residency in expand(one.blocks, self.blocks).values()} or {KEEP}
        self.progress(f"costing plan {self.costed + 1}: {told(one)}")
        self.costed += 1
        cost = predict_plan(self.traces.of(one, sorted(modes if len(modes) == 1 else {KEEP, *modes})), one, self.cluster, self.options)
        self.found.append(Candidate(plan=one.with_(predicted=cost.predicted()), cost=cost))


_TRIED = tuple(RESIDENCIES[way] for way in ("none", "selective", "full"))


def _speed(one: Candidate) -> float:
    """Tokens or samples a second; where no speed is known, samples of a step."""
    assert one.cost is not None
    return one.cost.per_second or float(one.plan.global_batch)
