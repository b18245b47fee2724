"""The best layout of a server for a load and its limits.

    meshes × formats       space.meshes, space.formats
      ▼ pages, steady state  space.candidate       as many pages as fit, replayed; tokens a second by the sizes of steps
      ▼ the most promising   simulated             the load itself, request by request; and the highest rate inside the limits
      ▼ limits of the best   refined               running, tokens a step and page doubled and halved, as long as that helps
      ▼ front, what-if       front, what_if        what no other beats; the next change that would help
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from foretell.hardware.prices import price_per_hour
from foretell.plan.types import ServeLayout
from foretell.search.serving.space import (
    Ruled,
    ServeCandidate,
    ServeQuestion,
    candidate,
    formats,
    meshes,
    order,
    quickest,
    steady,
    weights_share,
)
from foretell.simulate.serving.layout import LayoutCosts, LayoutShares
from foretell.simulate.serving.pages import Pages
from foretell.simulate.serving.records import INSIDE, Limit, Served
from foretell.simulate.serving.run import capacity, simulated
from foretell.simulate.serving.scheduler import Scheduler, StepLimits

FINALISTS = 5
WINDOW = 90.0
"""Seconds of arrivals that layouts are compared by."""
ROUNDS = 2
"""Of changes to the limits of the best."""


@dataclass(frozen=True, kw_only=True)
class ServePoint:
    """A layout under the load."""

    layout: ServeLayout
    served: Served = field(repr=False)
    """Of one replica."""
    inside: float
    """Share of requests that keep the limits."""
    capacity: float | None
    """Requests a second of all replicas inside the limits; None: users, who wait."""
    ttft: float
    """Seconds, p95."""
    tpot: float
    output_rate: float
    """Tokens a second of all replicas, at the load."""
    dollars_per_million: float | None

    @property
    def keeps(self) -> bool:
        return self.inside >= INSIDE and not self.served.gave_up

    @property
    def best_rate(self) -> float:
        return self.capacity if self.capacity is not None else self.output_rate


@dataclass(frozen=True, kw_only=True)
class ServeChange:
    """Something else, and what it would give."""

    change: str
    rate: float | None
    """Requests a second inside the limits; tokens a second where users wait."""
    keeps: bool
    command: str = ""


@dataclass
class ServeFound:
    """What a search found."""

    question: ServeQuestion
    points: list[ServePoint]
    """Simulated, the best first."""
    costs: dict[ServeLayout, LayoutCosts]
    looked: list[ServeCandidate]
    ruled: list[Ruled]
    what_if: list[ServeChange] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def best(self) -> ServePoint | None:
        return self.points[0] if self.points and self.points[0].keeps else None

    @property
    def nearest(self) -> ServePoint | None:
        return self.points[0] if self.points else None


def find(question: ServeQuestion) -> ServeFound:
    """Search; the best first, whether or not it keeps the limits."""
    begun = time.monotonic()
    looked, ruled = _looked(question, LayoutShares({}, {}), begun)
    ranked = order(question, looked)
    points: list[ServePoint] = []
    costs: dict[ServeLayout, LayoutCosts] = {}
    for one in _varied(ranked)[:FINALISTS]:
        known = max((point.capacity or 0.0 for point in points if point.keeps), default=0.0)
        if question.goal == "throughput" and known and one.rate < known:
            continue  # its steady state is above what it reaches with requests that come as they like
        points.append(_simulated(question, one.layout, one.costs, guess=one.rate * 0.7))
        costs[one.layout] = one.costs
        if time.monotonic() - begun > question.patience:
            break
    points.sort(key=lambda one: _rank(question, one))
    if points:
        points = _refined(question, points, costs, begun)
    found = ServeFound(question, points, costs, looked, ruled)
    found.seconds = time.monotonic() - begun
    return found


def _looked(question: ServeQuestion, shares: LayoutShares, begun: float) -> tuple[list[ServeCandidate], list[Ruled]]:
    looked: list[ServeCandidate] = []
    ruled: list[Ruled] = []
    known: dict[tuple[object, ...], ServeCandidate | Ruled] = {}
    for (replicas, tp, pp), (weights, kv) in ((mesh, pair) for pair in formats(question) for mesh in meshes(question)):
        layout = ServeLayout(replicas=replicas, tp=tp, pp=pp, weights=weights, kv=kv, graphs=question.graphs, invariant=question.invariant)
        capacity_bytes = question.cluster.device.memory_bytes
        if weights_share(question.trace, layout) > capacity_bytes:
            ruled.append(Ruled(layout=layout, why="its weights alone are larger than a device"))
            continue
        limit = question.limit.tpot
        if limit is not None and looked and quickest(question, layout) > limit:
            ruled.append(Ruled(layout=layout, why=f"reading its weights alone takes {quickest(question, layout):.3g} s a token"))
            continue
        if looked and time.monotonic() - begun > question.patience:
            ruled.append(Ruled(layout=layout, why="there was no time to look at it"))
            continue
        key = (tp, pp, weights, kv)
        if key not in known:
            costs = LayoutCosts(question.trace, question.recipe, question.cluster, question.options, replace(layout, replicas=1), shares=shares)
            known[key] = candidate(question, layout, costs)
        one = known[key]
        if isinstance(one, ServeCandidate):
            other = ServeCandidate(replace(one.layout, replicas=replicas), one.costs)
            steady(question, other)
            looked.append(other)
        else:
            ruled.append(replace(one, layout=replace(one.layout, replicas=replicas)))
    return looked, ruled


def _varied(ranked: Sequence[ServeCandidate]) -> list[ServeCandidate]:
    """The first, and of those after it not more than two of one kind of ranks."""
    found: list[ServeCandidate] = []
    for one in ranked:
        if sum((other.layout.tp, other.layout.pp) == (one.layout.tp, one.layout.pp) for other in found) < 2:
            found.append(one)
    return found


def scheduler_of(layout: ServeLayout) -> Scheduler:
    tokens = max(layout.tokens, layout.running)
    return Scheduler(Pages(layout.pages, layout.page), StepLimits(running=layout.running, tokens=tokens, invariant=layout.invariant))


def _simulated(question: ServeQuestion, layout: ServeLayout, costs: LayoutCosts, *, guess: float | None = None, whole: bool = False) -> ServePoint:
    """The load on one replica, and the highest rate inside the limits."""
    load = question.load.shared(layout.replicas)
    load = load if layout.share else replace(load, prefix=0)
    seconds = load.seconds if whole else min(load.seconds, WINDOW)
    served = simulated(load, scheduler_of(layout), costs.seconds, seconds, most_waiting=4 * layout.running + 2000)
    limited = question.limit != Limit() and not load.users and load.kind != "all"
    near = guess / layout.replicas if guess else None
    limited = limited and not whole
    found = capacity(load, lambda: scheduler_of(layout), costs.seconds, question.limit, min(seconds, WINDOW), near) if limited else None
    price, _ = price_per_hour(question.cluster.device)
    rate = served.output_rate * layout.replicas
    return ServePoint(
        layout=layout, served=served, inside=served.inside(question.limit) if served.answers else 0.0,
        capacity=(found[0] * layout.replicas if found is not None else 0.0) if limited else None,
        ttft=served.ttft(0.95), tpot=served.tpot(0.95), output_rate=rate,
        dollars_per_million=None if price is None or not rate else price * layout.devices / 3600 / rate * 1e6,
    )  # fmt: skip


def _rank(question: ServeQuestion, one: ServePoint) -> tuple[float, ...]:
    """Smaller is better; what keeps the limits comes first, then what is nearest to them."""
    if not one.keeps:
        return 1.0, -one.inside, one.ttft, one.tpot
    money = one.dollars_per_million if one.dollars_per_million is not None else float(one.layout.devices)
    goal = {
        "throughput": (-one.best_rate, float(one.layout.devices), one.tpot, one.ttft), "latency": (one.tpot, one.ttft), "cost": (money, one.tpot),
        "devices": (float(one.layout.devices), -one.best_rate),
    }  # fmt: skip
    return (0.0, *goal[question.goal])


def _refined(question: ServeQuestion, points: list[ServePoint], costs: dict[ServeLayout, LayoutCosts], begun: float) -> list[ServePoint]:
    """The best with other limits, as long as one of them is better; then its whole load."""
    tried = {one.layout for one in points}
    for _ in range(ROUNDS):
        best = points[0]
        for layout in _neighbours(question, best.layout):
            if layout in tried or time.monotonic() - begun > question.patience:
                continue
            tried.add(layout)
            other = _with_limits(costs[best.layout], layout)
            if other is None:
                continue
            costs[other.layout] = other
            points.append(_simulated(question, other.layout, other, guess=best.capacity))
        points.sort(key=lambda one: _rank(question, one))
        if points[0] is best:
            break
    best = points[0]
    if question.load.seconds > WINDOW:
        points[0] = replace(_simulated(question, best.layout, costs[best.layout], whole=True), capacity=best.capacity)
    return points


def _neighbours(question: ServeQuestion, layout: ServeLayout) -> list[ServeLayout]:
    found = [replace(layout, running=one, pages=0) for one in (layout.running * 2, layout.running // 2) if 1 <= one <= min(1024, layout.tokens)]
    found += [replace(layout, tokens=one, pages=0) for one in (layout.tokens // 4, layout.tokens // 2, layout.tokens * 2) if one >= layout.running]
    found.append(replace(layout, page=32, pages=0))
    return [one for one in found if all(getattr(one, name) == getattr(layout, name) for name in question.fixed)]


def _with_limits(costs: LayoutCosts, layout: ServeLayout) -> LayoutCosts | None:
    """The same prices with other limits, and the pages that these leave; None where they leave none."""
    other = costs.limited(layout)
    pages = other.about_most_pages()
    if pages < 1:
        return None
    other.layout = replace(other.layout, pages=pages)
    return other


def front(found: ServeFound) -> list[ServePoint]:
    """Points that no other beats in rate, seconds a token, seconds to the first and devices together."""

    def figures(one: ServePoint) -> tuple[float, ...]:
        return -round(one.best_rate, 3), round(one.tpot, 5), round(one.ttft, 4), one.layout.devices

    def beaten(one: ServePoint) -> bool:
        mine = figures(one)
        return any(other is not one and figures(other) != mine and all(a <= b for a, b in zip(figures(other), mine, strict=True))
                   for other in found.points)  # fmt: skip

    seen: set[tuple[float, ...]] = set()
    kept = []
    for one in found.points:
        if not beaten(one) and figures(one) not in seen:
            seen.add(figures(one))
            kept.append(one)
    return kept


def what_if(question: ServeQuestion, found: ServeFound, others: Sequence[tuple[str, ServeQuestion]], seconds: float) -> list[ServeChange]:
    """What other questions would give: by the steady states, as much more or less than that of the best as was simulated. None is begun
    after so many seconds."""
    shown, begun = found.nearest, time.monotonic()
    known = None if shown is None else next((one for one in found.looked if _alike(one.layout, shown.layout)), None)
    changes = []
    for name, other in others:
        if time.monotonic() - begun > seconds:
            break
        looked, _ = _looked(other, LayoutShares({}, {}), begun)
        ranked = order(other, looked)
        if not ranked:
            changes.append(ServeChange(change=name, rate=None, keeps=False))
        elif known is None or shown is None or not known.rate or not shown.best_rate:
            one = _simulated(other, ranked[0].layout, ranked[0].costs, guess=ranked[0].rate * 0.7)
            changes.append(ServeChange(change=name, rate=one.best_rate, keeps=one.keeps))
        else:
            rate = shown.best_rate * ranked[0].rate / known.rate
            changes.append(ServeChange(change=name, rate=rate, keeps=rate >= question.load.rate))
    return changes


def _alike(one: ServeLayout, other: ServeLayout) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in ("replicas", "tp", "pp", "weights", "kv"))
