"""The benchmark of published runs: its work is counted right, and its prices meet figures it was not fitted to."""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from dataclasses import replace
from math import isfinite, log
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.foreign import attention
from foretell.hardware import catalog
from tests.further import further

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def _load(name: str) -> ModuleType:
    if str(BENCHMARKS) not in sys.path:
        sys.path.insert(0, str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


rows = _load("published_rows")
traces = _load("published_traces")
plans = _load("published_plans")
bands = _load("published_bands")
published = _load("published")

MPT_7B = {
    "id": "foundry-039", "stack": "llm-foundry", "family": "gpt", "layers": "32", "hidden": "4096", "heads": "32",
    "kv_heads": "32", "ffn_hidden": "16384", "vocab": "50368", "seq_len": "2048", "experts": "", "gpu": "H100-SXM-80GB",
    "gpus": "8", "gpus_per_node": "8", "inter_node_link": "", "fsdp_shard": "zero3", "shard_group": "", "tp": "1",
    "pp": "1", "cp": "1", "ep": "", "micro_batch": "6", "global_batch": "48", "precision": "bf16",
    "activation_recompute": "none", "compile": "flash attention; no torch.compile mentioned", "offload": "none",
    "step_time_s": "", "tokens_per_s_per_gpu": "10643", "notes": "", "model": "MPT-7b", "params_b": "6.66",
    "tflops_per_gpu": "", "peak_memory_gib": "", "vpp": "", "schedule": "", "sequence_parallel": "", "topk": "",
}  # fmt: skip


@functools.cache
def predictor() -> Any:
    """With traces shared by all tests."""
    return published.Predictor(published.known_widths())


def run_of(**change: str) -> Any:
    return rows.read_row({**MPT_7B, **change}).run


# ---------------------------------------------------------------- which rows


def test_a_full_row_is_eligible() -> None:
    assert rows.eligible(MPT_7B)


@pytest.mark.parametrize("empty", ["vocab", "activation_recompute", "micro_batch", "tokens_per_s_per_gpu", "tp"])
def test_rows_with_gaps_are_not_eligible(empty: str) -> None:
    assert not rows.eligible({**MPT_7B, empty: ""})


def test_gaps_are_filled_and_said() -> None:
    row = rows.read_row({**MPT_7B, "activation_recompute": "", "vocab": ""})
    assert row.assumed == ("vocab=51200", "activation_recompute=none")
    with pytest.raises(rows.LeftOut, match="hidden"):
        rows.read_row({**MPT_7B, "hidden": ""})
    with pytest.raises(rows.LeftOut, match="unknown device 'Abacus'"):
        rows.read_row({**MPT_7B, "gpu": "Abacus"})


def test_an_empty_sharding_is_plain_data_parallel_and_a_step_time_will_do() -> None:
    row = rows.read_row({**MPT_7B, "fsdp_shard": "", "tokens_per_s_per_gpu": "", "step_time_s": "1.2"})
    assert row.run.shard == "none"
    assert (row.quantity, row.published) == ("step_time_s", 1.2)
    assert rows.predicted(row, 0.9) == 0.9


def test_stacks_by_what_a_row_says() -> None:
    def name(**change: str) -> str:
        return rows.stack_of({**MPT_7B, **change}).name  # type: ignore[no-any-return]

    assert name() == "llm-foundry-0.3"
    assert name(notes="FSDP mixed_precision PURE") == "llm-foundry-0.1"
    assert name(stack="torchtitan", compile="eager") == "torchtitan"
    torchao = {"stack": "torchtitan+torchao", "compile": "torch.compile; none (bf16)"}
    names = [name(**torchao, gpu=gpu) for gpu in ("H100-SXM-80GB", "MI300X-192GB", "B200")]
    assert names == ["torchtitan-2025-03", "torchtitan-2025-08", "torchtitan-2025-08-cudnn"]
    assert name(stack="torchtitan", compile="FSDP2", model="Llama-3.1-405B") == "torchtitan-compile"
    assert name(stack="Megatron-LM", id="sc21-t1-01") == "megatron-lm" and name(stack="Megatron-LM", id="seqsel-02") == "megatron-lm-2022"
    assert rows.float8_of({**MPT_7B, "compile": "torch.compile; float8 rowwise", "precision": "fp8"}) == ("rowwise", False)
    assert name(stack="something new", compile="torch.compile") == "pytorch-compile"
    assert name(stack="Megatron-DeepSpeed", notes='section "Re-do", 02-27') == "megatron-deepspeed-blocking"
    assert name(stack="Megatron-DeepSpeed", notes='section "Rebalancing layers", 02-28') == "megatron-deepspeed-bf16"
    assert name(stack="Megatron-DeepSpeed") == "megatron-deepspeed"


def test_boards_are_those_that_were_used() -> None:
    """By the memory that a log of torchao's shows as a share of the device's, and by the watts its authors name."""
    board = rows.device_of({**MPT_7B, "id": "torchao-01", "gpu": "H100-SXM-80GB"})
    assert board.name == "H100-SXM-96GB" and pytest.approx(95.0, abs=0.05) == 47.65 / 0.5016
    assert abs(board.memory_bytes / 2**30 / 95.0 - 1) < 0.03
    assert rows.device_of({**MPT_7B, "gpu": "H100-SXM-80GB"}).name == "H100-SXM-80GB"
    usual, limited = (rows.device_of({**MPT_7B, "gpu": "B200", "notes": notes}) for notes in ("", "power limited"))
    assert (usual.tdp_watts, limited.tdp_watts) == (1000, 750) and limited.memory_bytes == usual.memory_bytes


def test_a_hidden_size_that_its_row_contradicts_is_mended() -> None:
    """106 layers of 13824 would be 247e9 parameters; the row says 195e9, which 12288 gives."""
    cells = {"layers": "106", "hidden": "13824", "heads": "64", "ffn_hidden": "", "vocab": "250000", "params_b": "195"}
    assert run_of(**cells).hidden == 12288
    assert run_of(**{**cells, "params_b": ""}).hidden == 13824


ODD = pytest.mark.slow(reason="another odd cell, read by the same code")


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param({"gpu": "A100 (Ampere, memory not stated)"}, marks=ODD),
        pytest.param({"vpp": "max: one layer per chunk", "pp": "4", "gpus": "32"}, marks=ODD),
        {"schedule": "ZBV", "pp": "8", "gpus": "8"}, {"schedule": "hitherto unknown", "pp": "2"},
        {"shard_group": "64", "fsdp_shard": "zero1", "gpus": "128", "global_batch": "768"},
        pytest.param({"experts": "128", "topk": "8", "ep": "8", "ffn_hidden": "768"}, marks=ODD),
        pytest.param({"cp": "8", "kv_heads": "8"}, marks=ODD),
        {"offload": "optimizer to CPU"}, {"kv_heads": "", "ffn_hidden": "", "gpus_per_node": ""},
        pytest.param({"precision": "nvfp4", "gpu": "GB200"}, marks=pytest.mark.slow(reason="another format of 8 bits or fewer")),
        pytest.param({"precision": "fp8", "gpu": "V100-32GB"}, marks=ODD), {"gpus": "3"},
        pytest.param({"inter_node_link": "something 12 Gb/s", "gpus": "64"}, marks=ODD),
        pytest.param({"gpu": "MI355X-288GB", "pp": "8", "gpus": "8"}, marks=ODD),
        {"gpu": "RTX4090-24GB", "gpus": "1", "global_batch": "6"}, {"schedule": "gpipe", "pp": "8", "gpus": "8"},
        pytest.param({"peak_memory_gib": "about 40"}, marks=ODD), {"micro_batch": "a few"}, {"global_batch": "1"},
    ],
)  # fmt: skip
def test_odd_cells_never_crash(odd: dict[str, str]) -> None:
    found, skipped = predictor().compare([{**MPT_7B, **odd}])
    assert len(found) + len(skipped) == 1
    for one in found:
        assert isfinite(one["predicted"]) and 0 < one["low"] < one["predicted"] < one["high"]


# ---------------------------------------------------------------- the work of a step


def test_flop_conventions_are_the_papers() -> None:
    """Megatron's 96 B s l h² (1 + s/6h + V/16lh) with recomputation; 72 and V/12lh without; attention halved if causal."""
    run = replace(run_of(), recompute="full")
    b, s, h, layers, vocab = 48, 2048, 4096, 32, 50368
    formula = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))
    assert rows.step_flops(run, rows.HARDWARE) == pytest.approx(formula, rel=1e-9)
    plain = 72 * b * s * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h))
    assert rows.step_flops(run, rows.MODEL) == pytest.approx(plain, rel=1e-9)
    assert rows.step_flops(run, rows.MODEL) - rows.step_flops(run, rows.MODEL_CAUSAL) == pytest.approx(6 * b * s * layers * h * s, rel=1e-9)
    assert rows.step_flops(run, rows.WEIGHTS) == pytest.approx(6 * b * s * (12 * layers * h**2 + vocab * h), rel=1e-9)


# ---------------------------------------------------------------- prices


def test_attention_on_one_h200() -> None:
    """Measured for 4 x 32 heads x 4096 x 128, causal FLOPs: 591 forward, 469 backward."""
    flop = 4 * 4 * 32 * 4096 * 4096 * 128 / 2
    for backwards, tflops in ((False, 591), (True, 469)):
        seconds = attention.seconds_of(
            batch=4, heads=32, queries=4096, keys=4096, head_dim=128, device=catalog.find("H200"), kernel="cudnn",
            backward=backwards,
        )  # fmt: skip
        assert flop * (2.5 if backwards else 1) / seconds / 1e12 == pytest.approx(tflops, rel=0.03)


# ---------------------------------------------------------------- data


# ---------------------------------------------------------------- the whole table


def test_tau_is_kendalls() -> None:
    """Ten pairs, of which two disagree; and ties on one side, by hand."""
    assert published.kendall([1, 2, 3, 4, 5], [2, 1, 3, 5, 4]) == pytest.approx(0.6)
    assert published.kendall([1, 2, 2], [1, 2, 3]) == pytest.approx(2 / (2 * 3) ** 0.5)
    assert published.kendall([1, 1], [1, 2]) is None


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    table, out = tmp_path / "runs.csv", tmp_path / "out.json"
    strange = {**MPT_7B, "id": "else-1", "gpu": "Abacus"}
    lines = [",".join(MPT_7B), *(",".join(f'"{cell}"' for cell in row.values()) for row in (MPT_7B, strange))]
    table.write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["published.py", "--csv", str(table), "--json", str(out)])
    assert published.main() == 0
    body = json.loads(out.read_text(encoding="utf-8"))
    assert set(body) == {"schema_version", "predictions", "sources", "overall", "skipped"}
    (one,) = body["predictions"]
    assert {"id", "quantity", "published", "predicted", "low", "high"} <= set(one)
    assert {"rows", "mape_percent", "bias_percent", "kendall_tau"} <= set(body["sources"]["foundry"])
    assert body["skipped"] == [{"id": "else-1", "reason": "unknown device 'Abacus'", "eligible": True}]
    assert "foundry" in capsys.readouterr().out


# ---------------------------------------------------------------- the whole table, as saved


def saved(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_saved_table_meets_the_bars_it_is_said_to_meet() -> None:
    """Left out by source, as the README quotes it; what falls short is told in docs/published.md."""
    each = saved(published.LEFT_OUT)
    whole = published.overall(each, [])
    assert len(saved(published.RESULTS)) == len(each) > 480
    assert whole["rows"] > 300
    assert 85 <= whole["band_coverage_percent"] <= 95
    assert whole["memory"]["rows"] == 87 and whole["memory"]["mape_percent"] <= 6.0


@pytest.mark.xfail(strict=True, reason="7.9 %: BLOOM's blocking launches, H100 runs of 2023; docs/published.md")
def test_the_median_over_rows_meets_its_bar() -> None:
    assert published.overall(saved(published.LEFT_OUT), [])["median_error_percent"] <= 6.0


@pytest.mark.xfail(strict=True, reason="12.8 %: torchao's MI300X and power-limited B200, nanochat; docs/published.md")
def test_the_mean_over_sources_meets_its_bar() -> None:
    assert published.overall(saved(published.LEFT_OUT), [])["mape_percent_mean_over_sources"] <= 12.0


@pytest.mark.parametrize(
    "name", further(["foundry-039", "llmc-2", "sc21-t1-05", "zb-04"], ["llmc-2", "zb-04"], "plans of this way to run are kept in test_one_path.py")
)
def test_saved_rows_are_what_the_code_says_now(name: str) -> None:
    """One row of each way to run: fully sharded, replicas, tensor and pipeline parallel."""
    known = {one["id"]: one for one in saved(published.RESULTS)}
    cells = {row["id"]: row for row in published.read(published.RUNS)}
    now = predictor().predict(rows.read_row(cells[name]))
    assert now["predicted"] == pytest.approx(known[name]["predicted"], rel=1e-3)
    assert now.get("memory") == known[name].get("memory")
    assert now["runnable"] is False and now["mark"].startswith("not runnable here")


def test_bands_are_conformal() -> None:
    """Of 20 sources with ten errors each, nine tenths are inside; a kind that two sources speak of takes the pooled width."""
    scores = [(f"s{i}", "plain", 0.01 * (i + 1)) for i in range(20) for _ in range(10)]
    scores += [("s0", "odd", 3.0), ("s1", "odd", 3.0)]
    found = bands.widths(scores)
    inside = sum(score <= log(found["plain"]) + 1e-3 for _, kind, score in scores if kind == "plain")
    assert 0.9 <= inside / 200 <= 0.97
    assert "odd" not in found and bands.width(found, "odd") == found[bands.WHOLE]
    assert bands.left_out_widths(scores)["s19"]["plain"] < found["plain"]


# ---------------------------------------------------------------- Frontier


FRONTIER = {row["id"]: row for row in published.read(BENCHMARKS / "data" / "published_frontier.csv")}


@functools.cache
def frontier(name: str, **change: int) -> dict[str, Any]:
    cells = {**FRONTIER[name], **{key: str(value) for key, value in change.items()}}
    return dict(predictor().predict(rows.read_row(cells)))


LARGE = pytest.mark.slow(reason="a larger model, run as the smaller ones are")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "frontier-22b" else LARGE) for name in FRONTIER])
def test_frontier_is_met_within_15_percent(name: str) -> None:
    """22B, 175B and 1T parameters on MI250X dies: nothing in the route was fitted to them, and no device of that kind was measured."""
    found = frontier(name)
    assert abs(found["error_percent"]) < 15
    assert found["eligible"] and not found["assumed"] and not found["fitted"]


@pytest.mark.parametrize(("name", "few", "many"), [("frontier-175b", 128, 1024), pytest.param("frontier-1t", 1024, 3072, marks=LARGE)])
def test_frontier_scales_weakly_as_published(name: str, few: int, many: int) -> None:
    """As many samples for each replica: 100 % on 1,024 dies (175B) and 3,072 (1T)."""
    batch = int(FRONTIER[name]["global_batch"])
    wide = frontier(name, gpus=many, global_batch=batch * many // few)
    assert wide["predicted"] / frontier(name)["predicted"] == pytest.approx(1.0, abs=0.02)


STRATEGIES: dict[str, list[dict[str, int]]] = {
    "tensor": [{"tp": tp, "gpus": 16 * tp} for tp in (1, 2, 4, 8)],
    "stages": [{"pp": pp, "gpus": 2 * pp, "global_batch": 128} for pp in (8, 16, 24)],
    "batches": [{"global_batch": batch} for batch in (640, 256, 64, 16)],
}
RANKS = pytest.mark.slow(reason="four traces of split layers; stages and micro-batches are ordered meanwhile")


@pytest.mark.parametrize("kind", [pytest.param("tensor", marks=RANKS), "stages", "batches"])
def test_frontier_orders_strategies(kind: str) -> None:
    """More tensor ranks, more stages at the same batch, fewer micro-batches: each costs throughput."""
    found = [frontier("frontier-22b", **changes)["predicted"] for changes in STRATEGIES[kind]]
    assert found == sorted(found, reverse=True)
