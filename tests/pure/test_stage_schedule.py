"""Seconds of a pipeline from those of its stages, against the schedules' own formulas."""

from __future__ import annotations

import pytest

from benchmarks.foreign.schedule import (
    GPIPE,
    ONE_BY_ONE,
    ZB_1P,
    ZB_2P,
    ZB_V,
    StageSeconds,
    partition,
    run_through,
    schedule_of,
)
from foretell.errors import UserError
from foretell.lower.pipeline.order import Event, in_turn, needs, orders

SIZES = [(4, 8), (8, 24), (8, 64), (16, 48), (4, 400)]


def through(ranks: int, micros: int, schedule: str, stage: StageSeconds, parts: int = 1) -> float:
    count = ranks * parts
    return run_through([stage] * count, [0.0] * count, micros=micros, ranks=ranks, schedule=schedule)


# ---------------------------------------------------------------- schedules


@pytest.mark.parametrize(("ranks", "micros"), SIZES)
def test_one_by_one_and_gpipe_wait_for_the_depth_less_one(ranks: int, micros: int) -> None:
    stage = StageSeconds(1.0, 1.3, 0.9)
    for schedule in (ONE_BY_ONE, GPIPE):
        assert through(ranks, micros, schedule, stage) == pytest.approx((micros + ranks - 1) * stage.total)


@pytest.mark.parametrize(("ranks", "micros"), SIZES)
@pytest.mark.parametrize("parts", [2, 3])
def test_interleaving_divides_the_wait_by_the_parts(ranks: int, micros: int, parts: int) -> None:
    stage = StageSeconds(1.0 / parts, 1.0 / parts, 1.0 / parts)
    expected = micros * 3.0 + (ranks - 1) * 3.0 / parts
    assert through(ranks, micros, ONE_BY_ONE, stage, parts) == pytest.approx(expected)


@pytest.mark.parametrize(("ranks", "micros"), SIZES)
def test_zero_bubble_waits_as_its_paper_says(ranks: int, micros: int) -> None:
    """(p - 1)(F + B - W) at the memory of 1F1B, none at twice that, where the three take alike."""
    stage = StageSeconds(1.0, 1.0, 1.0)
    assert through(ranks, micros, ZB_1P, stage) == pytest.approx(3 * micros + ranks - 1)
    assert through(ranks, micros, ZB_2P, stage) == pytest.approx(3 * micros)
    half = StageSeconds(0.5, 0.5, 0.5)
    assert through(ranks, micros, ZB_V, half, 2) < through(ranks, micros, ZB_1P, stage)


def test_no_schedule_is_quicker_than_its_busiest_rank() -> None:
    stages = [StageSeconds(1.0, 1.0, 1.0)] * 3 + [StageSeconds(1.5, 2.0, 1.5)]
    for schedule in (ONE_BY_ONE, GPIPE, ZB_1P, ZB_2P):
        seconds = run_through(stages, [0.1] * 4, micros=16, ranks=4, schedule=schedule)
        assert seconds >= 16 * stages[-1].total
        assert seconds > run_through(stages, [0.0] * 4, micros=16, ranks=4, schedule=schedule) - 1e-9


def test_layers_are_cut_as_the_frameworks_cut_them() -> None:
    """BLOOM's authors: of 78 layers on 12 stages "the last has one, the rest seven"; 70 with embeddings as slots;
    the zero-bubble paper takes one layer from the first and the last stage."""
    assert partition(78, 12) == [7] * 11 + [1]
    assert partition(70, 12) == [5] + [6] * 10 + [5]
    assert partition(30, 8) == [3] + [4] * 6 + [3]
    assert partition(105, 35) == [3] * 35
    assert partition(22, 24) == [0] + [1] * 22 + [0]
    for layers in range(1, 40):
        for stages in range(1, 13):
            assert sum(partition(layers, stages)) == layers
            assert min(partition(layers, stages)) >= 0


@pytest.mark.parametrize(
    ("text", "name"),
    [("ZB-2p", ZB_2P), ("ZB-1p", ZB_1P), ("1F1B-I", ONE_BY_ONE), ("ZBV", ZB_V), ("GPipe", GPIPE), ("odd", ONE_BY_ONE)],
)
def test_names_of_schedules(text: str, name: str) -> None:
    assert schedule_of(text) == name


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble", "zero-bubble-v"])
def test_events_come_after_what_they_need_and_none_is_left(schedule: str) -> None:
    ranks = 3
    stages = ranks if schedule in ("gpipe", "1f1b") else 2 * ranks
    every = orders(schedule, ranks, stages, 6)
    walked = list(in_turn(every, stages - 1))
    seen: set[Event] = set()
    for _, event in walked:
        need = needs(event, stages - 1)
        assert need is None or need in seen
        seen.add(event)
    assert [tuple(event for one, event in walked if one == rank) for rank in range(ranks)] == list(every)
    with pytest.raises(UserError, match="waits for itself"):
        list(in_turn([mine[::-1] for mine in every], stages - 1))
