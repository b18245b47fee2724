"""Which blocks to recompute: exactly the least extra seconds, held against trying everything and against a MILP."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

import pytest

from foretell.search.space.residency import KEPT, RecomputeOption, Treatment, Ways, at_least, least
from tests.further import further


def ways(rng: random.Random, modes: int = 3) -> Ways:
    """A block with random ways; now and then one that is worse than another in both."""
    names = ("selective", "recompute", "host", "disk")[: modes - 1]
    return (KEPT, *(RecomputeOption(rng.uniform(1, 100), rng.uniform(0.01, 10), name) for name in names))


def by_hand(blocks: Sequence[Ways], need: float) -> float | None:
    """All combinations."""
    found = [
        sum(way.seconds for way in chosen) for chosen in product(*blocks) if sum(way.saves for way in chosen) >= need
    ]
    return min(found, default=None)


def by_milp(blocks: Sequence[Ways], need: float) -> Treatment | None:
    """The same by scipy's HiGHS: one yes-or-no variable for each block and way. Raises ImportError without scipy."""
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-not-found, import-untyped, unused-ignore]

    columns = [(number, way) for number, block in enumerate(blocks) for way in block]
    once = np.array([[float(number == row) for number, _ in columns] for row in range(len(blocks))])
    scale = max(need, 1.0)
    saving = np.array([[way.saves / scale for _, way in columns]])
    answer = milp(
        c=np.array([way.seconds for _, way in columns]), integrality=np.ones(len(columns)), bounds=Bounds(0, 1),
        constraints=[LinearConstraint(once, 1, 1), LinearConstraint(saving, need / scale, np.inf)],
        options={"mip_rel_gap": 0.0},
    )  # fmt: skip
    if answer.x is None:
        return None
    taken = [way for (_, way), x in zip(columns, answer.x, strict=True) if x > 0.5]
    return Treatment(
        modes=tuple(way.mode for way in taken), saves=sum(way.saves for way in taken),
        seconds=sum(way.seconds for way in taken),
    )  # fmt: skip


def whole(blocks: Sequence[Ways]) -> float:
    return sum(max(way.saves for way in block) for block in blocks)


@pytest.mark.parametrize("seed", range(25))
def test_the_least_seconds_of_all_combinations(seed: int) -> None:
    rng = random.Random(seed)
    kinds = [ways(rng, rng.choice((2, 3, 3, 4))) for _ in range(rng.randint(1, 4))]
    blocks = [rng.choice(kinds) for _ in range(rng.randint(1, 7))]
    for share in (0.0, 0.1, 0.37, 0.62, 0.9, 0.999, 1.01):
        need = whole(blocks) * share
        found, wanted = least(blocks, need), by_hand(blocks, need)
        if wanted is None:
            assert found is None and at_least(blocks, need) == float("inf")
            continue
        assert found is not None and found.seconds == pytest.approx(wanted, rel=1e-9)
        assert found.saves >= need * (1 - 1e-9)
        taken = [next(way for way in block if way.mode == mode) for block, mode in zip(blocks, found.modes, strict=True)]
        assert sum(way.seconds for way in taken) == pytest.approx(found.seconds)
        assert at_least(blocks, need) <= wanted * (1 + 1e-9)


@pytest.mark.parametrize("seed", further(range(6), (1, 3), "other numbers"))
def test_the_least_seconds_by_mixed_integer_programming(seed: int) -> None:
    pytest.importorskip("scipy")
    rng = random.Random(100 + seed)
    blocks = [ways(rng) for _ in range(40)]
    for share in (0.2, 0.5, 0.85):
        need = whole(blocks) * share
        found, other = least(blocks, need), by_milp(blocks, need)
        assert found is not None and other is not None
        assert found.seconds == pytest.approx(other.seconds, rel=1e-6)
    assert by_milp(blocks, whole(blocks) * 1.01) is None


def test_alike_blocks_are_counted_and_the_first_give_way_first() -> None:
    block = (KEPT, RecomputeOption(10, 1.0, "selective"), RecomputeOption(30, 5.0, "recompute"))
    found = least([block] * 8, 60.0)
    assert found is not None and found.seconds == pytest.approx(6.0) and found.modes == ("selective",) * 6 + ("keep",) * 2
    found = least([block] * 4, 55.0)
    assert found is not None and found.modes[0] == "recompute" and found.modes.count("keep") == 0
    assert least([block] * 4, 0.0).modes == ("keep",) * 4  # type: ignore[union-attr]
    assert least([], 1.0) is None


def test_frozen_blocks_with_nothing_to_give_stay_as_they_are() -> None:
    block = (KEPT, RecomputeOption(10, 1.0, "selective"), RecomputeOption(30, 5.0, "recompute"))
    found = least([(KEPT,)] * 3 + [block] * 2, 20.0)
    assert found is not None and found.modes == ("keep",) * 3 + ("selective",) * 2
    assert least([(KEPT,)] * 3, 1.0) is None


def test_three_hundred_unlike_blocks_come_near_the_bound() -> None:
    rng = random.Random(5)
    blocks = [ways(rng) for _ in range(300)]
    found = least(blocks, whole(blocks) * 0.5)
    assert found is not None
    assert found.seconds == pytest.approx(at_least(blocks, whole(blocks) * 0.5), rel=0.01)
