"""Published serving rows: what is asked of each, what is refused and why, and how answers are scored."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ROW = {
    "id": "one", "source": "s", "engine": "vLLM", "engine_version": "v0.5.4", "model": "meta-llama/Meta-Llama-3-8B", "gpu": "H100-SXM-80GB",
    "gpu_mem_gb": "80", "gpus": "2", "tp": "2", "weights": "fp8", "input_len": "512", "output_len": "128", "lengths": "fixed", "load_kind": "batch",
    "load": "16", "num_requests": "16", "output_tok_s": "1000", "latency_s": "2.048",
}  # fmt: skip


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("serve_rows")


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("serve_published")


def test_a_row_is_a_question(rows: ModuleType) -> None:
    found = rows.read(ROW)
    assert (found.engine.name, found.engine.prompts_first, found.tp, found.replicas, found.weights) == ("vllm", True, 2, 1, "fp8")
    assert found.cluster.count == 2 and found.model.layers == 32 and len(found.load.recorded) == 16
    assert found.published == {"output_tok_s": 1000.0, "latency": 2.048}
    assert rows.read({**ROW, "gpus": "8"}).replicas == 4
    staged = rows.read({**ROW, "gpus": "8", "pp": "2"})
    assert (staged.pp, staged.replicas, staged.cluster.count) == (2, 2, 4)
    limited = rows.read({**ROW, "notes": "max_num_seqs 64, max_model_len 3000"}).engine
    assert (limited.running, limited.tokens) == (64, 3000) and found.engine.tokens == 8192
    experts = {"engine": "TensorRT-LLM", "engine_version": "v1.0", "model": "Qwen3-30B-A3B", "load_kind": "offline", "num_requests": "3000"}
    apart = rows.read({**ROW, **experts})
    assert apart.apart and apart.replicas == 2 and len(apart.load.recorded) == 1500 and not found.apart
    assert len(rows.read({**ROW, "load_kind": "burst", "num_requests": "5000"}).load.recorded) == rows.MOST_CONNECTIONS
    assert not rows.read({**ROW, "engine": "SomeNew"}).known


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"model": "nobody/has-this-9b"}, "model not known"), ({"model": "deepseek-ai/DeepSeek-V3"}, "latent space"),
        ({"model": "facebook/opt-6.7b", "input_len": "2000"}, "positions: 2128 tokens of 2048"),
        ({"gpu": "Abacus-3"}, "not in the catalogue"),
        ({"gpu": "GH200-144GB", "gpu_mem_gb": "144"}, "not in the catalogue with that memory"), ({"gpu": ""}, "GPU not given"),
        ({"weights": "int3-odd"}, "weights: int3-odd"), ({"input_len": ""}, "lengths"), ({"gpus": "", "tp": ""}, "number of GPUs"),
        ({"ep": "2"}, "expert"),
        ({"engine": ""}, "engine: none given"), ({"spec_decode": "eagle"}, "speculative"), ({"pp": "2"}, "2 GPUs, tp 2, pp 2"),
        ({"load_kind": "prefill"}, "load"),
        ({"output_tok_s": "", "latency_s": ""}, "nothing measured"), ({"tp": "3"}, "2 GPUs, tp 3, pp 1"),
    ],
)  # fmt: skip
def test_what_a_row_leaves_open_is_said(rows: ModuleType, wrong: dict[str, str], why: str) -> None:
    with pytest.raises(rows.LeftOut, match=why):
        rows.read({**ROW, **wrong})


def test_whatever_stands_in_a_table_is_a_question_or_a_reason(published: ModuleType) -> None:
    source = random.Random(0)
    odd = ["", "-1", "0", "nan", "inf", "1e99", "all at once", "7.5", "x" * 300, "é", "16 or 32", None]
    spoiled = lambda value: source.choice(odd) if source.random() < 0.08 else value  # noqa: E731
    lines = [{name: spoiled(value) for name, value in ROW.items()} | {"id": str(number)} for number in range(400)]
    rows, why = published.rows_of([*lines, {}])
    assert rows and why and len(rows) + len(why) == 401 and all(why.values())


def test_texts_have_the_means_that_a_row_says(rows: ModuleType) -> None:
    texts = {"load_kind": "burst", "num_requests": "640", "lengths": "ShareGPT, means given", "input_len": "230", "output_len": "210"}
    found = rows.read({**ROW, **texts})
    prompts, answers = ([getattr(one, name) for one in found.load.recorded] for name in ("prompt", "output"))
    assert sum(prompts) / 640 == pytest.approx(230, rel=0.02) and sum(answers) / 640 == pytest.approx(210, rel=0.02)
    assert max(prompts) == 1024 and min(prompts) < 5
    few = rows.read({**ROW, **texts, "num_requests": "10"}).load.recorded
    assert sum(one.output for one in few) / 10 == pytest.approx(210, rel=0.02) and 3 < max(one.output for one in few) / 210 < 3.5


def test_what_is_sealed_follows_from_names_alone(published: ModuleType) -> None:
    names = [f"source {number}" for number in range(20)]
    found = published.sealed_sources([*names, *["large"] * 100])
    assert len(found) == 4 and found == published.sealed_sources([*reversed(names), *names])
    assert 0.17 < sum(published.sealed_row(f"row {number}") for number in range(2000)) / 2000 < 0.23


def test_order_and_errors(published: ModuleType) -> None:
    assert published.spearman([(1, 10), (2, 20), (3, 30), (4, 40)]) == pytest.approx(1)
    assert published.spearman([(1, 40), (2, 30), (3, 20), (4, 10)]) == pytest.approx(-1)
    assert published.spearman([(1, 1)]) is None
    one = {"id": "a", "published": 2.0, "predicted": 1.0, "low": 0.5, "high": 3.0}
    assert published.summary([one]) == {"rows": 1, "figures": 1, "median_error": 0.5, "mean_error": 0.5, "bias": -0.5, "in_band": 1.0}


def test_a_burst_is_known_when_all_of_it_has_come(rows: ModuleType) -> None:
    burst = {**ROW, "load_kind": "burst", "num_requests": "200"}
    found, slower = rows.read(burst), rows.read({**burst, "gpu": "A100-SXM-80GB"})
    assert found.accepted == pytest.approx(200 * rows.ACCEPTED_SECONDS) and slower.accepted > found.accepted
    assert rows.read(ROW).accepted == 0 and not any(one.at for one in found.load.recorded)


class Law:
    """Every row takes `base` seconds and the constant."""

    def __init__(self, base: float, share: float = 1.0) -> None:
        self.base, self.share, self.asked = base, share, 0

    def of(self, asked: list[tuple[Any, Any]]) -> list[dict[str, float]]:
        self.asked += 1
        return [{"output_tok_s": 1 / (self.base + self.share * profile.host_sequence_seconds)} for _, profile in asked]


def test_a_constant_is_where_rows_are_least_off_and_stays_where_they_say_nothing(rows: ModuleType, published: ModuleType) -> None:
    true = 1e-4
    some = [rows.read({**ROW, "id": str(number), "latency_s": "", "output_tok_s": str(1 / (1e-4 + true))}) for number in range(9)]
    found = published.fit(some, law := Law(1e-4))
    assert found is not None and 0.8 * true < found < 1.25 * true and law.asked <= 2 * published.TRIES + 1
    start = some[0].engine.host_sequence_seconds
    assert published.fit(some, Law(1e-4, share=1e-6)) == pytest.approx(start, rel=0.01)
    assert published.fit(some[:3], Law(1e-4)) is None, "too few"
    arriving = [rows.read({**ROW, "id": str(number), "load_kind": "poisson", "load": "4"}) for number in range(9)]
    assert published.fit(arriving, Law(1e-4)) is None, "throughput of a rate is that rate"
