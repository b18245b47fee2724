"""Speedups from pairs of times: drawn data whose answer is known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from foretell.tune.clock.statistics import Ratio, ShapeResult, judged, ratio, turns


def drawn(seed: int, speedup: float, *, pairs: int = 30, noise: float = 0.05, drift: float = 0.0) -> tuple[list[float], list[float]]:
    """Times in the order in which they are measured, on a machine that slows down by `drift` from first to last."""
    random = np.random.default_rng(seed)
    order = turns(pairs)
    pace = np.linspace(1.0, 1.0 + drift, len(order)) * np.exp(noise * random.standard_normal(len(order)))
    times = [slow * (1.0 if second else speedup) * 1e-4 for slow, second in zip(pace, order, strict=True)]
    return ([t for t, second in zip(times, order, strict=True) if not second], [t for t, second in zip(times, order, strict=True) if second])


def test_turns_are_fair() -> None:
    """Each goes first as often, and both have the same mean place."""
    order = turns(10)
    places = [[place for place, second in enumerate(order) if second is which] for which in (False, True)]
    assert [len(one) for one in places] == [10, 10]
    assert sum(places[0]) == sum(places[1])


@pytest.mark.parametrize("speedup", [1.0, 1.3])
def test_the_interval_holds_the_truth_as_often_as_it_says(speedup: float) -> None:
    """19 of 20; of 100 draws 87 or more, which chance misses less than once in a thousand, and not all."""
    found = [ratio(*drawn(seed, speedup), seed=seed) for seed in range(100)]
    inside = sum(one.low <= speedup <= one.high for one in found)
    assert 87 <= inside < 100


def test_a_machine_that_slows_down_favours_nobody() -> None:
    """Measured one after the other, the second of two equal programs would look slower by a fifth."""
    found = ratio(*drawn(1, 1.0, drift=0.4, noise=0.01))
    assert found.low < 1.0 < found.high and found.high / found.low < 1.02
    in_blocks = np.linspace(1.0, 1.4, 60)
    assert in_blocks[30:].mean() / in_blocks[:30].mean() > 1.15


def test_a_few_disturbed_pairs_do_not_count() -> None:
    baseline, candidate = drawn(2, 1.1, noise=0.005)
    disturbed = [one * (40 if place % 6 == 0 else 1) for place, one in enumerate(candidate)]
    assert ratio(baseline, disturbed).speedup == pytest.approx(1.1, rel=0.01)  # noise of half a percent, a median of 30
    assert np.mean(baseline) / np.mean(disturbed) < 0.2


def test_what_is_no_pair_is_refused() -> None:
    for pair in (([1.0], []), ([], [])):
        with pytest.raises(ValueError, match="no pairs"):
            ratio(*pair)


def known(speedup: float, width: float = 0.01, pairs: int = 30) -> Ratio:
    return Ratio(speedup=speedup, low=speedup * (1 - width), high=speedup * (1 + width), pairs=pairs)


def shape(name: str, floor: float, seconds: float, **speedups: float) -> ShapeResult:
    baselines = {one: seconds * speedup for one, speedup in speedups.items()}
    return ShapeResult(name=name, floor_seconds=floor, candidate_seconds=seconds, baselines=baselines,
                       ratios={one: known(speedup) for one, speedup in speedups.items()})  # fmt: skip


def test_the_best_baseline_counts() -> None:
    """Cheat 34: three times as fast as eager says nothing where torch.compile is faster still."""
    found = judged([shape("a", 1e-5, 5e-5, eager=3.0, compiled=0.9)])
    assert (found.faster, found.check) == (False, "baseline")
    assert "compiled" in found.reason
    assert judged([shape("a", 1e-5, 5e-5, eager=3.0)]).faster


def test_the_worst_shape_counts() -> None:
    """Cheat 31: one shape that costs nothing buys a mean over shapes, and no verdict."""
    some = [shape("a", 0.0, 5e-5, eager=0.9), shape("b", 0.0, 1e-9, eager=5e4)]
    assert np.exp(np.mean(np.log([0.9, 5e4]))) > 100
    assert judged(some).check == "baseline" and " at a" in judged(some).reason
    honest_bytes = [shape("a", 1e-5, 5e-5, eager=1.5), shape("b", 1e-5, 1e-9, eager=5e4)]
    assert judged(honest_bytes).check == "floor" and judged(honest_bytes).reason.startswith("b:")


@pytest.mark.parametrize(("speedup", "width", "pairs", "check"), [
    (1.05, 0.01, 30, ""), (1.05, 0.05, 30, "unsure"), (1.05, 0.01, 9, "unsure"), (1.01, 0.001, 30, "baseline"), (0.9, 0.2, 30, "baseline"),
])  # fmt: skip
def test_only_a_sure_gain_is_one(speedup: float, width: float, pairs: int, check: str) -> None:
    ratios = {"eager": known(speedup, width, pairs)}
    found = judged([ShapeResult(name="a", floor_seconds=0, candidate_seconds=1e-5, baselines={"eager": 1e-5}, ratios=ratios)])
    assert found.check == check and found.faster == (not check)


def test_verdicts_do_not_depend_on_order() -> None:
    some = [shape("a", 1e-5, 5e-5, eager=1.5), shape("b", 1e-5, 5e-5, eager=1.2), shape("c", 1e-5, 5e-5, eager=2.0)]
    assert len({judged(order).reason for order in itertools.permutations(some)}) == 1
