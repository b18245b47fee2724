"""The benchmark of training kernels, small and on a CPU: it runs to its end, goes on where it was stopped, and writes what decides."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.kernels import catalog, measured

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("kernels")
    finally:
        sys.path.remove(str(BENCHMARKS))


def run(bench: Any, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--device", "cpu", "--pairs", "2", *options])
    bench.main()


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_written_once_and_decide_what_is_on(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, table = tmp_path / "rows.jsonl", tmp_path / "measured.toml"
    options = ["--out", str(out), "--only", "layer_norm", "swiglu", "rotary", "--sweep", "--no-compile"]
    run(bench, monkeypatch, *options)
    first = out.read_text()
    found = rows(out)
    assert {row["kernel"] for row in found} == {"layer_norm", "swiglu", "rotary"} and not any("problem" in row for row in found)
    assert all(row["wrong_by"] <= 1 and row["seconds"] > 0 and row["low"] <= row["speedup"] <= row["high"] for row in found)
    assert all(len(row["swept"]) > 5 and row["swept"][0]["config"].items() <= row["config"].items() for row in found)
    assert len({json.dumps([row["kernel"], row["shape"]]) for row in found}) == len(found)
    run(bench, monkeypatch, *options)
    assert out.read_text() == first
    run(bench, monkeypatch, "--out", str(out), "--rows", str(table))
    read = measured.read(table)
    assert [(one.kernel, one.shape, one.config) for one in read] == [(row["kernel"], row["shape"], row["config"]) for row in found]
    assert capsys.readouterr().out.count(": off") == 3  # the declared shapes are larger


def test_a_row_of_every_declared_shape_turns_a_kernel_on(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, table = catalog.find("rotary"), tmp_path / "measured.toml"
    usual = {"kernel": "rotary", "device": "NVIDIA H200", "dtype": "bfloat16", "config": {"warps": 4}, "seconds": 1e-4, "floor_seconds": 5e-5,
             "best": "torch.compile",
             "baseline_seconds": 1.1e-4, "speedup": 1.1, "low": 1.09, "high": 1.11, "peak_bytes": 1, "torch": "2.11.0+cu130", "triton": "3.6.0",
             "date": "2026-11-20", "baselines": {"torch.compile": {"peak_bytes": 2}}}  # fmt: skip
    table.write_text(bench.toml_of([{**usual, "shape": dict(shape)} for shape in kernel.measured_at]))
    on = measured.on_by_default(kernel, "NVIDIA H200", torch.bfloat16, measured.read(table))
    assert [one.name for one in on] == ["many tokens", "some tokens"]
    table.write_text(bench.toml_of([{**usual, "shape": dict(shape), "problem": "wrong"} for shape in kernel.measured_at]))
    assert measured.read(table) == ()


def test_a_kernel_that_is_wrong_is_not_timed(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = catalog.find("swiglu")
    monkeypatch.setitem(catalog.KERNELS, "swiglu", type(kernel)(**{**vars(kernel), "call": lambda gate, up, *_: 1.01 * kernel.reference(gate, up)}))
    run(bench, monkeypatch, "--out", str(tmp_path / "rows"), "--only", "swiglu", "--no-compile")
    assert {row["problem"] for row in rows(tmp_path / "rows")} == {"wrong"}


def test_a_baseline_that_does_not_run_is_none(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> Any:
        raise ValueError("not here")

    monkeypatch.setattr(bench, "baselines_of", lambda kernel, **_: [("eager", lambda: kernel.reference), ("other", failing)])
    run(bench, monkeypatch, "--out", str(tmp_path / "rows"), "--only", "layer_norm")
    for row in rows(tmp_path / "rows"):
        assert row["best"] == "eager" and "not here" in row["baselines"]["other"]["problem"]


def test_a_launch_is_looked_for_once_for_all_numbers_of_rows(bench: Any) -> None:
    row = {"kernel": "swiglu", "device": "cpu", "dtype": "bfloat16", "shape": {"rows": 2048, "width": 64}}
    found = [{**row, "shape": {"rows": 16384, "width": width}, "config": {"warps": width}, "swept": []} for width in (32, 64)]
    assert bench.launch_before(row, found) == {"warps": 64}
    assert bench.launch_before({**row, "dtype": "float16"}, found) is None
    assert bench.launch_before(row, [{**one, "problem": "wrong"} for one in found]) is None


def test_the_best_launch_of_both_ways_is_put_together(bench: Any) -> None:
    launches = importlib.import_module("kernels_launches")
    known = {"warps": 4, "backward_warps": 8, "per_sm": 2}
    found = [{**known, "backward_warps": 16}, {**known, "warps": 8}, known, {**known, "per_sm": 3}]
    assert launches.joined(known, found) == {"warps": 8, "backward_warps": 16, "per_sm": 2}
