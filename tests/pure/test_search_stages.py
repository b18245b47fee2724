"""Cuts of a pipeline: the least dearest stage of all cuts, with the residency each stage needs; micro-batches held."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, pairwise, product

import pytest

from foretell.lower.pipeline.order import orders
from foretell.plan.legal import micro_batches_allowed
from foretell.search.space.residency import KEPT, RecomputeOption, at_least
from foretell.search.space.stages import BlockStack, _Pricing, cut, in_flight, joint, rank_of


def every_cut(blocks: int, stages: int) -> list[tuple[int, ...]]:
    return [tuple(places) for places in combinations(range(1, blocks), stages - 1)]


@pytest.mark.parametrize("seed", range(20))
def test_the_dearest_stage_of_all_cuts_is_least(seed: int) -> None:
    rng = random.Random(seed)
    blocks, stages = rng.randint(2, 9), rng.randint(1, 4)
    stages = min(stages, blocks)
    costs = [rng.choice((1.0, rng.uniform(0.1, 3))) for _ in range(blocks)]
    before, after = rng.uniform(0, 2), rng.uniform(0, 4)

    def price(stage: int, start: int, end: int) -> float:
        return sum(costs[start:end]) + before * (stage == 0) + after * (stage == stages - 1)

    def dearest(cuts: Sequence[int]) -> float:
        return max(price(s, a, b) for s, (a, b) in enumerate(pairwise([0, *cuts, blocks])))

    found = cut(price, blocks, stages, [before, *costs, after])
    assert found is not None
    assert dearest(found) == pytest.approx(min(map(dearest, every_cut(blocks, stages))), rel=1e-8)


def test_equal_work_is_cut_evenly_and_too_few_blocks_not_at_all() -> None:
    assert cut(lambda s, a, b: b - a, 12, 4) == (3, 6, 9)
    found = cut(lambda s, a, b: b - a, 14, 4)
    assert found is not None and sorted(b - a for a, b in pairwise([0, *found, 14])) == [3, 3, 4, 4]
    assert cut(lambda s, a, b: b - a, 3, 4) is None
    assert cut(lambda s, a, b: float("inf") if b - a > 3 else 1.0, 16, 4) is None


@pytest.mark.parametrize("seed", range(16))
def test_cuts_and_residency_together_equal_trying_everything(seed: int) -> None:
    rng = random.Random(seed)
    blocks, stages = 5, rng.choice((2, 3))
    kinds = rng.choice((1, 2, 2))
    drawn = [(rng.uniform(1, 3), rng.uniform(5, 20), rng.uniform(10, 30), rng.uniform(0.3, 0.8)) for _ in range(kinds)]
    which = [rng.randrange(kinds) for _ in range(blocks)]
    stack = BlockStack(
        seconds=tuple(drawn[k][0] for k in which), held=tuple(drawn[k][1] for k in which),
        state=tuple(drawn[k][2] for k in which), before=(0.5, 1.0, 5.0), after=(1.5, 6.0, 20.0),
        ways=tuple(
            (KEPT, RecomputeOption(0.4 * drawn[k][1], 0.1 * drawn[k][0], "selective"),
             RecomputeOption(drawn[k][3] * drawn[k][1], 0.35 * drawn[k][0], "recompute")) for k in which
        ),
    )  # fmt: skip
    flights = in_flight("1f1b", stages, 1, 8)
    for room in (60.0, 80.0, 100.0, 130.0, 170.0, 250.0):
        rooms = [room] * stages
        best = min((_slowest(stack, cuts, modes, flights, rooms) for cuts in every_cut(blocks, stages)
                    for modes in product(range(3), repeat=blocks)), default=float("inf"))  # fmt: skip
        found = joint(stack, flights, rooms)
        if best == float("inf"):
            assert found is None
            continue
        assert found is not None and found.seconds == pytest.approx(best, rel=1e-8)
        names = ("keep", "selective", "recompute")
        modes = tuple(names.index(mode) for mode in found.modes)
        assert _slowest(stack, found.cuts, modes, flights, [r * (1 + 1e-9) for r in rooms]) == pytest.approx(best, rel=1e-8)


def _slowest(stack: BlockStack, cuts: Sequence[int], modes: Sequence[int], flights: Sequence[int], room: Sequence[float]) -> float:
    slowest = 0.0
    for stage, (start, end) in enumerate(pairwise([0, *cuts, len(stack.seconds)])):
        ends = [stack.before] * (stage == 0) + [stack.after] * (stage == len(flights) - 1)
        seconds, held, state = (sum(end[part] for end in ends) for part in range(3))
        for block in range(start, end):
            way = stack.ways[block][modes[block]]
            seconds += stack.seconds[block] + way.seconds
            held += stack.held[block] - way.saves
            state += stack.state[block]
        if state + held * flights[stage] > room[stage]:
            return float("inf")
        slowest = max(slowest, seconds)
    return slowest


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble", "zero-bubble-v"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_held_is_what_the_schedule_holds(schedule: str, ranks: int) -> None:
    """Of every rank, the most micro-batches its stages hold together at any moment of torch's order."""
    each = 1 if schedule in ("gpipe", "1f1b") else 2
    for micro in (ranks, 2 * ranks, 3 * ranks, 8 * ranks):
        if not micro_batches_allowed(schedule, ranks, micro):
            continue
        held = in_flight(schedule, ranks, each, micro)
        for rank, order in enumerate(orders(schedule, ranks, ranks * each, micro)):
            now = most = 0
            for event in order:
                now += {"F": 1, "B": -1, "W": -1}.get(event.kind, 0)
                most = max(most, now)
            assert sum(count for stage, count in enumerate(held) if rank_of(schedule, ranks, stage) == rank) == most


def test_three_hundred_unlike_blocks_are_cut() -> None:
    rng = random.Random(3)
    held = [rng.uniform(50, 100) for _ in range(300)]
    stack = BlockStack(
        seconds=tuple(rng.uniform(1, 2) for _ in held), held=tuple(held), state=tuple(3 * h for h in held),
        ways=tuple((KEPT, RecomputeOption(h * 0.5, rng.uniform(0.05, 0.1), "selective"), RecomputeOption(h * 0.9, 0.4, "recompute")) for h in held),
    )  # fmt: skip
    flights = in_flight("1f1b", 8, 1, 32)
    found = joint(stack, flights, [4.6 * sum(held) / 8] * 8)
    assert found is not None and set(found.modes) == {"keep", "selective", "recompute"}


def test_the_bound_of_many_kinds_is_that_of_the_blocks_one_by_one() -> None:
    rng = random.Random(8)
    kinds = [
        (
            KEPT, RecomputeOption(rng.uniform(1, 9), rng.uniform(0.1, 1), "selective"),
            RecomputeOption(rng.uniform(9, 20), rng.uniform(1, 3), "recompute"),
        )
        for _ in range(7)
    ]  # fmt: skip
    ways = tuple(rng.choice(kinds) for _ in range(40))
    stack = BlockStack(seconds=(1.0,) * 40, held=(20.0,) * 40, state=(0.0,) * 40, ways=ways)
    pricing = _Pricing(stack=stack, flights=(1,), room=(0.0,), worth=(1.0,))
    for start, end, share in ((0, 40, 0.3), (5, 22, 0.9), (11, 12, 0.5), (0, 40, 1.1)):
        need = share * sum(max(way.saves for way in block) for block in ways[start:end])
        assert pricing._bound(start, end, need) == pytest.approx(at_least(ways[start:end], need))
