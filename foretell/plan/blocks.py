"""Blocks of a plan: which is kept how, which stage has it, and where to cut a stack into stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

from foretell.errors import UnknownName, UserError
from foretell.plan import paths
from foretell.plan.types import KEEP, Plan, Residency

V_SHAPED = {"zero-bubble-v"}
"""Schedules that run down the ranks and back up."""


# --- residency -------------------------------------------------------------------------------------------------------


def expand(patterns: Mapping[str, Residency], blocks: Sequence[str]) -> dict[str, Residency]:
    """Residency of every block, in their order; where several patterns name a block, that of the fewest blocks counts."""
    found = dict.fromkeys(blocks, KEEP)
    for pattern, residency, members in _narrowest_last(patterns, blocks):
        unknown = strangers(pattern, blocks)
        if unknown:
            raise UnknownName("block", unknown[0], blocks, _known(blocks))
        found.update(dict.fromkeys(members, residency))
    clash = ambiguous(patterns, blocks)
    if clash:
        raise UserError(
            f"{clash[0]} and {clash[1]} name a common block and want it differently", "give each block one residency"
        )
    return found


def compress(residencies: Mapping[str, Residency]) -> dict[str, Residency]:
    """Patterns that say the same: blocks that keep are left out, runs of alike ones become ranges."""
    return paths.fold({path: residency for path, residency in residencies.items() if residency != KEEP})


def strangers(pattern: str, blocks: Sequence[str]) -> tuple[str, ...]:
    """What a pattern names that is no block, folded: itself where it names none, else the rest of its range."""
    if not any(paths.matches(pattern, block) for block in blocks):
        return (pattern,)
    if "*" in pattern.split("."):
        return ()
    known = set(blocks)
    return paths.fold_names(name for name in paths.unfold(pattern) if name not in known)


def ambiguous(patterns: Mapping[str, Residency], blocks: Sequence[str]) -> tuple[str, str] | None:
    """Two patterns that want a common block differently, neither narrower than the other."""
    seen: dict[str, tuple[str, Residency, int]] = {}
    for pattern, residency, members in _narrowest_last(patterns, blocks):
        for block in members:
            if block in seen:
                other, wanted, count = seen[block]
                if wanted != residency and count == len(members):
                    return other, pattern
            seen[block] = pattern, residency, len(members)
    return None


def _narrowest_last(
    patterns: Mapping[str, Residency], blocks: Sequence[str]
) -> list[tuple[str, Residency, tuple[str, ...]]]:
    found = [
        (pattern, residency, tuple(block for block in blocks if paths.matches(pattern, block)))
        for pattern, residency in patterns.items()
    ]
    return sorted(found, key=lambda item: -len(item[2]))


# --- stages ----------------------------------------------------------------------------------------------------------


def stages_of(plan: Plan, blocks: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Blocks of every stage, in order; without a pipeline one stage has them all."""
    cuts = plan.pipeline.cuts if plan.pipeline else ()
    places = []
    for cut in cuts:
        if cut not in blocks:
            raise UnknownName("block", cut, blocks, _known(blocks))
        places.append(list(blocks).index(cut))
    if places != sorted(set(places)):
        raise UserError(
            f"the cuts {', '.join(cuts)} are not in the order of the blocks",
            "name each block once, in the model's order",
        )
    edges = [0, *places, len(blocks)]
    return tuple(tuple(blocks[start:end]) for start, end in pairwise(edges))


def rank_of_stage(plan: Plan, stage: int) -> int:
    """Where along the pipeline axis a stage is: around in a loop, or down and back up."""
    ranks = plan.mesh.pp
    turn, place = divmod(stage, ranks)
    back = plan.pipeline is not None and plan.pipeline.schedule in V_SHAPED and turn % 2 == 1
    return ranks - 1 - place if back else place


def stages_of_rank(plan: Plan, rank: int) -> tuple[int, ...]:
    """Stages that a rank of the pipeline axis holds."""
    count = plan.pipeline.stages if plan.pipeline else 1
    return tuple(stage for stage in range(count) if rank_of_stage(plan, stage) == rank)


# --- cutting ---------------------------------------------------------------------------------------------------------


def even_cuts(blocks: Sequence[str], stages: int) -> tuple[str, ...]:
    """Stages that differ by one block at most; the longer ones come first, because the last has the loss to compute."""
    _enough(len(blocks), stages)
    each, longer = divmod(len(blocks), stages)
    sizes = [each + (stage < longer) for stage in range(stages)]
    return tuple(blocks[place] for place in accumulate(sizes[:-1]))


def cuts_by_cost(
    costs: Mapping[str, float], stages: int, *, before: float = 0.0, after: float = 0.0
) -> tuple[str, ...]:
    """Cuts under which the dearest stage costs least; of several such, those with the least sum of squares.

    `costs` are those of the blocks, in the model's order: seconds, FLOPs or bytes. `before` and `after` are what the
    first and the last stage cost besides. Exact, in time that grows with the stages and the square of the blocks.
    """
    blocks, count = list(costs), len(costs)
    _enough(count, stages)
    if any(not 0 <= cost < float("inf") for cost in (*costs.values(), before, after)):
        raise UserError("what a block costs must be a number of at least 0", "give seconds, FLOPs or bytes")
    sums = list(accumulate(costs.values(), initial=0.0))

    def price(stage: int, start: int, end: int) -> float:
        return sums[end] - sums[start] + before * (stage == 0) + after * (stage == stages - 1)

    limit = _dearest_stage(count, stages, price)
    best: list[list[tuple[float, int]]] = [[(0.0, 0)] + [(float("inf"), 0)] * count]
    for stage in range(stages):
        row = [(float("inf"), 0)] * (count + 1)
        for end in range(stage + 1, count + 1):
            for start in range(stage, end):
                here = price(stage, start, end)
                if here <= limit:
                    row[end] = min(row[end], (best[stage][start][0] + here * here, start))
        best.append(row)
    edges = [count]
    for stage in reversed(range(1, stages)):
        edges.append(best[stage + 1][edges[-1]][1])
    return tuple(blocks[edge] for edge in reversed(edges[1:]))


def _dearest_stage(count: int, stages: int, price: Callable[[int, int, int], float]) -> float:
    """The least that the dearest stage can cost."""
    best = [0.0] + [float("inf")] * count
    for stage in range(stages):
        row = [float("inf")] * (count + 1)
        for end in range(stage + 1, count + 1):
            row[end] = min(max(best[start], price(stage, start, end)) for start in range(stage, end))
        best = row
    return best[count]


def _enough(blocks: int, stages: int) -> None:
    if not 1 <= stages <= blocks:
        raise UserError(f"{blocks} blocks cannot be cut into {stages} stages", f"take 1 to {blocks} stages")


def _known(blocks: Sequence[str]) -> str:
    return f"known: {', '.join(paths.fold_names(blocks))}" if blocks else "the model has no repeated blocks"
