"""Which rank is where in the mesh, and which ranks form a group."""

from __future__ import annotations

from itertools import product

from foretell.errors import UserError
from foretell.plan.types import AXES, Mesh, Plan

OWN_RANKS = tuple(axis for axis in AXES if axis != "ep")
"""Axes that have ranks of their own, outermost first: experts are spread over ranks of the data axes."""


def coordinates(mesh: Mesh, rank: int) -> dict[str, int]:
    """Where a rank lies along every axis; the innermost axis runs fastest."""
    found = {}
    for axis in reversed(OWN_RANKS):
        rank, found[axis] = divmod(rank, getattr(mesh, axis))
    return found


def rank_at(mesh: Mesh, **place: int) -> int:
    """The rank at given coordinates; axes left out count as 0."""
    rank = 0
    for axis in OWN_RANKS:
        rank = rank * int(getattr(mesh, axis)) + place.get(axis, 0)
    return rank


def groups(mesh: Mesh, *axes: str) -> tuple[tuple[int, ...], ...]:
    """Ranks that differ along these axes alone, group by group; every rank is in exactly one."""
    others = [other for other in OWN_RANKS if other not in axes]
    own = [axis for axis in OWN_RANKS if axis in axes]
    found = []
    for place in product(*(range(getattr(mesh, other)) for other in others)):
        fixed = dict(zip(others, place, strict=True))
        inside = product(*(range(getattr(mesh, axis)) for axis in own))
        found.append(tuple(rank_at(mesh, **fixed, **dict(zip(own, index, strict=True))) for index in inside))
    return tuple(found)


def sharing(mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Ranks that hold parameters together, group by group: those along dp_shard and cp."""
    return groups(mesh, "dp_shard", "cp")


def sharing_experts(mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Ranks that hold the experts of a layer together, group by group: ep of those along dp_shard, side by side."""
    found = []
    for group in groups(mesh, "dp_shard"):
        found += [group[start : start + mesh.ep] for start in range(0, len(group), mesh.ep)]
    return tuple(found)


def check_rank(plan: Plan, rank: int) -> None:
    """Refuse a rank that the plan does not have."""
    world = plan.mesh.world
    if not 0 <= rank < world:
        has = "one rank, 0" if world == 1 else f"ranks 0 to {world - 1}"
        raise UserError(f"rank {rank} was asked for and the plan has {has}", "give one of them")
