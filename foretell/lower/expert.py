"""Experts that are spread over data ranks: their weights are sharded among those ranks alone that hold the same ones.

The other weights are sharded over all of dp_shard. fully_shard makes of every stack of experts a unit of its own, inside
its block: it is gathered when the experts are called and reduced when their backward has ended. Rows go to the experts and
back as all-to-all messages, which are in the trace of a rank (`search.traces.split`).

Bytes and messages are those of a dry run to the byte (tests), but where blocks are computed again: there the bytes come
out up to 7 % too high, since a stack of experts is counted as whole from its second forward to its backward.
"""

from __future__ import annotations

from foretell.lower.fsdp.sharded import shard
from foretell.plan.types import Plan
from foretell.trace.types import Trace

EXPERTS = "experts"
"""In a trace's meta: modules that hold experts, of which the trace has this rank's."""


def experts_of(trace: Trace) -> list[str]:
    """Paths of modules that hold experts."""
    found = trace.meta.get(EXPERTS, [])
    assert isinstance(found, list)
    return found


def experts_sharded(trace: Trace, plan: Plan, reduce: str | None) -> Trace:
    """With what fully_shard does with the weights of experts."""
    mesh = plan.mesh
    again = plan.reshard if isinstance(plan.reshard, bool) else True
    return shard(
        trace, mesh.dp_shard // mesh.ep, replicate=mesh.dp_replicate, reshard=again, reduce=reduce, units=experts_of(trace)
    )
