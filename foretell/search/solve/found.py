"""What a search found: plain data."""

from __future__ import annotations

from dataclasses import dataclass

from foretell.plan.types import Plan
from foretell.quantities import FITS, TIGHT, Infeasible
from foretell.search.advice.relax import Relaxation, alternatives, needs
from foretell.search.heterogeneous.polish import Placed
from foretell.search.solve import explain
from foretell.search.solve.front import Point
from foretell.search.solve.planned_batch import BatchAdvice
from foretell.simulate.plan import PlanCost


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan that was considered."""

    plan: Plan
    cost: PlanCost | None = None
    """None where it is not legal or was ruled out before."""
    why: str = ""
    """Why it is not the best."""

    @property
    def fits(self) -> bool:
        if self.cost is None:
            return self.plan.predicted.get("verdict") in (FITS, TIGHT)
        return self.cost.fits


@dataclass(frozen=True, kw_only=True)
class Finalist(Candidate):
    """One of a search by quick costs, considered to the end; its cost is None where it was not costed op by op."""

    point: Point
    placed: Placed | None = None
    """Where ranks are on other devices than those of their numbers, and what that gains."""

    @property
    def verdict(self) -> str:
        return self.cost.verdict if self.cost is not None else TIGHT if self.point.tight else FITS


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why plans were ruled out, and how many."""

    count: int
    why: str
    """Goes on after the count: `do not fit (the smallest needs 18.2 GiB of 14.6 GiB)`."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The best plan, those that lost, and the front."""

    best: Finalist | None
    runners_up: tuple[Finalist, ...] = ()
    dropped: tuple[Finalist, ...] = ()
    """That were expected to fit and do not when costed exactly."""
    front: tuple[Finalist, ...] = ()
    """Plans that no other beats in time, memory, money and energy together; the fastest first."""
    binds: tuple[str, ...] = ()
    what_if: tuple[explain.WhatIf, ...] = ()
    fewer: tuple[int, int] | None = None
    """The next smaller number of devices that was tried, and the bytes that each of them lacks."""
    nearest: Finalist | None = None
    """Where nothing fits: the plan that comes nearest."""
    short_bytes: int = 0
    """That it lacks on each device."""
    infeasible: Infeasible | None = None
    """Who holds the bytes of that plan, where it was costed op by op."""
    relaxations: tuple[Relaxation, ...] = ()
    tried: int = 0
    """Changes that were searched for to find those."""
    unmet: str = ""
    """A limit of the whole run that no plan keeps."""
    reasons: tuple[Reason, ...] = ()
    """Where there is no plan: why not, by count."""
    costed: int = 0
    there: int = 0
    seconds: float = 0.0
    stopped: str = ""
    law: BatchAdvice | None = None
    """What the Step Law says of the run, where its tokens are known."""
    notes: tuple[str, ...] = ()

    @property
    def needs(self) -> str:
        """What would have to change, in one line."""
        if self.unmet:
            return f"{self.unmet}" + (f"; possible: {alternatives(self.relaxations)}" if self.relaxations else "")
        return needs(self.short_bytes, self.relaxations, self.tried)
