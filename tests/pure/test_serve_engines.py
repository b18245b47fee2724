"""Other engines on the one path: what a rank holds and sends, what narrow weights gain, who goes first, and commands that say so."""

from __future__ import annotations

import functools
import json
import random
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from foretell import zoo
from foretell.api.serving.compared import compared
from foretell.api.serving.engines import EngineAsked, forecast_engine
from foretell.cli import main
from foretell.errors import UserError
from foretell.export import serving
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.lower.serving import ATTEND, ROWS, TOKENS, StepShape, kv_bytes
from foretell.lower.serving_split import EngineForm, engine_step, engine_trace, reached, weights_bytes
from foretell.price.serving.engines import engine, engines
from foretell.price.serving.weights import FORMATS, MOST_READ
from foretell.price.speeds import Options
from foretell.search.traces.child import answer
from foretell.simulate.serving.engines import EngineCosts, EngineDevice
from foretell.simulate.serving.load import load_of
from foretell.simulate.serving.pages import Pages
from foretell.simulate.serving.run import simulated
from foretell.simulate.serving.scheduler import Scheduler, StepLimits
from foretell.trace.load.model import Source
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.record.step import Workload
from foretell.trace.sandbox.child import request
from foretell.trace.store.check import whole
from foretell.trace.store.file import loads
from foretell.trace.types import Trace

SIZES = {"layers": 2, "dim": 2048, "heads": 16, "kv_heads": 4, "ffn": 5632, "vocab_size": 32000}
RECIPE = Recipe(mode="infer", precision="bf16", packed=(TOKENS, ROWS))


@functools.cache
def traced(layers: int = 2) -> Trace:
    entry = zoo.get("llama3-8b")

    def build() -> Workload:
        return Workload(zoo.load(entry).build(**{**entry.config, **SIZES, "layers": layers}), {})

    return capture(build, RECIPE)


@functools.cache
def device(hardware: str = "H100", weights: str = "bf16") -> EngineDevice:
    cluster = parse(hardware)
    return EngineDevice((traced(),), (2,), 2, RECIPE, cluster, Options(profile_of=find_profile), cluster.count, weights)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ranks_share_weights_heads_and_words_and_sum_twice_a_layer(tp: int) -> None:
    one, rank = engine_trace(traced(), EngineForm()), engine_trace(traced(), EngineForm(tp=tp))
    assert weights_bytes(one) == sum(traced().storages[number].nbytes for number in traced().resident if number in one.storages
                                     and traced().storages[number].role == "parameter")  # fmt: skip
    norms = 5 * 2048 * 2
    assert weights_bytes(rank) - norms == (weights_bytes(one) - norms) // tp
    assert kv_bytes(rank) == kv_bytes(one) // tp
    ops = engine_step(rank, StepShape(8, 8 * 100, (), 8), 64).programs["forward"].ops
    sums = [op for op in ops if op.name == "foretell.all_reduce"]
    assert len(sums) == (4 if tp > 1 else 0) and all(op.bytes_read == 8 * 2048 * 2 for op in sums)
    products = [op for op in ops if op.name == "aten.mm.default"]
    assert len(products) == 2 * 4 + 1  # queries, keys and values are one, and so are gate and up
    assert sum(op.flops or 0 for op in products) == pytest.approx(2 * 8 * (weights_bytes(rank) / 2 - 32000 * 2048 / tp), rel=1e-3)


EXPERTS = {
    "num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 384,
    "num_local_experts": 16, "num_experts_per_tok": 4, "vocab_size": 1024,
}  # fmt: skip


@functools.cache
def mixture() -> Trace:
    reply = answer(request(Source(model="hf:mixtral", overrides=EXPERTS), RECIPE, (9, 0), {}))
    return whole(loads(reply["text"]))


def test_ranks_apart_have_whole_attention_and_a_part_of_the_experts() -> None:
    one, split, apart = (engine_trace(mixture(), EngineForm(tp=tp, apart=own)) for tp, own in ((1, False), (4, False), (4, True)))
    experts = 2 * 16 * 3 * 512 * 384 * 2
    assert weights_bytes(one) - weights_bytes(apart) == experts * 3 // 4 and kv_bytes(apart) == kv_bytes(one) == 2 * kv_bytes(split)
    ops = engine_step(apart, StepShape(8, 8 * 100, (), 8), 64).programs["forward"].ops
    exchanged = [(op.name, op.bytes_read) for op in ops if op.name.startswith("foretell.") and op.inputs]
    assert exchanged == [("foretell.all_gather", 8 * 4 * 512 * 2), ("foretell.reduce_scatter", 8 * 4 * 512 * 2)] * 2
    grouped = [op.inputs[1].spec.shape[0] for op in ops if op.name == "aten._grouped_mm.default"]
    assert set(grouped) == {4}, "32 tokens of four ranks reach all experts of a rank"


def test_stages_share_layers_and_take_turns() -> None:
    cluster = parse("2xH100")
    whole, half = (EngineDevice((traced(2), traced(4)), (2, 4), 8, RECIPE, cluster, Options(profile_of=find_profile), pp=pp) for pp in (1, 2))
    assert half.token_bytes == whole.token_bytes // 2 and half.weights_bytes < 0.7 * whole.weights_bytes
    profile = replace(engine("vllm", "2024"), host_seconds=0.0, host_sequence_seconds=0.0)
    prompt = StepShape(0, 0, tuple((0, 1024) for _ in range(8)), 8)
    assert 0.45 < EngineCosts(half, profile).seconds(prompt) / EngineCosts(whole, profile).seconds(prompt) < 0.6, "both compute at once"
    few = StepShape(2, 1000, (), 2)  # each stage reads its weights once for either sequence
    assert EngineCosts(half, profile).seconds(few) > 0.9 * EngineCosts(whole, profile).seconds(few)


def test_products_of_few_rows_read_no_faster_than_memory_gives() -> None:
    for name in ("RTX-4090", "A100-SXM-40GB", "H100", "MI300X"):
        one = device(name)
        read = one.weights_bytes - 32000 * 2048 * 2
        assert one.seconds(StepShape(1, 2, (), 1)) > read / (MOST_READ * one.cluster.device.memory_bandwidth_bytes_per_second)


def test_a_host_launches_prompts_one_kernel_after_another_and_compiles_experts_once() -> None:
    profile = replace(engine("vllm", "0.5.4"), host_seconds=0.0, host_sequence_seconds=0.0)
    prompt, costs = StepShape(0, 0, ((0, 16),), 1), EngineCosts(device(), profile)
    assert costs.seconds(prompt) == pytest.approx(device().launches * profile.launch_seconds)
    assert costs.seconds(StepShape(1, 16, (), 1)) < 0.5 * costs.seconds(prompt)
    experts = EngineDevice((mixture(),), (2,), 2, RECIPE, parse("H100"), Options(profile_of=find_profile))
    cold, warm, large = EngineCosts(experts, profile, cold=True), EngineCosts(experts, profile), StepShape(0, 0, ((0, 600),), 1)
    assert [cold.seconds(large) - warm.seconds(large) for _ in range(2)] == pytest.approx([profile.expert_compile_seconds, 0])


def test_heads_that_are_fewer_than_ranks_are_copied() -> None:
    rank = engine_trace(traced(), EngineForm(tp=8))
    attends = [op for op in rank.programs["forward"].ops if op.name == ATTEND]
    assert [ref.spec.shape[1] for ref in attends[0].inputs] == [2, 1, 1]
    assert kv_bytes(rank) == 2 * 2 * 128 * 2


def test_steps_of_an_engine_are_shorter_than_eager_ones_and_longer_than_their_bytes() -> None:
    found = device().seconds(StepShape(1, 500, (), 1))
    read = (weights_bytes(device().parts[0].trace) - 32000 * 2048 * 2) / 3.35e12
    assert read < found < 3 * read


@pytest.mark.parametrize("weights", sorted(set(FORMATS) - {"bf16"}))
def test_narrow_weights_help_where_reading_them_binds_and_cost_nothing_elsewhere(weights: str) -> None:
    plain, narrow = device(), device("H100", weights)
    few, prompt = StepShape(1, 500, (), 1), StepShape(0, 0, ((0, 4096),), 1)
    assert narrow.weights_bytes < 0.8 * plain.weights_bytes
    assert narrow.seconds(few) < 0.97 * plain.seconds(few)
    assert narrow.seconds(prompt) <= 1.01 * plain.seconds(prompt)


def test_experts_that_tokens_reach() -> None:
    assert [round(reached(8, 2 * tokens, tokens), 1) for tokens in (1, 4, 8)] == [2.0, 5.5, 7.2]  # of Mixtral
    assert round(reached(256, 8 * 32, 32)) == 163


def test_prompts_that_go_first_are_whole_and_alone() -> None:
    scheduler = Scheduler(Pages(100, 16), StepLimits(running=8, tokens=64, prompts_first=True))
    served = simulated(load_of("all=5, in=30, out=4"), scheduler, lambda shape: (assert_alone(shape), 0.01)[1], 10)
    assert len(served.answers) == 5 and max(one.ttft for one in served.answers) == pytest.approx(0.03)


def assert_alone(shape: StepShape) -> None:
    assert not shape.chunks or (not shape.generating and all(piece == (0, 30) for piece in shape.chunks))


@pytest.mark.parametrize("seed", range(5))
def test_with_pages_reserved_none_is_preempted(seed: int) -> None:
    source = random.Random(seed)
    load = load_of(f"all=60, in=1..{source.randint(20, 200)}, out=1..{source.randint(20, 200)}, seed={seed}")
    free = Scheduler(Pages(40, 16), StepLimits(running=16, tokens=64))
    kept = Scheduler(Pages(40, 16), StepLimits(running=16, tokens=64, reserves=True))
    served = simulated(load, kept, lambda _: 0.01, 10)
    crowded = simulated(load, free, lambda _: 0.01, 10)
    assert served.preemptions == 0 and len(served.answers) == 60 and kept.pages.available == 40
    assert crowded.preemptions > 0 or seed


def test_two_stacks_stand_for_all_layers() -> None:
    cluster = parse("H100")
    four = EngineDevice((traced(4),), (4,), 4, RECIPE, cluster, Options(profile_of=find_profile))
    both = EngineDevice((traced(2), traced(3)), (2, 3), 4, RECIPE, cluster, Options(profile_of=find_profile))
    shape = StepShape(16, 16 * 300, (), 16)
    assert both.seconds(shape) == pytest.approx(four.seconds(shape), rel=0.01)
    assert (both.weights_bytes, both.token_bytes) == (four.weights_bytes, four.token_bytes)


def test_engines_by_name_and_version() -> None:
    assert engine("vllm", "v0.5.4").prompts_first and engine("vllm", "2024", "rocm").backend == "rocm" and not engine("vllm", "0.23.0").prompts_first
    assert engine("vllm", "v0.6.0 steps10") != engine("vllm", "v0.6.0 steps1")
    assert engine("vllm", "9.9") == engine("vllm") == engines()[0]
    assert all(one.source for one in engines())
    with pytest.raises(UserError, match="unknown engine 'vlm'"):
        engine("vlm")


def test_a_model_that_leaves_no_pages_is_refused_with_why() -> None:
    costs = EngineCosts(device("RTX-4090"), engine("vllm"))
    assert costs.pages > 0
    with pytest.raises(UserError, match="leave no pages"):
        costs.scheduler(pages=0)


FORECAST = {
    "model": "hf:org/name", "device": "H100-SXM-80GB", "engine": "vllm", "tp": 2, "weights": "fp8", "running": 256, "step_tokens": 8192,
    "memory_share": 0.9, "longest": 2048, "pages": 1000, "page_tokens": 32, "weights_bytes": 2**33,
}  # fmt: skip


@pytest.mark.parametrize("tool", sorted(serving.TOOLS))
def test_a_launch_command_has_a_reason_for_each_flag(tmp_path: Path, tool: str) -> None:
    path = tmp_path / "serving.json"
    path.write_text(json.dumps({"forecast": FORECAST}))
    assert main(["plan", "export", str(path), "--to", tool, "--out", str(tmp_path / "out")]) == 0
    lines = (tmp_path / "out" / "serve.sh").read_text().splitlines()
    words = shlex.split(" ".join(line.rstrip("\\") for line in lines if not line.startswith("#")))
    flags = [word for word in words if word.startswith("--") and word != "--model-path"]
    assert flags and all(any(line.startswith(f"# {flag} ") for line in lines) for flag in flags)
    assert "org/name" in words and words[words.index("--quantization") + 1] == "fp8"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [({"model": "llama3-8b"}, "cannot load llama3-8b"), ({"tp": 0}, "counts below one"), ({"pages": None}, "no forecast of another engine")],
)
def test_what_no_command_can_say_is_one_line(tmp_path: Path, wrong: dict[str, object], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "serving.json"
    path.write_text(json.dumps({"forecast": FORECAST | wrong}))
    assert main(["plan", "export", str(path), "--to", "vllm", "--out", str(tmp_path / "out")]) == 2
    assert told in capsys.readouterr().err


def test_names_in_a_command_are_quoted() -> None:
    plan = serving.ServingPlan(**{**FORECAST, "model": "hf:a/b; rm -rf ~\nx"})  # type: ignore[arg-type]
    text = serving.vllm(plan).files["serve.sh"]
    assert "'a/b; rm -rf ~\nx'" in text and all(line.startswith("#") or "rm" not in line or "'a/b" in line for line in text.splitlines())


def test_the_fastest_of_several_is_the_one_whose_own_forecast_is(capsys: pytest.CaptureFixture[str]) -> None:
    asked = EngineAsked(model="llama3-1b", hardware="H100", engine="", overrides={"layers": 2}, load=load_of("users=32, in=512, out=64"), seconds=5)
    names = ("foretell", "sglang", "vllm:0.5.4", "trtllm:2024")
    found = compared(asked, names)
    alone = {name: forecast_engine(replace(asked, engine=name)).load for name in names[1:]}
    assert {one.engine: one.load for one in found.engines if one.engine != "foretell"} == alone
    assert found.fastest is not None and found.fastest.rate >= 0.98 * max(one.rate for one in found.engines)
    assert found.engines[-1].engine == "vllm:0.5.4" not in found.close, "its host takes more for a token than all others together"
    narrow = compared(replace(asked, weights="fp4"), ("foretell", "vllm"))
    assert narrow.engines[1].engine == "foretell" and narrow.engines[1].refused == "foretell has no weights in fp4"
    words = ["serve", "llama3-1b", "--set", "layers=2", "--on", "H100", "--load", "users=32, in=512, out=64", "--engine"]
    assert main([*words, "vllm,sglang"]) == 0
    assert "fastest   " in capsys.readouterr().out
    assert main([*words, "vllm,sglong"]) == 2 and "did you mean sglang" in capsys.readouterr().err
    with pytest.raises(UserError, match="compared by a load"):
        compared(replace(asked, load=None), names)
