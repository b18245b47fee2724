"""Bands of step time: the conformal quantile, the calibration that is shipped, and what bands must never be."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from foretell.price import bands
from foretell.price.bands import CATALOGUE, CPU, OWN, UNFAMILIAR, Band, Evidence, factors

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def calibration() -> Any:
    """benchmarks/bands.py, which shares its name with the module under test."""
    before = list(sys.path)
    spec = importlib.util.spec_from_file_location("benchmark_bands", BENCHMARKS / "bands.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path[:] = before
        del sys.modules[spec.name]


def test_a_quantile_is_the_least_score_that_enough_weight_stays_below(calibration: Any) -> None:
    dice = random.Random(7)
    for _ in range(50):
        scores = [(f"f{dice.randrange(12)}", dice.gauss(0, 1)) for _ in range(dice.randrange(5, 60))]
        counts = {family: sum(one == family for one, _ in scores) for family, _ in scores}
        level = dice.choice((0.5, 0.8, 0.9))

        def weight(limit: float, scores: Any = scores, counts: Any = counts) -> float:
            return sum(1 / counts[family] for family, score in scores if score <= limit) / (len(counts) + 1)

        enough = [score for _, score in scores if weight(score) >= level - 1e-12]
        assert calibration.quantile(scores, level) == (min(enough) if enough else math.inf)


def test_with_too_few_families_there_is_no_quantile(calibration: Any) -> None:
    rows = [(f"f{n}", 1.0) for n in range(8)]
    assert calibration.quantile(rows, 0.9) == math.inf
    assert calibration.quantile([*rows, ("f8", 1.0)], 0.9) == 1.0


def test_a_new_family_is_held_as_often_as_promised(calibration: Any) -> None:
    """Families that differ from each other more than their rows do: rows taken one by one would hold too few."""
    dice, held, trials = random.Random(1), 0, 400

    def family(name: str) -> list[Any]:
        shift = dice.gauss(0, 0.1)
        return [calibration.Row(kind="k", family=name, residual=shift + dice.gauss(0, 0.03)) for _ in range(dice.randrange(1, 9))]

    for _ in range(trials):
        rows = [row for n in range(30) for row in family(f"f{n}")]
        low, high = calibration.bounds(rows, {})
        held += low <= dice.choice(family("new")).residual <= high
    assert 0.86 <= held / trials <= 0.97


def test_the_interval_score_is_width_and_ten_times_a_miss_on_either_side(calibration: Any) -> None:
    assert calibration.interval_score(0.0, (-0.1, 0.2)) == pytest.approx(0.3)
    assert calibration.interval_score(0.25, (-0.1, 0.2)) == pytest.approx(0.3 + 20 * 0.05)
    assert calibration.interval_score(-0.2, (-0.1, 0.2)) == pytest.approx(0.3 + 20 * 0.1)


@pytest.mark.slow(reason="all stored rows counted anew; what makes bands wide or held is tested beside it")
def test_what_is_shipped_is_what_the_stored_rows_give(calibration: Any) -> None:
    stored = json.loads(bands.FILE.read_text(encoding="utf-8"))
    again = calibration.shipped(calibration.every_row())
    assert stored["kinds"] == again["kinds"]
    assert stored["level"] == bands.LEVEL


def test_every_kind_of_evidence_has_a_band_that_says_what_it_rests_on() -> None:
    kinds = {
        Evidence(device=device, alone=alone, paced=paced, compiled=compiled, data_dependent=sized, host_share=host, guessed_share=guessed).kind
        for device in (OWN, CATALOGUE, UNFAMILIAR, CPU) for alone in (True, False) for paced in (True, False) for compiled in (True, False)
        for sized in (True, False) for host in (0.0, 0.9) for guessed in (0.0, 0.5)
    }  # fmt: skip
    assert kinds == set(bands.known())
    assert all(band.evidence and (band.evidence.startswith("assumed") or band.rows) for band in bands.known().values())


@pytest.mark.parametrize("kind", sorted(bands.known()))
def test_a_band_contains_the_prediction_and_ends_somewhere(kind: str) -> None:
    for features in ({}, {"host": 1.0, "irregular": 1.0, "fp32": 1.0}):
        low, high = bands.known()[kind].factors(features)
        assert 0 < low < 1 < high < 20


def test_a_band_reaches_to_both_sides_even_where_all_rows_were_on_one() -> None:
    low, high = Band(low=0.05, high=0.3).factors({})
    assert low < 1 < high


def test_less_evidence_makes_wider_bands() -> None:
    def width(seen: Evidence) -> float:
        low, high = factors(seen)
        return math.log(high / low)

    own = Evidence()
    assert width(own) < width(Evidence(device=CATALOGUE)) < width(Evidence(device=UNFAMILIAR))
    assert width(own) < width(Evidence(alone=False))
    assert width(own) < width(Evidence(host_share=0.2)) and width(own) < width(Evidence(host_share=0.6))
    assert width(own) < width(Evidence(irregular_share=0.3))
    assert width(own) <= width(Evidence(fp32=True)) and width(Evidence(host_share=0.6)) < width(Evidence(host_share=0.6, fp32=True))
    assert width(own) < width(Evidence(data_dependent=True)) and width(own) < width(Evidence(guessed_share=0.5))
    assert width(Evidence(device=CPU, paced=True)) < width(Evidence(device=CPU)) <= width(Evidence(device=CPU, alone=False))
