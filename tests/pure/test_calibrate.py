"""From measurements to predictions: factors that are known are found again, and the shipped H200 profile holds its rows."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from foretell.errors import UserError
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.price import host
from foretell.price.calibrate.fit import _serial, in_step
from foretell.price.machine import machine
from foretell.simulate.plan import Options, predict_step
from foretell.simulate.whole import Speed, speed
from foretell.simulate.wishes import Amount, RunRequest
from foretell.trace.recipe import Recipe
from foretell.trace.types import PARAMETER, Op, Program, Ref, Storage, TensorSpec, Trace
from tests.further import further

HOW = Options(profile_of=find_profile)
ROWS = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "benchmarks" / "results" / "time.jsonl").read_text().splitlines()
]


def test_factors_of_steps_that_were_made_with_them_are_found() -> None:
    rng = random.Random(1)
    steps = []
    for _ in range(30):
        product, other = rng.uniform(0.01, 0.1), rng.uniform(0.01, 0.1)
        steps.append(((product, other), 1.12 * product + 1.03 * other))
    found = in_step(steps)
    assert found["compute"] == pytest.approx(1.12, abs=0.02) and found["memory"] == pytest.approx(1.03, abs=0.02)
    assert in_step([]) == {}


def _trace(rng: random.Random) -> Trace:
    ref = Ref(0, TensorSpec((4, 4), "float32"))
    names = [("add.Tensor", "forward"), ("view.default", "forward"), ("mm.default", "backward"), ("t.default", "backward")]
    ops = tuple(Op(f"aten.{name}", (ref,), (ref,), "", phase, 1) for name, phase in names for _ in range(rng.randint(10, 300)))
    parameters = rng.randint(5, 60)
    return Trace(
        {"p": Program("p", ops)}, {"steady_step": (("p", 1),)}, {n: Storage(4, PARAMETER, "") for n in range(parameters)},
        tuple(range(parameters)),
    )  # fmt: skip


def test_a_cpu_whose_ops_take_longer_in_a_step_is_found_out() -> None:
    rng = random.Random(2)
    steps = []
    for _ in range(14):
        trace, alone = _trace(rng), rng.uniform(1e-3, 2e-2)
        around = sum(host.START[name] * count for name, count in host.counts(trace, {"": 0.0}).items())
        steps.append((trace, 1.6 * alone + around, alone))
    factor, model = _serial(steps)
    assert factor == pytest.approx(1.6, abs=0.101) and model.error < 0.05


# ---------------------------------------------------------------- the H200's own profile


def _answer(trace: Trace, hardware: str = "H200", **wishes: Any) -> Speed:
    cluster = parse(hardware)
    cost = predict_step(trace, Recipe(shards=cluster.count), cluster, HOW, micro_batch=8)
    return speed(cost, cluster, HOW, RunRequest(**wishes))


@pytest.fixture(scope="module")
def gpt2() -> Trace:
    from foretell.trace.load.model import Source, load
    from foretell.trace.recipe import Recipe
    from foretell.trace.record.capture import capture

    return capture(lambda: load(Source(model="gpt2", micro_batch=8, seq=1024)), Recipe())


def test_gpt2_on_an_h200_takes_what_was_measured(gpt2: Trace) -> None:
    """38.7 ms and 577 W were measured on an H200; this step helped to set the factors around ops, as one of eleven."""
    answer = _answer(gpt2)
    assert answer.time is not None and answer.throughput is not None and answer.energy is not None
    assert answer.time.low_seconds < 0.0387 < answer.time.high_seconds
    assert answer.time.step_seconds == pytest.approx(0.0387, rel=0.06)
    assert answer.energy.watts_per_device == pytest.approx(577, rel=0.15)
    assert answer.throughput.unit == "tokens" and answer.throughput.per_step == 8192
    assert answer.time.provenance == "measured"


def test_mfu_is_flops_over_peak(gpt2: Trace) -> None:
    answer = _answer(gpt2)
    assert answer.mfu is not None and answer.time is not None
    six = 6 * (124e6 + 12 * 1024 * 768) * 8192  # parameters, and causal attention: 6 · layers · length · width a token
    assert answer.mfu.flops_per_step == pytest.approx(six, rel=0.03)
    assert answer.mfu.value == pytest.approx(answer.mfu.flops_per_step / answer.time.step_seconds / 989e12, rel=0.01)


def test_a_device_without_a_profile_is_assumed_and_slower_where_its_rates_are(gpt2: Trace) -> None:
    own, other = _answer(gpt2), _answer(gpt2, "A100")
    assert own.time is not None and other.time is not None
    assert other.time.provenance == "assumed" and other.time.step_seconds > 1.8 * own.time.step_seconds
    assert any("carried over" in note for note in other.notes)
    width = [(t.high_seconds - t.low_seconds) / t.step_seconds for t in (own.time, other.time)]
    assert width[1] > width[0]


def test_a_run_of_tokens_samples_and_epochs(gpt2: Trace) -> None:
    tokens = _answer(gpt2, amount=Amount(number=1e9, unit="tokens")).run
    samples = _answer(gpt2, amount=Amount.of(tokens=None, samples=None, epochs=2, dataset_size=1e9 / 1024 / 2)).run
    assert tokens is not None and samples is not None
    assert tokens.steps == pytest.approx(1e9 / 8192, abs=1) and samples.steps == pytest.approx(tokens.steps, rel=1e-3)
    assert tokens.money is not None and tokens.joules is not None and tokens.carbon_kilograms is not None


def test_amounts_that_make_no_sense_are_refused() -> None:
    for given in ({"tokens": 1.0, "samples": 2.0}, {"epochs": 3.0}, {"tokens": -1.0}, {"samples": float("inf")}):
        with pytest.raises(UserError):
            Amount.of(**{"tokens": None, "samples": None, "epochs": None, "dataset_size": None, **given})


def test_no_profile_no_machine() -> None:
    assert machine(parse("H200").device, None) is None


# ---------------------------------------------------------------- rows of benchmarks/time.py


def _errors(host_bound: bool) -> list[float]:
    busy = [(row, row["measured"]["kernels"]["busy_us"] / 1e6 / row["measured"]["seconds"]) for row in ROWS]
    chosen = [row for row, share in busy if (share < 0.85) == host_bound]
    return sorted(abs(row["predicted"]["seconds"] / row["measured"]["seconds"] - 1) for row in chosen)


def test_the_measured_rows_say_what_the_documents_say() -> None:
    device, waiting = _errors(False), _errors(True)
    assert len(ROWS) >= 40 and len({row["config"]["model"] for row in ROWS}) >= 14
    assert statistics.median(device) <= 0.06 and statistics.quantiles(device, n=10, method="inclusive")[8] <= 0.15
    said = (Path(__file__).parents[2] / "docs" / "time.md").read_text()
    ninety = [100 * statistics.quantiles(errors, n=10, method="inclusive")[8] for errors in (device, waiting)]
    assert f"| device-bound | {len(device)} | {100 * statistics.median(device):.1f} % | {ninety[0]:.1f} % |" in said
    assert f"| host-bound | {len(waiting)} | {100 * statistics.median(waiting):.1f} % | {ninety[1]:.1f} % |" in said
    compiled = [row for row in ROWS if row["config"]["mode"] == "compiled"]
    memory = sorted(abs(row["predicted"]["allocated"] / row["measured"]["allocated"] - 1) for row in compiled)
    assert len(compiled) >= 15 and statistics.median(memory) <= 0.08 and memory[-1] <= 0.20


@pytest.mark.parametrize("name", further(["gpt2 seq=1024", "resnet50 micro_batch=32"], ["gpt2 seq=1024"], "another row of the same file"))
def test_saved_predictions_are_those_of_this_code(name: str) -> None:
    from foretell.trace.load.model import Source, load
    from foretell.trace.recipe import Recipe
    from foretell.trace.record.capture import capture

    row = next(row for row in ROWS if row["name"] == name)
    given = row["config"]
    source = Source(**{key: given[key] for key in ("model", "micro_batch", "seq", "image")})
    trace = capture(lambda: load(source), Recipe())
    time = predict_step(trace, Recipe(), parse("H200"), HOW, micro_batch=given["micro_batch"]).time
    assert time is not None
    assert time.step_seconds == pytest.approx(row["predicted"]["seconds"], rel=0.02)
