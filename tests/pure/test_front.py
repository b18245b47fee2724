"""Objectives, limits of a whole run, and the front: held against its definition."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from foretell.errors import UserError
from foretell.plan.types import Mesh
from foretell.search.estimate.plan import Layout, Quick
from foretell.search.solve.explain import why_lost
from foretell.search.solve.front import MOST_POINTS, Point, best_of, complaint, effort, front, pareto, score
from foretell.search.space.constraints import SearchConstraints

GIB = 1 << 30


def point(seconds: float, memory: float = 10.0, devices: int = 1, joules: float | None = 5.0,
          dollars: float | None = 1.0, **layout: object) -> Point:  # fmt: skip
    made = Layout(mesh=Mesh(dp_shard=devices), micro_batch=1, **layout)  # type: ignore[arg-type]
    nbytes = int(memory * GIB)
    quick = Quick(
        seconds=seconds, low=seconds, high=seconds, memory_bytes=nbytes, margin_bytes=1, best_margin_bytes=1,
        stage_memory=(nbytes,), stage_seconds=(seconds,),
    )  # fmt: skip
    return Point(
        layout=made, quick=quick, devices=devices, per_step=100, seconds=seconds, memory_bytes=nbytes, dollars=dollars,
        joules=joules, capacity_bytes=80 * GIB,
    )  # fmt: skip


def test_the_front_is_what_no_other_beats() -> None:
    rng = random.Random(1)
    points = [
        point(rng.randint(1, 9), rng.randint(1, 9), 1, rng.randint(1, 4), rng.randint(1, 4)) for _ in range(200)
    ]
    found = pareto(points)

    def beaten(mine: Point) -> bool:
        a = mine.each()
        return any(all(x <= y for x, y in zip(b.each(), a, strict=True)) and b.each() != a for b in points)

    wanted = {p.each() for p in points if not beaten(p)}
    assert {p.each() for p in found} == wanted and len(found) == len(wanted)


def test_the_shown_front_has_the_best_and_points_apart() -> None:
    points = [point(1 + n / 500, 60 - n / 10) for n in range(300)]
    best = best_of(points, SearchConstraints(global_batch=1))
    shown = front(points, SearchConstraints(global_batch=1), best)
    assert best in shown and len(shown) <= MOST_POINTS
    assert list(shown) == sorted(shown, key=lambda p: p.seconds)
    near = front([point(1.0, 60), point(1.001, 59.9), point(1.5, 30)], SearchConstraints(global_batch=1))
    assert [p.seconds for p in near] == [1.0, 1.5]
    assert len(front([point(1.0, 60), point(3.0, 59)], SearchConstraints(global_batch=1))) == 1


def test_a_faster_plan_that_lost_says_why() -> None:
    """The best by the rules is not always the fastest; the row of every faster one gives the rule."""
    best = point(1.0, 60)
    wishes = SearchConstraints(global_batch=1)
    tight, alike, larger = point(0.985, 79.5), point(0.995, 60, compile="model"), replace(point(1.9, 60, accumulate=2), per_step=200)
    assert best_of([best, tight], wishes) is best and "memory is tight" in why_lost(best, tight)
    assert best_of([best, alike], wishes) is best and why_lost(best, alike) == "0.5% faster, and more complex; plans within 1% count as equal"
    assert best_of([best, larger], SearchConstraints()) is larger, "five percent are enough for twice the batch"
    hardly = replace(larger, seconds=1.96)
    assert best_of([best, hardly], SearchConstraints()) is best and "2.0% faster with 2 times the batch" in why_lost(best, hardly)
    long = replace(point(1.5, 60, accumulate=2), per_step=200)
    assert best_of([best, long], SearchConstraints(objective="latency")) is best and why_lost(best, long, "latency") == "a step takes 50% longer"


def test_objectives_choose_differently() -> None:
    fast = point(1.0, devices=8, dollars=8.0, joules=80.0)
    cheap = point(4.0, devices=2, dollars=6.0, joules=90.0)
    frugal = point(2.0, devices=4, dollars=7.0, joules=40.0)
    points = [fast, cheap, frugal]
    wanted = {"throughput": fast, "latency": fast, "cost": cheap, "energy": frugal, "smallest": cheap}
    for objective, best in wanted.items():
        assert best_of(points, SearchConstraints(global_batch=1, objective=objective)) is best
    with pytest.raises(UserError, match="price"):
        best_of([replace(fast, dollars=None)], SearchConstraints(global_batch=1, objective="cost"))


def test_of_alike_plans_the_simplest_and_a_tight_one_must_be_better() -> None:
    plain, looped = point(1.005), point(1.0, interleave=2, schedule="interleaved-1f1b")
    assert best_of([looped, plain], SearchConstraints(global_batch=1)) is plain
    assert effort(plain.layout) < effort(looped.layout)
    tight, roomy = point(1.0, memory=79.0), point(1.02, memory=40.0)
    assert tight.tight and best_of([tight, roomy], SearchConstraints(global_batch=1)) is roomy
    assert best_of([tight, point(1.2, memory=40.0)], SearchConstraints(global_batch=1)) is tight


def test_a_free_batch_is_doubled_only_for_a_gain() -> None:
    small = point(1.0)
    large = replace(small, layout=replace(small.layout, micro_batch=2), per_step=200, seconds=1.99)
    larger = replace(large, seconds=1.8)
    assert best_of([small, large], SearchConstraints()) is small
    assert best_of([small, larger], SearchConstraints()) is larger
    assert score(large, SearchConstraints(global_batch=2)) < score(small, SearchConstraints(global_batch=2))


def test_limits_of_a_whole_run() -> None:
    one = point(1.0, dollars=0.5)  # 100 tokens a second
    wishes = SearchConstraints(global_batch=1, tokens=1e6, deadline_seconds=9000.0)
    assert "more than allowed" in complaint(one, wishes) and best_of([one], wishes) is None
    assert not complaint(one, replace(wishes, deadline_seconds=10001.0))
    assert "costs $5,000" in complaint(one, SearchConstraints(global_batch=1, tokens=1e6, budget=4000.0))
    assert not complaint(one, SearchConstraints(global_batch=1, tokens=1e6, budget=5001.0))
    assert not front([one], wishes)
