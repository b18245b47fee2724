"""What a search for room answers with, and the smallest number that will do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from foretell.plan.types import AWAY
from foretell.quantities import Infeasible
from foretell.search.solve.found import Candidate
from foretell.simulate.plan import PlanCost


@dataclass(frozen=True, kw_only=True)
class Tried(Candidate):
    """A plan with some of its tensors elsewhere, and what it costs."""

    cost: PlanCost
    moved_bytes: int = 0
    """Of states and weights that are not on the device, of one rank."""
    host_bytes: int = 0
    """Of host memory, of all ranks of a machine together."""
    over: str = ""
    """What other memory it needs more of than there is, or why it is not legal; the device's own memory is in the cost."""

    @property
    def fits(self) -> bool:
        return self.cost.fits and not self.over

    @property
    def moves(self) -> bool:
        return bool(self.moved_bytes) or any(one.mode in AWAY for one in self.plan.blocks.values())

    @property
    def short(self) -> int:
        return max(0, -self.cost.worst.memory.margin_bytes)


@dataclass(frozen=True, kw_only=True)
class Spilled:
    """The best plan, and those it was held against."""

    best: Tried | None
    resident: Tried | None = None
    """The best plan's batch and residency with everything on the device."""
    kept: Tried | None = None
    """The same with no block recomputed besides."""
    tried: tuple[Tried, ...] = ()
    nearest: Tried | None = None
    """Where nothing fits: the plan that comes nearest."""
    infeasible: Infeasible | None = None
    link_seconds: float | None = None
    """A step of the best plan keeps the link busy for so long."""
    link_rate: float | None = None
    """Bytes a second each way."""
    host: int | None = None
    costed: int = 0
    notes: tuple[str, ...] = ()


def fewest(most: int, fits: Callable[[int], bool], guess: int = 1) -> int | None:
    """The least number from 1 to `most` that fits, where more always fits if less does; None where `most` does not.

    Looks around the guess with growing steps, then halves what is left.
    """
    bad, good, at, step = 0, most + 1, min(max(guess, 1), most), 1
    while good - bad > 1:
        if fits(at):
            good = at
        else:
            bad = at
        if bad and good <= most:
            at = (bad + good) // 2
        else:
            at = min(bad + step, most) if bad else max(good - step, 1)
            step *= 2
    return good if good <= most else None
