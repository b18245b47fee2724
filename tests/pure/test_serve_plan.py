"""Serving planned: keys and values by arithmetic, formats, ranks, what fits, the search, and the plan file."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretell import zoo
from foretell.cli import main
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.lower.serving import ROWS, TOKENS, StepShape, kept_bytes, kv_bytes, latent, layers_of_attention
from foretell.lower.serving_formats import refusal
from foretell.plan import file
from foretell.plan.types import Plan, ServeLayout
from foretell.price.speeds import Options
from foretell.search.serving.find import find, front
from foretell.search.serving.space import ServeQuestion
from foretell.simulate.serving.layout import LayoutCosts
from foretell.simulate.serving.load import load_of
from foretell.simulate.serving.records import Limit
from foretell.simulate.serving.run import capacity
from foretell.simulate.serving.scheduler import Scheduler
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.record.step import Workload
from foretell.trace.serving.programs import served
from foretell.trace.types import Trace
from tests.pure.test_serve_forecast import SIZES

RECIPE = Recipe(mode="infer", precision="bf16", packed=(TOKENS, ROWS))
DEEP = {**SIZES, "layers": 12}
WORDS = ["llama3-1b", *(part for name, value in SIZES.items() for part in ("--set", f"{name}={value}"))]


@functools.cache
def trace_of() -> Trace:
    entry = zoo.get("llama3-1b")
    return capture(lambda: Workload(zoo.load(entry).build(**{**entry.config, **DEEP}), {}), RECIPE)


def costs(hardware: str = "8xH100", **layout: Any) -> LayoutCosts:
    return LayoutCosts(trace_of(), RECIPE, parse(hardware), Options(profile_of=find_profile), ServeLayout(**{"graphs": True, **layout}))


# ---------------------------------------------------------------------- keys and values

MODELS: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "llama-3-8b": ("llama", {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}, 32, 32 * 2 * 8 * 128 * 2),
    "llama-3-70b": ("llama", {"hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8}, 80, 80 * 2 * 8 * 128 * 2),
    "llama-3-405b": ("llama", {"hidden_size": 16384, "num_attention_heads": 128, "num_key_value_heads": 8}, 126, 126 * 2 * 8 * 128 * 2),
    "llama-2-7b": ("llama", {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32}, 32, 32 * 2 * 32 * 128 * 2),
    "qwen3-0.6b": ("qwen3", {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}, 28, 28 * 2 * 8 * 128 * 2),
    "mistral-7b": ("mistral", {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": 4096}, 32, 131072),
    "deepseek-v3": ("deepseek_v3", {"first_k_dense_replace": 2}, 61, 61 * (512 + 64) * 2),
}


@functools.cache
def two_layers(name: str) -> Trace:
    transformers = pytest.importorskip("transformers")
    kind, settings, _, _ = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **{**settings, "num_hidden_layers": 2, "vocab_size": 1000, "intermediate_size": 256})
    build = lambda: served(Workload(transformers.AutoModelForCausalLM.from_config(config), {}), TOKENS, ROWS)  # noqa: E731
    return capture(build, Recipe(mode="infer", precision="bf16"))


@pytest.mark.parametrize("name", MODELS)
def test_keys_and_values_of_a_token_are_those_of_the_configuration(name: str) -> None:
    _, _, layers, expected = MODELS[name]
    trace = latent(two_layers(name))
    assert kv_bytes(trace) * layers == expected * 2
    assert kv_bytes(trace, "float8_e4m3fn") * 2 == kv_bytes(trace), "fp8: half"
    assert kv_bytes(trace, "int8", 2) > kv_bytes(trace, "float8_e4m3fn"), "int8 has scales"
    assert trace.meta.get("latent", False) == (name == "deepseek-v3")


def test_a_window_bounds_what_is_read_and_what_must_be_kept() -> None:
    trace = two_layers("mistral-7b")
    assert {layer.window for layer in layers_of_attention(trace)} == {4096}
    each = kv_bytes(trace)
    assert kept_bytes(trace, 2000) == 2000 * each and kept_bytes(trace, 100_000, 512) == (4096 + 512) * each
    assert kept_bytes(two_layers("llama-3-8b"), 100_000, 512) == 100_000 * kv_bytes(two_layers("llama-3-8b"))


# ---------------------------------------------------------------------- ranks and formats

SHAPES = [StepShape(1, 900, (), 1), StepShape(48, 48 * 1500, (), 48), StepShape(0, 0, ((0, 512),), 1), StepShape(20, 20 * 800, ((512, 236),), 20)]


@pytest.mark.parametrize("layout", [{}, {"compiled": False, "tp": 2}, {"tp": 2, "weights": "int4"}, {"tp": 4, "weights": "fp8", "kv": "fp8"}])
def test_steps_from_few_blocks_are_those_predicted_whole(layout: dict[str, Any]) -> None:
    """Of compiled steps those of one kind of rows: a step of both loses one attention of each layer where it is compiled whole."""
    found = costs(**layout)
    for shape in SHAPES if not found.layout.compiled else SHAPES[:3]:
        assert found.seconds(shape) == pytest.approx(found.whole(shape).seconds, rel=0.08), shape


def test_ranks_share_the_work_and_talk_about_it() -> None:
    alone, two, deep = costs(), costs(tp=2), costs(pp=2)
    shape = StepShape(64, 64 * 2000, (), 64)
    assert alone.whole(shape).message_seconds == 0 < two.whole(shape).message_seconds
    assert two.seconds(shape) < alone.seconds(shape) and two.token_bytes * 2 == alone.token_bytes == deep.token_bytes * 2
    one = StepShape(1, 2000, (), 1)
    assert deep.seconds(one) == pytest.approx(alone.seconds(one), rel=0.1), "one sequence goes through both stages"
    assert deep.seconds(one) == pytest.approx(sum(stage.seconds(one) for stage in deep.stages), rel=0.02)
    assert deep.seconds(shape) < alone.seconds(shape) * 1.2
    assert deep.weights_bytes < alone.weights_bytes and two.weights_bytes == pytest.approx(alone.weights_bytes / 2, rel=0.01)


def test_formats_take_fewer_bytes_and_help_small_steps() -> None:
    plain, four = costs(), costs(weights="int4")
    table = 32000 * 2048 * 2
    assert four.weights_bytes - table == pytest.approx((plain.weights_bytes - table) * 4.25 / 16, rel=0.01)
    crossover = four.crossover(plain)
    assert crossover is not None and 16 < crossover < 1024
    small, large = StepShape(4, 4 * 500, (), 4), StepShape(0, 0, ((0, 2048),), 1)
    assert four.seconds(small) < plain.seconds(small) and four.seconds(large) > plain.seconds(large)
    eight = costs(weights="fp8")
    assert eight.seconds(large) < plain.seconds(large), "its products are the device's own"
    reads = StepShape(64, 64 * 8000, (), 64)
    assert costs(kv="fp8").seconds(reads) < plain.seconds(reads) and costs(kv="fp8").token_bytes * 2 == plain.token_bytes


def test_a_device_without_a_kernel_says_so() -> None:
    found = refusal(parse("A100").device, "fp8", "bf16")
    assert found is not None and "A100" in found.problem and "int8 or int4" in found.remedy
    assert refusal(parse("MI300X").device, "int4", "bf16") is not None and refusal(parse("H100").device, "fp8", "fp8") is None


def test_pages_are_the_most_that_fit() -> None:
    found = costs(running=32, tokens=512)
    pages = found.most_pages()
    assert found.about_most_pages() == pytest.approx(pages, rel=0.02)
    largest = found.largest(pages)
    assert largest.verdict == "fits" and found.largest(pages + pages // 8).verdict != "fits"
    assert largest.weights_bytes + largest.pages_bytes + largest.step_bytes + largest.context_bytes == largest.memory.device_bytes


# ---------------------------------------------------------------------- the search


@pytest.fixture(autouse=True)
def _few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search asks for fewer of each rate, which is enough to tell these layouts apart."""
    monkeypatch.setattr("foretell.simulate.serving.run.MOST_REQUESTS", 600)
    monkeypatch.setattr("foretell.search.serving.find.WINDOW", 15.0)


@functools.cache
def question(goal: str = "throughput", hardware: str = "2xH100", tpot: float = 0.02) -> ServeQuestion:
    return ServeQuestion(
        trace=trace_of(), recipe=RECIPE, cluster=parse(hardware), options=Options(profile_of=find_profile),
        load=load_of("rate=20, in=300±100, out=60"), limit=Limit(ttft=0.5, tpot=tpot), goal=goal,
    )  # fmt: skip


def test_goals_choose_what_they_name() -> None:
    fast, few = find(question()), find(question("devices"))
    assert fast.best is not None and few.best is not None
    assert fast.best.layout.devices == 2 and few.best.layout.devices == 1
    assert fast.best.layout.replicas == 2, "replicas beat tp where the model fits"
    assert fast.best.capacity is not None and fast.best.capacity == max(one.capacity or 0.0 for one in fast.points)
    assert fast.best in front(fast) and fast.best.inside >= 0.95
    assert fast.best.dollars_per_million is not None


def test_nothing_that_keeps_the_limits_is_an_answer() -> None:
    found = find(question(tpot=0.0001))
    assert found.best is None and found.nearest is not None and found.nearest.inside < 0.95


def test_a_guess_changes_the_highest_rate_by_little() -> None:
    load, limit = load_of("rate=1, in=4, out=10"), Limit(ttft=0.5)

    def made() -> Scheduler:
        from tests.pure.test_serving import scheduler

        return scheduler(pages=1000, size=16, running=8, tokens=64)

    plain, near = (capacity(load, made, lambda _: 0.01, limit, 60.0, guess) for guess in (None, 30.0))
    assert plain is not None and near is not None and near[0] == pytest.approx(plain[0], rel=0.02)


# ---------------------------------------------------------------------- words


def test_a_plan_to_serve_goes_through_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = ServeLayout(replicas=2, tp=4, weights="int4", kv="fp8", pages=77, load="rate=8, in=1024±512, out=2", slo="tpot=40ms")
    plan = Plan(model={"model": "gpt2"}, hardware="8xH100", serve=layout)
    file.write(plan, tmp_path / "plan.json")
    assert file.read(tmp_path / "plan.json").serve == layout
    for command in (["run"], ["verify"], ["plan", "eject"], ["plan", "export", "--to", "torchtitan"]):
        assert main([*command, str(tmp_path / "plan.json")]) == 2
        assert "to serve a model" in (said := capsys.readouterr().err) and "foretell serve" in said
    assert main(["plan", "show", str(tmp_path / "plan.json")]) == 0
    assert "tp 4" in (said := capsys.readouterr().out) and "does not run int4 weights" in said
    assert main(["serve", str(tmp_path / "plan.json")]) == 2
    assert "does not run yet" in capsys.readouterr().err
    (tmp_path / "bad.json").write_text((tmp_path / "plan.json").read_text().replace('"int4"', '"int3"'))
    assert main(["plan", "show", str(tmp_path / "bad.json")]) == 2 and "int3" in capsys.readouterr().err
    file.write(replace(plan, serve=None), tmp_path / "train.json")
    assert main(["serve", str(tmp_path / "train.json"), "--on", "H100"]) == 2 and "a plan to train" in capsys.readouterr().err


def test_plan_serve_writes_what_serve_forecasts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "plan.json")
    asked = ["--on", "2xH100", "--load", "rate=20, in=300±100, out=60", "--slo", "ttft=500ms,tpot=20ms"]
    assert main(["plan", *WORDS, "--serve", *asked, "--out", out]) == 0
    said = capsys.readouterr().out
    assert "Best of" in said and "2 replicas" in said and "Trade-offs" in said and "What would help" in said and "per million tokens" in said
    assert file.read(out).serve is not None
    assert main(["serve", out, "--on", "2xH100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["forecast"]
    assert found["replicas"] == 2 and found["load"]["inside"] >= 0.95 and found["capacity_rate"] > 20 and found["timeline"]
    assert main(["plan", *WORDS, "--serve", *asked[:-1], "tpot=0.01ms", "--out", str(tmp_path / "none.json"), "--patience", "1"]) == 1
    assert "the nearest of" in capsys.readouterr().out and not (tmp_path / "none.json").exists()


def test_fit_serve_says_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *WORDS, "--serve", "--on", "H100", "--load", "users=4, in=200, out=30"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("FITS") and "at once" in said and "longest" in said and "logits" in said and "the model's positions" in said
    assert main(["fit", *WORDS, "--serve", "--on", "H100", "--pages", "700000", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["serving"]
    assert not found["fits"] and found["lacking_bytes"] > 0 and found["uses"][0]["what"] == "pages"
    assert any(one["change"] == "fewer pages" and one["runs_today"] for one in found["would_fit"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["fit", "mamba-130m", "--serve", "--on", "H100"], "no keys and values"),
        (["fit", "t5-small", "--serve", "--on", "H100"], "no keys and values"),
        (["fit", "bert-base", "--serve", "--on", "H100"], "no keys and values"),
        (["fit", "gpt2", "--on", "H100", "--pages", "4"], "--serve is not given"),
        (["fit", "gpt2", "--serve", "--on", "A100", "--weights", "fp8"], "no kernel"),
        (["fit", "gpt2", "--serve", "--on", "H100", "--kv", "x"], "not known"),
        (["fit", "gpt2", "--serve", "--on", "H100", "--micro-batch", "2"], "is of training"),
        (["fit", "gpt2", "--serve", "--on", "H100", "--page", "0"], "--page 0"),
        (["plan", "gpt2", "--serve", "--on", "H100"], "none is given"),
        (["plan", "gpt2", "--serve", "--load", "rate=1, in=9, out=9"], "are named"),
        (["plan", "gpt2", "--load", "rate=1, in=9, out=9"], "--serve is not given"),
        (["plan", "gpt2", "--may", "fp8", "--on", "H100"], "add --serve"),
        (["plan", "gpt2", "--serve", "--on", "8xH100", "--load", "rate=1, in=9, out=9", "--tp", "5"], "does not divide 12"),
        (["plan", "gpt2", "--serve", "--on", "H100", "--load", "rate=1, in=9, out=9", "--goal", "best"], "--goal best"),
        (["plan", "gpt2", "--serve", "--on", "H100", "--load", "rate=1, in=-9, out=9"], "no length"),
        (["plan", "gpt2", "--serve", "--on", "A100", "--load", "rate=1, in=9, out=9", "--may", "fp8"], "no kernel"),
        (["plan", "gptx", "--serve", "--on", "H100", "--load", "rate=1, in=9, out=9"], "gptx"),
        (["serve", "gpt2", "--weights", "int3"], "weights in int3 are not known"),
        (["serve", "gpt2", "--replicas", "2"], "--on 8xH100"),
        (["serve", "nowhere.json"], "no plan file"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") <= 1
