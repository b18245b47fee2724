"""Last changes to a plan that was found, where devices or links are unlike: cuts a block further, ranks on other devices.

    cuts       one block to the left or right, the stages that take longest first, as long as that is quicker
    placement  `place.place_plan` with the messages of the plan; taken only where the whole plan is then predicted quicker

`place` knows messages alone. That a device is slow, and what compute hides, is known to the cost of the plan: it decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from foretell.hardware.types import Cluster
from foretell.lower.fsdp.units import FsdpSharding, Storages, units_of
from foretell.plan.precision import MIXED
from foretell.plan.types import Plan
from foretell.price.network.collectives import ALL_GATHER, ALL_REDUCE, P2P, REDUCE_SCATTER
from foretell.search.block_costs.sheet import Works
from foretell.search.estimate.depth import name_of
from foretell.search.estimate.plan import Layout
from foretell.search.estimate.short import Item
from foretell.search.heterogeneous.place import Traffic, place_plan, traffic_of
from foretell.simulate.plan import PlanCost

GAIN = 0.002
"""Share of a step that another order of devices must gain: less is not worth a plan that says so."""
TALKS = 4
"""Messages over tp, and over cp, that every block sends and again in backward: assumed where no trace was split."""


# ---------------------------------------------------------------------- cuts


def nearby(layout: Layout, blocks: int, busy: Sequence[float]) -> Iterator[Layout]:
    """Layouts with one cut moved by one block, between stages that differ most in seconds first, towards the quicker."""
    edges = (0, *layout.cuts, blocks)
    ordered = sorted(range(1, len(edges) - 1), key=lambda cut: -abs(busy[cut - 1] - busy[cut]))
    for better in (True, False):
        for cut in ordered:
            step = -1 if (busy[cut - 1] > busy[cut]) == better else 1
            moved = edges[cut] + step
            if edges[cut - 1] < moved < edges[cut + 1]:
                yield replace(layout, cuts=(*edges[1:cut], moved, *edges[cut + 1 : -1]))


def descended(
    start: Layout, blocks: int, busy: Sequence[float], seconds: Callable[[Layout], float], until: float
) -> Layout:
    """The layout after as many moves of cuts as make it quicker; infinite seconds are what does not fit.

    `until` is when to end, as `time.process_time` has it.
    """
    best, least = start, seconds(start)
    moved = True
    while moved:
        moved = False
        for layout in nearby(best, blocks, busy):
            if time.process_time() > until:
                return best
            now = seconds(layout)
            if now < least:
                best, least, moved = layout, now, True
                break
    return best


# ---------------------------------------------------------------------- placement


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Another order of devices, and what the plan gains by it."""

    order: tuple[int, ...]
    how: str
    """exact or searched, as `place` says."""
    seconds_before: float
    """Of a step, with every rank on the device of its number."""
    seconds: float = 0.0

    @property
    def gain(self) -> float:
        return 1 - self.seconds / self.seconds_before

    def words(self) -> str:
        best = "the best of all orders for its messages" if self.how == "exact" else "an order that was searched for"
        return (
            f"ranks are placed on devices by the rates of their links: a step takes {self.seconds:.4g} s instead of "
            f"{self.seconds_before:.4g} s ({self.gain:.1%} less); {best}"
        )

    def to_json(self) -> dict[str, object]:
        return {"order": list(self.order), "how": self.how, "seconds": self.seconds, "seconds_before": self.seconds_before}


def matters(cluster: Cluster, layout: Layout) -> bool:
    """Whether an order of devices can make a difference: never where all nodes and links are alike."""
    return bool(cluster.groups or cluster.matrix is not None) and layout.mesh.world == cluster.count > 1


def other_order(plan: Plan, cluster: Cluster, messages: Sequence[Traffic], seconds: float) -> Placed | None:
    """An order with less time in messages than the plan's; None where there is none."""
    _, found = place_plan(plan.with_(placement=()), cluster, messages)
    if not found.changes or found.order == (plan.placement or tuple(range(plan.mesh.world))):
        return None
    return Placed(order=found.order, how=found.how, seconds_before=seconds)


def messages_of(cost: PlanCost) -> tuple[Traffic, ...]:
    """Of the rank of the pipeline that sends most."""
    each = [traffic_of(rank.collectives) for rank in cost.ranks]
    return max(each, key=lambda found: sum(one.nbytes * one.times for one in found))


def estimated(layout: Layout, works: Works, kinds: Sequence[int]) -> tuple[Traffic, ...]:
    """The same where a plan was not costed op by op: from the bytes of its blocks, shared evenly by the stages."""
    mesh, micro = layout.mesh, layout.accumulate
    data = mesh.data * mesh.cp > 1
    units = _units(layout, works, kinds) if data else []
    here, whole = len(kinds) / mesh.pp, float(works.boundary * mesh.tp)
    found = [Traffic(axis=axis, operation=ALL_GATHER, nbytes=whole, times=2 * TALKS * here * micro) for axis in ("tp", "cp")]
    found.append(Traffic(axis="pp", operation=P2P, nbytes=whole, times=2.0 * micro))
    if data and units:
        gathers = micro * (1 if layout.reshard is False else 2)
        sums = micro if mesh.pp == 1 else 1
        gathered, reduced, summed = (sum(sizes) / len(units) for sizes in zip(*units, strict=True))
        found.append(Traffic(axis="dp_shard", operation=ALL_GATHER, nbytes=gathered, times=gathers * here))
        found.append(Traffic(axis="dp_shard", operation=REDUCE_SCATTER, nbytes=reduced, times=sums * here))
        found.append(Traffic(axis="dp_replicate", operation=ALL_REDUCE, nbytes=summed, times=here))
    return tuple(found)


def _units(layout: Layout, works: Works, kinds: Sequence[int]) -> list[tuple[int, int, int]]:
    """Bytes that each block gathers, scatters, and sums over replicas."""
    mesh = layout.mesh
    way = FsdpSharding(
        ranks=mesh.dp_shard * mesh.cp, replicate=mesh.dp_replicate, wide=works.material.wide,
        reduce="float32" if layout.precision in MIXED else None,
    )  # fmt: skip
    found: dict[int, tuple[int, int, int]] = {}
    for kind in dict.fromkeys(kinds):
        trace = works.stack([Item(kind, "keep", name_of(0))])
        storages = Storages(trace.storages)
        unit = units_of(trace, way, storages)[name_of(0)]
        gathered, reduced, summed = (storages.all[n].nbytes for n in (unit.gather_output, unit.reduce_input, unit.partial))
        found[kind] = gathered, reduced, summed
    return [found[kind] for kind in kinds]
