"""Seconds and cores of the messages of one rank, by the ranks that share them: what stands in for other ranks asks here.

A process group knows its ranks and not its axis; here the group of ranks names the axis, and the axis the links, so that
a message takes exactly as long as the timeline of the plan says.
"""

from __future__ import annotations

from math import ceil

from foretell.hardware.types import Cluster
from foretell.lower.fsdp.sharded import DP_SHARD
from foretell.plan.mesh import OWN_RANKS, coordinates, rank_at
from foretell.plan.types import Mesh, Plan
from foretell.price.network.collectives import ALL_REDUCE, OPERATIONS, P2P, Fabric, among, collective
from foretell.price.network.overlap import CHANNELS
from foretell.price.speeds import BYTES_PER_SECOND, MESSAGE_SECONDS, fabrics_for

CHANNEL_BYTES = 512 * 2**10
"""Bytes below which NCCL adds no further channel. Assumed."""


class Messages:
    """What the messages of one rank of a plan take."""

    def __init__(self, plan: Plan, cluster: Cluster, rank: int) -> None:
        self.plan, self.cluster = plan, cluster
        self.on_cpu = cluster.device.backend == "cpu"
        self.fabrics: dict[str, Fabric] = {} if self.on_cpu else fabrics_for(plan, cluster)
        self.axes = axes_of(plan, rank)

    def seconds(self, operation: str, nbytes: int, ranks: tuple[int, ...]) -> float:
        """Of one message: the larger buffer of a collective, or what goes to one other rank."""
        if len(ranks) < 2 or nbytes <= 0:
            return 0.0
        if self.on_cpu:
            rate = BYTES_PER_SECOND.get("send" if operation == P2P else operation, min(BYTES_PER_SECOND.values()))
            return MESSAGE_SECONDS + nbytes / rate
        return collective(operation if operation in OPERATIONS else ALL_REDUCE, nbytes, self._fabric(ranks)).seconds

    def channels(self, nbytes: int) -> int:
        return max(1, min(CHANNELS, ceil(nbytes / CHANNEL_BYTES)))

    def axis(self, ranks: tuple[int, ...]) -> str:
        """The axis whose group of this rank these ranks are; empty where they are none."""
        return self.axes.get(tuple(sorted(ranks)), "")

    def _fabric(self, ranks: tuple[int, ...]) -> Fabric:
        found = self.fabrics.get(self.axis(ranks)) or self.fabrics.get(self.axis(ranks).partition(":")[0])
        return found or among(self.cluster, map(self.plan.device_of, ranks))


def axes_of(plan: Plan, rank: int) -> dict[tuple[int, ...], str]:
    """Ranks of every group that a rank is in → the name its links have among `fabrics_for`."""
    mesh = plan.mesh
    found = {tuple(range(mesh.world)): "world"}
    sharing = _along(mesh, rank, "dp_shard", "cp")
    fewer = 0 if isinstance(plan.reshard, bool) else plan.reshard
    if fewer > 1:
        place = sharing.index(rank) // fewer * fewer
        found[sharing[place : place + fewer]] = f"{DP_SHARD}:{fewer}"
    if mesh.ep > 1:
        alike = _along(mesh, rank, "dp_shard")
        place = alike.index(rank)
        start = place // mesh.ep * mesh.ep
        found[alike[place % mesh.ep :: mesh.ep]] = f"{DP_SHARD}:{mesh.dp_shard // mesh.ep}"
        found[alike[start : start + mesh.ep]] = "ep"
    for axis in OWN_RANKS:
        if getattr(mesh, axis) > 1:
            found[_along(mesh, rank, axis)] = axis
    if mesh.dp_shard > 1 or mesh.cp > 1:
        found.setdefault(sharing, DP_SHARD)
    return {ranks: axis for ranks, axis in found.items() if len(ranks) > 1}


def _along(mesh: Mesh, rank: int, *axes: str) -> tuple[int, ...]:
    """Ranks that differ from this one along these axes alone, in order."""
    places = [coordinates(mesh, rank)]
    for axis in (axis for axis in OWN_RANKS if axis in axes):
        places = [{**place, axis: index} for place in places for index in range(getattr(mesh, axis))]
    return tuple(sorted(rank_at(mesh, **place) for place in places))
