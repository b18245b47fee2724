"""How many ranks may share positions or experts, where that is worth looking at.

Ranks that share positions attend to the whole sample each, and gather its keys and values: with short samples and a batch
that fills the ranks they cannot win. They are tried where samples are long, where a step has too few samples for the
devices even if as many tensor ranks as the model allows work on each, where nothing fits otherwise, and where they are
asked for.
"""

from __future__ import annotations

from collections.abc import Callable

from foretell.errors import UserError
from foretell.hardware.types import Cluster
from foretell.search.block_costs.sheet import Sheet
from foretell.search.space.constraints import SearchConstraints
from foretell.search.space.layouts import divisors
from foretell.search.traces.shares import Shares

LONG = 16_384
"""Positions of a sample from which on sharing them is tried in any case."""
PART = 4_096
"""Positions that each rank has at least then."""
LEAST = 128
"""And in any case."""
CONTEXT = (2, 4, 8, 16, 32, 64)


def context_degrees(
    sheet: Sheet, cluster: Cluster, wishes: SearchConstraints, shares: Callable[[], Shares], tensor: int = 1, *, hard: bool = False
) -> tuple[int, ...]:
    """Ranks that may share a sample, where up to `tensor` may split its layers; `hard`: nothing fits without.

    A UserError where it is asked for and cannot be."""
    given = wishes.fixed.get("cp")
    if given is not None and given > 1:
        return _asked(given, cluster, shares())
    length = sheet.length or 0
    if given == 1 or cluster.count == 1 or cluster.groups or wishes.meshes or length < 2 * LEAST:
        return (1,)
    few = wishes.global_batch is not None and wishes.global_batch * tensor < cluster.count
    if not (hard or length >= LONG or few) or "ep" in wishes.fixed:
        return (1,)
    most = length // LEAST if hard else max(length // PART if length >= LONG else 1, _spare(cluster, wishes) if few else 1)
    sizes = [size for size in CONTEXT if length % size == 0 and cluster.count % size == 0 and size <= min(most, length // LEAST)]
    return (1, *sizes) if sizes and shares().positions else (1,)


def _spare(cluster: Cluster, wishes: SearchConstraints) -> int:
    """Devices for each sample of a step."""
    assert wishes.global_batch is not None
    return cluster.count // wishes.global_batch


def _asked(given: int, cluster: Cluster, shares: Shares) -> tuple[int, ...]:
    if cluster.groups:
        raise UserError(f"--cp {given}: positions are not shared by unlike devices", "leave --cp out")
    if not shares.positions:
        raise UserError(f"--cp {given}: {shares.no_positions}", "leave --cp out")
    if shares.positions % given:
        less = shares.positions // given * given
        raise UserError(f"--cp {given}: {shares.positions} positions cannot be shared evenly", f"--seq {less or given}, or another degree")
    return (given,)


def expert_degrees(sheet: Sheet, cluster: Cluster, wishes: SearchConstraints, shares: Callable[[], Shares]) -> tuple[int, ...]:
    """Ranks that may share the experts of a layer; a UserError where it is asked for and cannot be."""
    given = wishes.fixed.get("ep")
    if given is not None and given > 1:
        found = shares()
        if not found.experts:
            raise UserError(f"--ep {given}: {found.no_experts}", "leave --ep out")
        if found.experts % given:
            raise UserError(f"--ep {given}: {found.experts} experts cannot be shared evenly", "a divisor of them")
        return (given,)
    stacked = any(len(spec.shape) == 3 for one in sheet.material.weights.values() for spec in one.trained)
    if given == 1 or not stacked or cluster.count == 1 or cluster.groups or wishes.meshes:
        return (1,)
    return tuple(size for size in divisors(max(1, shares().experts)) if size <= cluster.count)
