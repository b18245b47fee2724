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


def slowest_at(plan: Plan, cluster: Cluster) -> tuple[Device, ...]:
    """The device that decides the seconds of each place of the pipeline."""
    return tuple(min(devices, key=lambda device: device.peak("bfloat16")) for devices in _places(plan, cluster))


def smallest_at(plan: Plan, cluster: Cluster) -> tuple[Device, ...]:
    """The device that decides whether each place of the pipeline fits."""
    return tuple(min(devices, key=lambda device: device.memory_bytes) for devices in _places(plan, cluster))


def _places(plan: Plan, cluster: Cluster) -> list[list[Device]]:
    """Devices of each place of the pipeline."""
    if not cluster.groups or plan.mesh.world > cluster.count:
        return [[cluster.device]] * plan.mesh.pp
    found: list[list[Device]] = [[] for _ in range(plan.mesh.pp)]
    for rank in range(plan.mesh.world):
        found[coordinates(plan.mesh, rank)["pp"]].append(cluster.part_of(plan.device_of(rank)).device)
    return found


def _with(cluster: Cluster, device: Device) -> Cluster:
    return replace(cluster, device=device) if cluster.groups else cluster


def _devices(plan: Plan, cluster: Cluster, stage: int | None) -> list[Device]:
    if not cluster.groups or plan.mesh.world > cluster.count:
        return [cluster.device]
    ranks = [rank for rank in range(plan.mesh.world) if stage is None or coordinates(plan.mesh, rank)["pp"] == stage]
    return [cluster.part_of(plan.device_of(rank)).device for rank in ranks]
