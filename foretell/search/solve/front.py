"""Which candidates are best: objectives, limits, and the front of those that no other beats in everything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from foretell.errors import UserError
from foretell.hardware import price_per_hour
from foretell.hardware.types import Cluster
from foretell.search.estimate.plan import Layout, Quick
from foretell.search.solve import engine
from foretell.search.space.constraints import SearchConstraints
from foretell.search.space.fill import Filled
from foretell.search.space.preferences import ALIKE, weighed
from foretell.simulate.memory.memory import TIGHT_SHARE

TIGHT = TIGHT_SHARE * 1.02
"""Share of the device below which what is left counts as tight: a little more than `simulate.memory.memory` says."""
MOST_POINTS = 12
"""Of a front that is shown."""
APART = 0.05
"""Share by which a shown point is better than every faster one in something."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A candidate that fits, and what it costs for each token (or sample)."""

    layout: Layout
    quick: Quick
    devices: int
    per_step: int
    """Tokens, or samples, of a step."""
    seconds: float
    """Of a step."""
    memory_bytes: int
    dollars: float | None
    """Of a step; None where no price is known."""
    joules: float | None
    capacity_bytes: int

    @property
    def per_second(self) -> float:
        return self.per_step / self.seconds

    @property
    def tight(self) -> bool:
        return self.capacity_bytes - self.memory_bytes < TIGHT * self.capacity_bytes

    def each(self) -> tuple[float, float, float, float]:
        """Seconds, bytes, dollars and joules, all but the bytes for each token; what is not known counts alike."""
        unit = self.per_step
        return self.seconds / unit, float(self.memory_bytes), (self.dollars or 0.0) / unit, (self.joules or 0.0) / unit


def point_of(filled: Filled, cluster: Cluster, tokens_per_sample: int) -> Point:
    """What a whole layout costs on a cluster."""
    layout, quick = filled.layout, filled.quick
    devices = layout.mesh.world
    price, _ = price_per_hour(cluster.device)
    return Point(
        layout=layout, quick=quick, devices=devices, per_step=layout.global_batch * tokens_per_sample,
        seconds=quick.seconds, memory_bytes=quick.memory_bytes, joules=quick.joules,
        dollars=None if price is None else quick.seconds * devices * price / 3600,
        capacity_bytes=cluster.device.memory_bytes,
    )  # fmt: skip


# ---------------------------------------------------------------------- objectives


def score(point: Point, wishes: SearchConstraints) -> tuple[float, float]:
    """What to make least: first the first, then the second."""
    unit = point.per_step
    seconds = point.seconds / unit if wishes.objective != "latency" else point.seconds
    seconds = weighed(seconds, batch=point.layout.global_batch if wishes.global_batch is None else 1, tight=point.tight)
    if wishes.objective == "smallest":
        return float(point.devices), seconds
    if wishes.objective == "cost":
        return _known(point.dollars, "price", wishes) / point.seconds * seconds, seconds
    if wishes.objective == "energy":
        return _known(point.joules, "power", wishes) / point.seconds * seconds, seconds
    return seconds, 0.0


def _known(value: float | None, what: str, wishes: SearchConstraints) -> float:
    if value is None:
        raise UserError(f"--objective {wishes.objective}: nothing is known of the device's {what}", "another objective")
    return value


def complaint(point: Point, wishes: SearchConstraints) -> str:
    """Which limit of a whole run a candidate does not keep; empty where it keeps all."""
    if wishes.tokens is None:
        return ""
    seconds = wishes.tokens / point.per_second
    limit = wishes.deadline_seconds
    if limit is not None and seconds > limit:
        return f"takes {seconds / 86400:,.1f} days, {seconds / limit - 1:.0%} more than allowed"
    if wishes.budget is not None:
        dollars = _known(point.dollars, "price", wishes) * wishes.tokens / point.per_step
        if dollars > wishes.budget:
            return f"costs ${dollars:,.0f}, {dollars / wishes.budget - 1:.0%} more than allowed"
    return ""


def best_of(points: Iterable[Point], wishes: SearchConstraints) -> Point | None:
    """The best by the objective; of those alike, the simplest."""
    kept = (point for point in points if not complaint(point, wishes))
    return engine.best_of(kept, lambda point: score(point, wishes), lambda point: effort(point.layout), ALIKE)


def effort(layout: Layout) -> tuple[Any, ...]:
    """How much there is to a plan: ranks and axes, compiling, recomputing, stages, accumulation."""
    mesh = layout.mesh
    axes = sum(degree > 1 for degree in (mesh.dp_replicate, mesh.dp_shard, mesh.tp, mesh.pp))
    more = (layout.compile != "none") + len(set(layout.modes) - {"keep"}) + (layout.reshard is not True) + (layout.interleave > 1)
    return mesh.world, axes + more, layout.interleave, layout.accumulate


# ---------------------------------------------------------------------- front


def pareto(points: Sequence[Point], values: Callable[[Point], tuple[float, ...]] = Point.each) -> list[Point]:
    """Points that no other equals or beats in everything, by rising first value."""
    ordered = sorted(points, key=values)
    front: list[tuple[tuple[float, ...], Point]] = []
    for point in ordered:
        mine = values(point)
        if not any(all(a <= b for a, b in zip(other, mine, strict=True)) for other, _ in front):
            front.append((mine, point))
    return [point for _, point in front]


def front(points: Sequence[Point], wishes: SearchConstraints, best: Point | None = None) -> tuple[Point, ...]:
    """The front that is shown: apart enough to be told from each other, `best` among them, fastest first."""
    fine = [point for point in points if not complaint(point, wishes)]
    shown: list[Point] = [best] if best is not None else []
    for point in pareto(fine):
        if not any(_hardly_worse(other, point) for other in shown):
            shown.append(point)
    if len(shown) > MOST_POINTS:
        rest = sorted(shown[1:], key=lambda p: p.each()[0])
        step = (len(rest) - 1) / (MOST_POINTS - 2)
        shown = [shown[0], *(rest[round(place * step)] for place in range(MOST_POINTS - 1))]
    return tuple(sorted(shown, key=lambda p: p.each()[0]))


def _hardly_worse(one: Point, than: Point) -> bool:
    """Whether a point is at most a little worse than another in everything."""
    return all(a <= b * (1 + APART) for a, b in zip(one.each(), than.each(), strict=True))
