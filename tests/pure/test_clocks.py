"""The clock under load: what a power limit does to products, held by themselves and between other ops."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.hardware import catalog
from foretell.hardware.lookup import find_profile
from foretell.price.clocks import WINDOW_SECONDS, Clocks, learn, slowdowns
from foretell.price.kernels.shapes import Shape
from foretell.price.machine import machine
from foretell.trace.types import TensorSpec

ROWS = [json.loads(line) for line in (Path(__file__).parents[2] / "benchmarks/results/clocks.jsonl").read_text().splitlines()]
HELD = [row for row in ROWS if row["kind"] == "product" and row["burst_seconds"] > 50e-6]
STEPS = [row for row in ROWS if row["kind"] == "step"]
H200 = machine(catalog.find("H200"), find_profile("H200-SXM-141GB"))
assert H200 is not None and H200.clocks is not None
CLOCKS = H200.clocks


def burst(m: int, n: int, k: int, letters: str = "ct") -> float:
    left, right = TensorSpec((m, k), "bfloat16"), TensorSpec((k, n), "bfloat16")
    shape = Shape("aten.mm.default", (left, right), (TensorSpec((m, n), "bfloat16"),), (f"layout:{letters}",))
    assert H200 is not None
    return H200.ops.seconds([shape])[shape]


def test_bursts_of_products_on_an_h200() -> None:
    errors = [burst(row["m"], row["n"], row["k"]) / row["burst_seconds"] - 1 for row in HELD]
    assert max(map(abs, errors)) < 0.06, errors


def test_products_held_for_half_a_minute_on_an_h200() -> None:
    errors = [burst(row["m"], row["n"], row["k"]) * CLOCKS.slower(1.0) / row["held_seconds"] - 1 for row in HELD]
    assert len(errors) >= 7 and sorted(map(abs, errors))[len(errors) // 2] < 0.04, errors


@pytest.mark.parametrize("row", STEPS, ids=lambda row: "x".join(map(str, row["sizes"])))
def test_the_same_products_inside_steps_of_an_h200(row: dict) -> None:  # type: ignore[type-arg]
    products = [one for one in row["products"] if one["name"] == "aten::mm"]
    attention = [one for one in row["products"] if one["name"] in ("aten::_cudnn_attention_forward", "aten::_cudnn_attention_backward")]
    alone = sum(one["count"] * burst(one["shapes"][0][0], one["shapes"][1][1], one["shapes"][0][1]) for one in products)
    measured = sum(one["count"] * one["seconds"] for one in products)
    others = row["seconds"] - measured - sum(one["count"] * one["seconds"] for one in attention)
    hungry = alone * (row["seconds"] - others) / measured
    predicted = alone * CLOCKS.slower(hungry / (hungry + others))
    assert predicted == pytest.approx(measured, rel=0.04)


@given(st.floats(0, 1), st.floats(0, 1))
def test_more_products_slow_each_of_them_more(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert 1 <= CLOCKS.slower(low) <= CLOCKS.slower(high) + 1e-6 <= 1.21


def test_the_limit_is_met() -> None:
    clocks = Clocks(1.4, 0.5, 1.6)
    for share in (0.7, 0.9, 1.0):
        s = clocks.slower(share)
        drawn = (share * clocks.compute * s ** (1 - clocks.exponent) + (1 - share) * clocks.other) / (share * s + 1 - share)
        assert drawn == pytest.approx(1.0, abs=1e-6)
    assert clocks.slower(0.5) == 1.0 and learn(1.0) is None
    found = learn(1.2)
    assert found is not None and found.slower(1.0) == pytest.approx(1.2, abs=0.002)


def test_watts_are_shared_within_a_window_and_no_further() -> None:
    near = [(1e-3, 1e-3), (0.0, 1e-3)] * 50
    assert slowdowns(near, CLOCKS) == [1.0] * 100, "half of the time waits for memory"
    far = [(1e-3, 1e-3)] * 200 + [(0.0, 1e-3)] * 200
    found = slowdowns(far, CLOCKS)
    assert found[100] == pytest.approx(CLOCKS.slower(1.0)) and found[300] == 1.0
    edge = int(1000 * WINDOW_SECONDS / 2)
    assert found[199] < found[200 - 2 * edge], "the last of them borrow from what follows"
    assert slowdowns([], CLOCKS) == []


@given(st.lists(st.tuples(st.booleans(), st.floats(1e-6, 0.04)), min_size=1, max_size=40), st.integers(0, 39))
def test_a_last_bit_moves_nothing(drawn: list[tuple[bool, float]], at: int) -> None:
    """Seconds differ in their last bits between CPUs; what follows from them must not jump."""
    work = [(seconds if product else 0.0, seconds) for product, seconds in drawn]
    product, seconds = drawn[at % len(drawn)]
    other = list(work)
    other[at % len(drawn)] = ((seconds * (1 + 1e-14)) if product else 0.0, seconds * (1 + 1e-14))
    assert slowdowns(other, CLOCKS) == pytest.approx(slowdowns(work, CLOCKS), rel=1e-9)
