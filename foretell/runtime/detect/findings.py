"""What was found, as lines for people and rows of a log. Pure.

    slow rank 2 (node7, cuda:3): it works 4.1 ms of a 20.5 ms step longer than the others, who wait (steps 26 to 100): 20 % of the
    time, 4.8 h of every 24 h on 4 ranks
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from foretell.runtime.detect.links import FABRIC, LINK, NETWORK, RECEIVER, SENDER, MatrixReading, SlowLink
from foretell.runtime.detect.slow import SLOW, SlowRank
from foretell.units import relative_error, signed_percent

SLOW_LINK, SLOW_STEP, ODD_REPLICA = "slow link", "slower than predicted", "different replica"
_DAY_HOURS = 24.0
_MOST = 0.5
"""Share of what a slow rank costs from which on its cause is told as the cause."""


@dataclass(frozen=True, kw_only=True)
class RankFinding:
    """One thing that was found while a run went."""

    kind: str
    step: int
    text: str
    """A line for the screen."""
    ranks: tuple[int, ...] = ()
    cost: float = 0.0
    """Share of all time that it costs."""

    def to_json(self) -> dict[str, Any]:
        return {"event": "finding", **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Of the run that things are found in."""

    world: int
    places: Mapping[int, str]
    """Rank → host and device."""
    price_per_hour: float | None = None
    """Of one device, in US dollars."""
    several: bool = True
    """Whether places tell ranks apart: several hosts, or devices."""

    def rank(self, rank: int) -> str:
        place = self.places.get(rank, "") if self.several else ""
        return f"rank {rank}" + (f" ({place})" if place else "")

    def a_day(self, share: float) -> str:
        """What that share of the time costs."""
        hours = share * _DAY_HOURS
        money = f", ${hours * self.world * self.price_per_hour:,.0f} a day" if self.price_per_hour else ""
        return f"{100 * share:.0f} % of the time, {hours:.1f} h of every 24 h on {self.world} ranks{money}"


def of_rank(found: SlowRank, facts: RunFacts) -> RankFinding:
    """A rank that is slow."""
    who, steps = facts.rank(found.rank), f"steps {found.first_step} to {found.last_step}"
    whole, more = seconds(found.step_seconds), seconds(found.seconds)
    if found.kind == SLOW:
        how = f"it works {more} of a {whole} step longer than the others, who wait for it ({steps})"
    else:
        each = seconds(found.seconds / found.share) if found.share else more
        how = f"in {100 * found.share:.0f} % of its steps it works {each} longer than the others, who wait for it ({steps}, of {whole})"
    causes = []
    if found.data_seconds > _MOST * found.seconds:
        causes.append("it waits for its next samples")
    if found.delayed_seconds > _MOST * found.seconds:
        causes.append(f"besides, it waits {seconds(found.delayed_seconds)} a step for a core")
    told = "".join(f"; {cause}" for cause in causes)
    return RankFinding(kind=found.kind, step=found.last_step, ranks=(found.rank,), cost=found.cost,
                   text=f"{found.kind}: {who}: {how}{told}; it costs {facts.a_day(found.cost)}")  # fmt: skip


def of_link(found: SlowLink, facts: RunFacts) -> RankFinding:
    """Transfers that have become slow."""
    ratio = found.seconds / found.before_seconds if found.before_seconds > 0 else float("inf")
    text = (
        f"{SLOW_LINK}: no rank is late, and {found.kind.words()} takes {seconds(found.seconds)}, "
        f"{ratio:.1f} times as long as at the beginning ({seconds(found.before_seconds)}); it costs {facts.a_day(found.cost)}"
    )
    return RankFinding(kind=SLOW_LINK, step=found.last_step, cost=found.cost, text=text)


def of_prediction(measured: float, predicted: float, high: float, step: int, facts: RunFacts) -> RankFinding:
    """Steps that take longer than the prediction's range allows."""
    error = relative_error(predicted, measured)
    said = f" ({signed_percent(error)})" if error is not None else ""
    text = (
        f"{SLOW_STEP}: a step takes {seconds(measured)}, and {seconds(predicted)}{said} was predicted, {seconds(high)} at most; "
        f"the rest costs {facts.a_day((measured - high) / measured)}"
    )
    return RankFinding(kind=SLOW_STEP, step=step, cost=(measured - high) / measured, text=text)


def probed(found: MatrixReading) -> str:
    """`probed: from rank 0 to rank 2, 4.1 times as long as at the beginning`."""
    where = {
        LINK: "from rank {} to rank {}", SENDER: "whatever rank {} sends", RECEIVER: "whatever rank {} receives",
        NETWORK: "whatever rank {} sends and receives", FABRIC: "between all ranks",
    }  # fmt: skip
    if not found.kind:
        return "probed: no message between two ranks takes longer than at the beginning"
    return f"probed: {where[found.kind].format(*found.ranks)}, {found.ratio:.1f} times as long as at the beginning"


def seconds(value: float) -> str:
    """`4.1 ms`."""
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.1f} ms" if value >= 1e-3 else f"{1e6 * value:.0f} µs"
