"""Ranges of what changes gain: narrow where the device is busy, wide where the step waits for its host; and what is not sure is told apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from foretell import api
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.price.machine import machine
from foretell.price.speeds import alone
from foretell.quantities import ASSUMED, FITS, MEASURED, Prediction, Time
from foretell.report.terminal.faster import lines, top
from foretell.search.advice.faster import Advice, faster, told_apart
from foretell.search.advice.faster_ways import SpeedRequest
from foretell.search.advice.gain_range import APART, HOST, MEASURE, gain_range, step_at
from foretell.simulate.time.step import plan_time
from foretell.trace.inductor.compiled import compile_trace
from foretell.trace.load.model import Source, load
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.types import Trace


def time(step: float, device: float, host: float, provenance: str = MEASURED) -> Time:
    return Time(
        step_seconds=step, low_seconds=step, high_seconds=step, breakdown={}, phases={}, binds="", provenance=provenance, device_seconds=device,
        host_seconds=host, waiting_for_host_seconds=step - device,
    )  # fmt: skip


def test_a_busy_device_gains_what_is_predicted_and_a_waiting_one_by_its_host() -> None:
    busy = gain_range(time(1.0, 1.0, 0.2), time(0.6, 0.6, 0.2), 1 / 0.6, "vocabulary")
    assert 1.4 < busy[0] < 1 / 0.6 < busy[1] < 1.95
    waiting = gain_range(time(1.0, 0.4, 1.0), time(0.4, 0.4, 0.1), 2.5, "compile")
    assert waiting[0] < HOST[0] / 0.4 and waiting[1] > HOST[1] / 0.4 - 1e-9 and waiting[0] > 1
    assert gain_range(time(1.0, 0.4, 1.0, ASSUMED), time(0.4, 0.4, 0.1, ASSUMED), 2.5, "compile")[0] < waiting[0]


def test_a_gain_within_what_hosts_differ_by_is_not_sure() -> None:
    """A step that waits for its host, compiled to three quarters of the host's work: another host's may be as long as before."""
    low, high = gain_range(time(1.0, 0.3, 1.0), time(0.75, 0.25, 0.75), 1 / 0.75, "compile")
    assert low < 1 < high
    low, high = gain_range(time(1.0, 0.1, 1.0), time(1.0, 0.4, 1.0), 4.0, "batch")  # the same calls, so the same host
    assert low > 3 and high < 5


def test_a_quick_host_takes_the_gain_of_what_helps_the_host() -> None:
    """TF32 of a step that waits for its host once the products are quick: gains most where the host is quickest."""
    before, after = time(1.0, 1.0, 0.9), time(0.9, 0.4, 0.9)
    low, high = gain_range(before, after, 1 / 0.9, "format")
    assert low < 1 and high == pytest.approx(1 / (HOST[0] * 0.9), rel=0.15)


def test_hosts_that_compute_have_one_pace() -> None:
    low, high = gain_range(time(1.0, 0.6, 1.0), time(0.5, 0.3, 0.5), 2.0, "compile", serial=True)
    assert high / low < gain_range(time(1.0, 0.6, 1.0), time(0.5, 0.3, 0.5), 2.0, "compile")[1] / low
    assert 1.5 < low < 2 < high < 2.6


def eager(model: str = "gpt-tiny", **more: Any) -> Trace:
    return capture(lambda: load(Source(model=model, **more)), Recipe(precision="bf16-autocast", optimizer="adamw"))


@pytest.mark.parametrize(("model", "batch", "pace"), [
    ("gpt-tiny", 2, HOST[0]), ("gpt-tiny", 2, HOST[1]), ("gpt2", 8, HOST[0]),
    pytest.param("gpt2", 8, HOST[1], marks=pytest.mark.slow(reason="a smaller model at that pace")),
])  # fmt: skip
def test_a_step_at_another_pace_is_about_what_the_timeline_says(model: str, batch: int, pace: float) -> None:
    cluster = parse("H200")
    known = machine(cluster.device, find_profile(cluster.device.name))
    assert known is not None
    trace = eager(model, micro_batch=batch, **({"seq": 256} if model == "gpt2" else {}))
    plain, _ = plan_time(trace, alone(known))
    other, _ = plan_time(trace, replace(alone(known), host_slowdown=pace))
    assert step_at(plain, pace) == pytest.approx(other.step_seconds, rel=0.1)


def test_a_model_that_reads_values_is_compiled_in_pieces() -> None:
    """OPT reads a number in each of six layers; a plain loop on an H200 took 26.9 ms compiled (benchmarks/results/advice_gpu.jsonl, 25.2 to
    28.6), and 47.0 ms with twelve layers (unseen.jsonl); as one graph they would take 14.5 and 24."""
    cluster = parse("H200")
    known = machine(cluster.device, find_profile(cluster.device.name))
    assert known is not None
    for layers, micro_batch, seq, more, measured in ((6, 8, 512, {}, 0.0269),):
        trace = eager("hf:opt", micro_batch=micro_batch, seq=seq, overrides={"num_hidden_layers": layers, **more})
        compiled = compile_trace(trace)
        whole = replace(compiled, meta={**compiled.meta, "compiled": {**dict(compiled.meta["compiled"]), "breaks": 0}})  # type: ignore[call-overload]
        broken, one = (plan_time(each, alone(known))[0].step_seconds for each in (compiled, whole))
        assert abs(broken / measured - 1) < 0.2 < abs(one / measured - 1)


# ---------------------------------------------------------------- what is told


@pytest.fixture(scope="module")
def answer() -> Prediction:
    small = {"overrides": {"layers": 2, "dim": 128, "heads": 2}, "micro_batch": 2, "seq": 64, "precision": "fp32", "optimizer": "adamw"}
    return api.fit("gpt2", hardware="H200", **small)


def told(answer: Prediction, factors: Mapping[str, float]) -> Advice:
    """Advice of a world where options make the host's part of a step quicker by factors."""
    assert answer.time is not None and answer.throughput is not None
    base, rate = time(1.0, 0.1, 1.0), answer.throughput
    now = replace(answer, time=base)

    def attempt(options: Mapping[str, Any]) -> Prediction:
        factor = 1.0
        for name in options:
            factor *= factors.get(name, 0.9)
        return replace(now, verdict=FITS, time=time(1 / factor, 0.1, 1 / factor), throughput=replace(rate, per_second=rate.per_second * factor))

    recipe = Recipe(precision="fp32", optimizer="adamw")
    return faster(now, SpeedRequest(recipe=recipe, cluster=parse("H200"), micro_batch=2, resizable=False), attempt)


def test_what_may_gain_nothing_is_no_advice(answer: Prediction) -> None:
    """Faster in the middle by less than what is not known of compiled steps: told apart, with its range, and not as a gain."""
    found = told(answer, {"compile": 1.2, "optimizer": 1.6})
    assert [gain.change for gain in found.gains] == ["the fused optimizer"] and found.gains[0].low > 1
    assert len(found.unsure) == 1 and found.unsure[0].change.startswith("torch.compile")  # the better of the two ways alone
    assert found.unsure[0].low <= 1 < found.unsure[0].speedup < found.unsure[0].high
    assert found.joint is not None and found.joint.low > 1 and MEASURE in found.joint.costs
    words = ["advise", "gpt2", "--on", "H200"]
    shown = "\n".join(lines(answer, found, words, 200))
    assert shown.index("the fused optimizer") < shown.index(f"\n{MEASURE}\n") < shown.rindex("torch.compile [")
    assert "torch.compile" not in "\n".join(top(found, words, 200))


def test_a_way_that_is_not_sure_is_not_told_beside_one_that_is(answer: Prediction) -> None:
    found = told(answer, {"compile": 1.2, "optimizer": 1.6})
    unsure, sure = found.unsure[0], found.gains[0]
    other = replace(sure, change="torch.compile with CUDA graphs")
    assert told_apart([("compile", unsure), ("compile", other), ("optimizer", sure)]) == ((other, sure), ())
    assert told_apart([("compile", unsure), ("optimizer", sure)]) == ((sure,), (unsure,))


def test_nothing_sure_is_said_so(answer: Prediction) -> None:
    found = told(answer, {"compile": 1.1, "optimizer": 1.02})
    shown = "\n".join(lines(answer, found, ["advise", "gpt2", "--on", "H200"], 200))
    assert not found.gains and found.joint is None and "for sure" in shown and MEASURE in shown
    assert not top(found, ["advise", "gpt2", "--on", "H200"], 200)


def test_a_range_is_printed_where_it_is_wide(answer: Prediction) -> None:
    (gain,) = told(answer, {"optimizer": 1.6}).gains
    assert gain.high / gain.low > 1 + APART and gain.told_range in "\n".join(lines(answer, told(answer, {"optimizer": 1.6}), ["advise", "gpt2"], 200))
    assert not replace(gain, low=1.5, high=1.7).told_range
