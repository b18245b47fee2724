"""What would make a step faster: held against all combinations, and against the commands it prints."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell import api
from foretell.cli import main
from foretell.hardware import parse
from foretell.quantities import FITS, NO, Prediction
from foretell.search.advice import faster_ways
from foretell.search.advice.faster import faster
from foretell.search.advice.faster_ways import BOUNDED, CHANGES, EXACT, SpeedRequest
from foretell.simulate.memory.replay import peak_live
from foretell.trace.flow.unaligned import unaligned
from foretell.trace.load.model import Source, load
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.record.on_cpu import measure_on_cpu, trace_as_cpu

SMALL: dict[str, Any] = {"overrides": {"layers": 2, "dim": 128, "heads": 2}, "micro_batch": 2, "seq": 64, "precision": "fp32", "optimizer": "adamw"}


# ---------------------------------------------------------------- the search


@pytest.fixture(scope="module")
def answer() -> Prediction:
    return api.fit("gpt2", hardware="H200", **SMALL)


def question(**more: Any) -> SpeedRequest:
    given = {"recipe": Recipe(precision="fp32", optimizer="adamw"), "cluster": parse("H200"), "micro_batch": 2, "settings": ("vocab_size",)}
    return SpeedRequest(**{**given, **more})


def drawn_costs(draw: random.Random, answer: Prediction) -> Any:
    """A made-up world: every option has a factor of its own, larger batches gain less and less up to a point, and pairs of options
    help or hinder each other a little."""
    factors: dict[str, float] = {}
    most, slope = draw.choice((2, 4, 8, 32)), draw.uniform(0.05, 0.5)
    factors |= {f"micro_batch={size}": 1 + slope * (1 - 2 / min(size, most)) - 0.02 * max(0, size - most) / size for size in (4, 8, 16, 32)}

    def attempt(options: Mapping[str, Any]) -> Prediction:
        assert answer.throughput is not None and answer.time is not None
        names = sorted(f"{name}={json.dumps(value)}" for name, value in options.items())
        for name in names:
            factors.setdefault(name, math.exp(draw.gauss(0.1, 0.3)))
        for pair in itertools.combinations(names, 2):
            factors.setdefault("+".join(pair), math.exp(draw.gauss(0, 0.01)))
        speed = math.prod(factors[name] for name in names) * math.prod(factors["+".join(pair)] for pair in itertools.combinations(names, 2))
        return replace(answer, verdict=FITS, throughput=replace(answer.throughput, per_second=answer.throughput.per_second * speed))

    return attempt


@pytest.mark.parametrize("seed", range(20))
def test_the_best_is_near_the_best_of_all_combinations(seed: int, answer: Prediction) -> None:
    attempt, asked = drawn_costs(random.Random(seed), answer), question()
    found = faster(answer, asked, attempt)
    by_axis: dict[str, list[Any]] = {}
    for way in [*faster_ways.ways(asked, answer), *faster_ways.batches(asked)]:
        by_axis.setdefault(way.axis, [None]).append(way)
    best = 1.0
    for several in itertools.product(*by_axis.values()):
        options: dict[str, Any] = {}
        for way in several:
            options |= way.options if way is not None else {}
        then = attempt(options)
        assert then.throughput is not None and answer.throughput is not None
        best = max(best, then.throughput.per_second / answer.throughput.per_second)
    told = max([1.0, *(gain.speedup for gain in (*found.gains, *filter(None, [found.joint])))])
    assert told >= 0.95 * best


def test_changes_are_those_that_the_question_allows(answer: Prediction) -> None:
    def axes(**more: Any) -> set[str]:
        return {way.axis for way in faster_ways.ways(question(**more), answer)}

    assert axes() >= {"vocabulary", "format", "compile", "optimizer"} and "layout" not in axes() and "recompute" not in axes()
    assert "vocabulary" not in axes(settings=())
    assert "optimizer" not in axes(recipe=Recipe(precision="fp32"))
    assert "compile" not in axes(recipe=Recipe(compile="model")) and "compile" not in axes(cluster=parse("P100"))
    assert "recompute" in axes(recipe=Recipe(recompute="full"))
    old = [way for way in faster_ways.ways(question(cluster=parse("T4")), answer) if way.axis == "format"]
    assert [way.options["precision"] for way in old] == ["fp16-mixed"]
    assert {way.maths for way in faster_ways.ways(question(), answer)} == {EXACT, BOUNDED, CHANGES}


def test_micro_batches_of_a_step_are_joined_before_it_grows() -> None:
    sums = [way.options for way in faster_ways.batches(question(recipe=Recipe(accumulate=4), micro_batch=3))]
    assert sums == [{"micro_batch": 6, "accumulate": 2}, {"micro_batch": 12, "accumulate": 1}]
    assert all(way.maths == CHANGES for way in faster_ways.batches(question()))
    assert not list(faster_ways.batches(question(resizable=False)))


# ---------------------------------------------------------------- through the command line


def told(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    status = main([*words, "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.slow(reason="every change predicted twice; test_remedies.py asks a drawn one again")
def test_every_change_keeps_its_promise_when_asked_again(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["gpt2", "--on", "H200", "--set", "layers=1", "--set", "dim=128", "--set", "heads=2", "--micro-batch", "2", "--seq", "64",
             "--optimizer", "adamw"]  # fmt: skip
    status, found = told(["advise", *words], capsys)
    gains, unsure = [*found["faster"]["gains"], found["faster"]["joint"]], found["faster"]["unsure"]
    assert status == 0 and len(gains) > 2 and len(gains) + len(unsure) > 3 and found["faster"]["whole"]
    assert all(one["low"] > 1 for one in gains) and all(one["low"] <= 1 < one["speedup"] for one in unsure)
    assert [one["speedup"] for one in gains[:-1]] == sorted((one["speedup"] for one in gains[:-1]), reverse=True)
    assert gains[-1]["speedup"] > gains[0]["speedup"] and all(one["code"] and one["flag"] for one in gains)
    from foretell.report.command import with_flag

    for gain in (gains[0], gains[-1]):
        again = told(["fit", *with_flag(words, gain["flag"])], capsys)[1]
        assert again["time"]["step_seconds"] == pytest.approx(gain["step_seconds"], rel=1e-9)
        assert again["memory"]["device_bytes"] == gain["device_bytes"]
        assert again["throughput"]["per_second"] / found["throughput"]["per_second"] == pytest.approx(gain["speedup"], rel=1e-9)
    assert main(["advise", *words]) == 0
    screen = capsys.readouterr().out
    assert gains[0]["change"][:20] in screen and "in a plain loop" in screen and max(map(len, screen.splitlines()[:-1])) <= 120


def test_where_it_does_not_fit_advice_is_what_would_make_it(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = told(["advise", "gpt2", "--on", "H200,memory=1GiB", "--set", "layers=1", "--micro-batch", "8", "--seq", "128"], capsys)
    assert status == 1 and found["verdict"] == NO and found["faster"] is None and found["remedies"]


# ---------------------------------------------------------------- what is new to a step


def test_sizes_that_tensor_cores_do_not_like_are_found() -> None:
    trace = capture(lambda: load(Source(model="gpt-tiny", overrides={"vocab_size": 1001}, seq=32)), Recipe(precision="fp32"))
    assert list(unaligned(trace)) == ["1001"]
    trace = capture(lambda: load(Source(model="gpt-tiny", overrides={"vocab_size": 1024}, seq=32)), Recipe(precision="fp32"))
    assert not unaligned(trace)


def test_products_in_tf32_are_those_that_the_code_asks_for(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\ntorch.set_float32_matmul_precision('high')\nfrom torch import nn\n"
        "def build():\n    return nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)), torch.randn(4096, 512)\n"
        "def loss(output, batch): return output.mean()\n"
    )
    (tmp_path / "plain.py").write_text((tmp_path / "model.py").read_text().replace("torch.set_float32_matmul_precision('high')\n", ""))
    asked, plain, said = (
        api.fit(f"{tmp_path / name}:build", hardware="H200", precision=precision)
        for name, precision in (("model.py", "fp32"), ("plain.py", "fp32"), ("plain.py", "tf32"))
    )
    assert asked.time is not None and plain.time is not None and said.time is not None and asked.mfu is not None
    assert asked.time.device_seconds == said.time.device_seconds < 0.5 * plain.time.device_seconds
    assert asked.memory.allocated_bytes == plain.memory.allocated_bytes and asked.mfu.peak_dtype == "tf32"
    assert str(torch.backends.cuda.matmul.fp32_precision) != "tf32", "nothing is left behind"


def test_old_devices_have_no_tf32(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "gpt-tiny", "--on", "T4", "--precision", "tf32"]) == 2
    assert "no tf32 units" in capsys.readouterr().err


@pytest.mark.parametrize("model", [pytest.param("resnet-tiny", marks=pytest.mark.slow(reason="another model of convolutions")), "unet-tiny"])
def test_channels_last_takes_the_bytes_of_a_real_step(model: str) -> None:
    source, recipe = Source(model=model, micro_batch=2), Recipe(precision="fp32", channels_last=True)
    trace = trace_as_cpu(source, recipe)
    assert any("layout:" in str(attr) and "l" in str(attr)[7:] for op in trace.ops() for attr in op.attrs)
    assert peak_live(trace, tuple(trace.schedule)) == pytest.approx(measure_on_cpu(source, recipe)[0], rel=0.01)


def test_recorded_graphs_do_not_sum_gradients(answer: Prediction) -> None:
    asked = question(recipe=Recipe(accumulate=4))
    assert not faster_ways.legal(asked, {"compile": "graphs"}) and faster_ways.legal(asked, {"compile": "graphs", "accumulate": 1})
    seen: list[Mapping[str, Any]] = []
    faster(answer, asked, lambda options: (seen.append(options), answer)[1])
    assert seen and all(faster_ways.legal(asked, options) for options in seen)


def test_a_compiled_recurrent_net_is_priced_where_nobody_reads_its_state() -> None:
    plain, compiled = (api.fit("lstm-tiny", hardware="H200", compile=how) for how in (False, True))
    assert plain.time is not None and compiled.time is not None and compiled.time.step_seconds > 0
    assert compiled.time.breakdown["recurrent"] == pytest.approx(plain.time.breakdown["recurrent"], rel=0.05)


def test_a_size_that_is_not_the_vocabulary_is_not_taken_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["lstm-lm", "--on", "H200", "--set", "vocab_size=2003", "--set", "embed=1150", "--set", "layers=1", "--seq", "8"]
    found = told(["advise", *words], capsys)[1]
    assert {"1150", "2003"} <= set(found["model"]["unaligned"])
    sets = [one["flag"] for one in [*found["faster"]["gains"], found["faster"]["joint"] or {"flag": ""}] if "--set" in one["flag"]]
    assert all("vocab_size=2048" in flag for flag in sets) and not any("compile" in one["flag"] for one in found["faster"]["gains"])
