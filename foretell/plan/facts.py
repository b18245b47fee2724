"""What is known of a model, its hardware and its run when a plan is checked, and how a complaint about the plan is worded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from foretell.plan.precision import formats
from foretell.plan.recipe import known_blocks
from foretell.plan.types import Plan

if TYPE_CHECKING:
    from foretell.hardware import Cluster

_COMPILED = (7, 0)
"""The first CUDA devices that torch.compile, that is Triton, makes code for."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of the model, the hardware and the run; None = not known, and then not complained of."""

    blocks: tuple[str, ...] | None = None
    """Paths in the order they run."""
    heads: int | None = None
    """Attention heads; of several kinds, the greatest common divisor of their counts."""
    kv_heads: int | None = None
    """Heads of keys and values."""
    tied: tuple[tuple[str, ...], ...] | None = None
    """Parameters that are one tensor under several names, or that several modules use: paths, group by group."""
    seq: int | None = None
    """Tokens of a sample, as the blocks see them."""
    devices: int | None = None
    devices_per_node: int | None = None
    dtypes: frozenset[str] | None = None
    """Number formats the device computes in."""
    too_old: bool = False
    """Whether torch.compile has no code for the device."""
    world: int | None = None
    """Processes that were started."""
    global_batch: int | None = None
    """Samples of one optimizer step that were asked for."""
    cluster: Cluster | None = None
    """Where groups of unlike devices stand side by side."""


@dataclass(frozen=True, kw_only=True)
class Complaint:
    """One thing a plan says and must not."""

    field: str
    """Where in the plan, such as `mesh.tp`."""
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}; try: {self.remedy}"


def facts_of(plan: Plan, cluster: Cluster | None = None) -> Facts:
    """What a plan itself says of its model, and what is known of its hardware."""
    seq = plan.model.get("seq")
    found = Facts(blocks=known_blocks(plan), seq=seq if isinstance(seq, int) else None)
    return found if cluster is None else with_hardware(found, cluster)


def with_hardware(facts: Facts, cluster: Cluster) -> Facts:
    """The same with what is known of a cluster. Ranks may share a CPU, which computes in every format."""
    facts, dtypes = replace(facts, cluster=cluster if cluster.groups else None), formats(cluster)
    if dtypes is None:
        return facts
    return replace(
        facts, devices=cluster.count, devices_per_node=cluster.devices_per_node, dtypes=dtypes, too_old=too_old_to_compile(cluster)
    )


def too_old_to_compile(cluster: Cluster) -> bool:
    """Whether torch.compile has no code for some device."""
    return any((device.compute_capability or _COMPILED) < _COMPILED for device in cluster.devices)
