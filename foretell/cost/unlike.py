"""A cluster of unlike devices as one rank sees it.

Ranks of one pipeline stage wait for each other in every block: the slowest of their devices counts for time, the
smallest for memory. Without a pipeline that is said of all ranks.
"""

from __future__ import annotations

from dataclasses import replace

from foretell.hardware.types import Cluster, Device
from foretell.plan.mesh import coordinates
from foretell.plan.types import Plan


def slowest_seen(plan: Plan, cluster: Cluster, stage: int | None = None) -> Cluster:
    """The cluster with the device that decides the seconds of a place of the pipeline (None: of all ranks)."""
    return _with(cluster, min(_devices(plan, cluster, stage), key=lambda device: device.peak("bfloat16")))


def smallest_seen(plan: Plan, cluster: Cluster, stage: int | None = None) -> Cluster:
    """The same with the device that decides whether it fits."""
    return _with(cluster, min(_devices(plan, cluster, stage), key=lambda device: device.memory_bytes))


def _with(cluster: Cluster, device: Device) -> Cluster:
    return replace(cluster, device=device) if cluster.groups else cluster


def _devices(plan: Plan, cluster: Cluster, stage: int | None) -> list[Device]:
    if not cluster.groups or plan.mesh.world > cluster.count:
        return [cluster.device]
    ranks = [rank for rank in range(plan.mesh.world) if stage is None or coordinates(plan.mesh, rank)["pp"] == stage]
    return [cluster.part_of(plan.device_of(rank)).device for rank in ranks]
