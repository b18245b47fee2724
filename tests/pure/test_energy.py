"""Watts, joules, money and carbon against figures worked out by hand, and a power law that is known."""

from __future__ import annotations

import random

import pytest

from foretell.hardware import parse
from foretell.price.energy import DeviceLoad, PowerModel, cost, energy, learn, load_of, usual, whole_run
from foretell.quantities import ASSUMED, MEASURED, Throughput, Time
from foretell.trace.types import Op, Program, Ref, TensorSpec, Trace

STEP = Time(
    step_seconds=0.5, low_seconds=0.4, high_seconds=0.7, breakdown={}, phases={}, binds="compute", provenance=MEASURED,
    device_seconds=0.5, host_seconds=0.1,
)  # fmt: skip


def test_a_known_power_law_is_found_again() -> None:
    rng = random.Random(1)
    true = {"idle": 90.0, "awake": 200.0, "compute": 500.0, "memory": 400.0}
    model = PowerModel(weights=true, limit=1000.0)
    loads = [DeviceLoad(rng.random(), rng.uniform(0, 0.5), rng.uniform(0, 0.5)) for _ in range(40)]
    found = learn([(load, model.watts(load)) for load in loads], 1000.0)
    for load in (DeviceLoad(1.0, 0.4, 0.1), DeviceLoad(0.2, 0.0, 0.1), DeviceLoad(0.9, 0.1, 0.45)):
        assert found.watts(load) == pytest.approx(model.watts(load), rel=0.06)
    assert found.error < 0.06


def test_watts_never_pass_the_limit() -> None:
    model = PowerModel(weights={"idle": 100, "awake": 300, "compute": 600, "memory": 600}, limit=700)
    assert model.watts(DeviceLoad(1, 1, 1)) == 700 and model.watts(DeviceLoad(0, 0, 0)) == 100


def test_a_device_never_read_borrows_shares_of_its_own_limit() -> None:
    device = parse("L4").device
    model = usual(device)
    assert model is not None and model.provenance == ASSUMED
    assert device.tdp_watts is not None and model.watts(DeviceLoad(1, 1, 1)) == device.tdp_watts


def test_load_of_a_product_and_an_addition() -> None:
    device = parse("H200").device
    a, out = TensorSpec((1024, 1024), "bfloat16"), TensorSpec((1024, 1024), "bfloat16")
    product = Op("aten.mm.default", (Ref(0, a), Ref(1, a)), (Ref(2, out),), "", "forward", 2 * 1024**3)
    view = Op("aten.view.default", (Ref(0, a),), (Ref(0, a),), "", "forward", 0)
    trace = Trace({"p": Program("p", (product, view))}, {"steady_step": (("p", 2),)}, {}, ())
    load = load_of(trace, device, 1e-3, 5e-4)
    assert load.busy == 0.5
    assert load.compute == pytest.approx(2 * 2 * 1024**3 / device.peak("bfloat16") / 1e-3)
    assert load.memory == pytest.approx(2 * 3 * 2 * 1024**2 / device.memory_bandwidth_bytes_per_second / 1e-3)


def test_joules_and_carbon_of_a_step() -> None:
    model = PowerModel(weights={"idle": 100, "awake": 0, "compute": 0, "memory": 0}, limit=700)
    found = energy(STEP, model.watts(DeviceLoad(1, 0, 0)), model, 8, (360.0, "a grid"), pue=1.5)
    assert found.joules_per_step == 100 * 0.5 * 8
    assert found.carbon_grams_per_step == pytest.approx(400 * 1.5 / 3.6e6 * 360)
    assert found.low_joules < found.joules_per_step < found.high_joules and found.provenance == MEASURED


def test_money() -> None:
    through = Throughput(unit="tokens", per_step=1_000_000, per_second=2e6, per_second_per_device=250e3)
    found = cost(STEP.step_seconds, through, 3.0, "a list", 8)
    assert found.per_hour == 24 and found.per_step == pytest.approx(24 * 0.5 / 3600)
    assert found.per_billion == pytest.approx(1000 * 24 * 0.5 / 3600)


def test_a_whole_run() -> None:
    run = whole_run(1e9 + 1, "tokens", 1_000_000, STEP, 8, energy=None, cost=None, embodied_kg_per_device=164.0, lifetime_years=4)
    assert run.steps == 1001 and run.seconds == pytest.approx(500.5) and run.high_seconds == pytest.approx(700.7)
    assert run.device_years == pytest.approx(8 * 500.5 / (365.25 * 86400))
    assert run.embodied_carbon_kilograms == pytest.approx(164.0 * run.device_years / 4)
    assert run.money is None and run.joules is None


def test_a_planned_run_is_its_steps() -> None:
    """Hours, dollars and joules of whole steps, with what a plan says of one; nothing where it says no seconds."""
    from foretell.price.energy import planned_run

    said = {"step_seconds": 0.5, "low_seconds": 0.4, "high_seconds": 0.7, "tokens_per_step": 300, "dollars_per_step": 0.01, "joules_per_step": 7.0}
    run = planned_run(1000, "tokens", said, 8)
    assert run is not None and (run.steps, run.seconds, run.low_seconds, run.high_seconds) == (4, 2.0, 1.6, 2.8)
    assert (run.money, run.joules, run.carbon_kilograms) == (0.04, 28.0, None)
    assert run.device_years == pytest.approx(8 * 2.0 / (365.25 * 86400))
    assert planned_run(1000, "tokens", {"tokens_per_step": 300}, 8) is None
