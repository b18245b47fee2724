"""The blind round of benchmarks/advice_gpu.py: drawn by its seed alone, of other models, and timed without what that machine lacks."""

from __future__ import annotations

import ast
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SEALED = BENCHMARKS / "sealed" / "advice-h200.jsonl"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import advice_draw
    import advice_gpu

    yield advice_draw, advice_gpu
    for name in ("advice_draw", "advice_gpu"):
        sys.modules.pop(name, None)


def test_a_seed_says_all_and_no_model_is_of_the_first_round(scripts: Any) -> None:
    draw, first = scripts
    one, again, other = draw.drawn(draw.SEED), draw.drawn(draw.SEED), draw.drawn("another")
    assert one == again and list(one) != list(other) and len(one) == draw.COUNT
    common = next(name for name in one if name in other and "accumulate" not in one[name])
    assert one[common] != other[common] or one[common]["micro_batch"] >= 1
    models = {asked["model"] for asked in one.values()}
    assert len(models) == len(one) and not models & {asked["model"] for asked in first.QUESTIONS.values()}


def test_what_was_predicted_is_what_the_seed_draws(scripts: Any) -> None:
    draw, _ = scripts
    rows = [json.loads(line) for line in SEALED.read_text().splitlines()]
    asked = draw.drawn(draw.SEED)
    assert {row["seed"] for row in rows} == {draw.SEED} and len({row["question"] for row in rows if row["change"]}) >= 24
    assert all(row["asked"] == asked[row["question"]] for row in rows)
    assert all(row["low"] <= row["speedup"] <= row["high"] and row["sure"] == (row["low"] > 1) for row in rows if row["change"])


def test_groups_hold_every_change_once_and_fit_the_device(scripts: Any) -> None:
    _, gpu = scripts
    rows = [{"question": "a", "change": "", "flag": "", "device_bytes": 10 << 30}]
    rows += [{"question": "a", "change": str(n), "flag": str(n), "device_bytes": n * (20 << 30)} for n in (1, 3, 2, 5)]
    groups = gpu.groups_of(rows)
    assert [row["flag"] for group in groups for row in group] == ["1", "3", "2", "5"]
    assert all(len(group) == 1 or sum(row["device_bytes"] for row in group) + group[0]["base_bytes"] <= gpu.DEVICE_BYTES for group in groups)
    assert len(groups) == 3


STUB = """
import json, sys, time
rows = json.loads(sys.argv[2])
if rows[0]["question"] == "broken":
    sys.exit("no such model")
time.sleep(0.2)
print("ready", flush=True)
sys.stdin.readline()
began = time.time()
time.sleep(0.3)
print(json.dumps({row["flag"]: {"gain": 1.5, "began": began, "ended": time.time()} for row in rows}))
"""


def test_one_is_timed_while_all_others_are_stopped(scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three are made ready beside each other; none of their timed whiles overlap; one that fails says why, and holds nobody up."""
    _, gpu = scripts
    stub, out = tmp_path / "stub.py", tmp_path / "rows.jsonl"
    stub.write_text(STUB)
    monkeypatch.setattr(gpu, "__file__", str(stub))
    names = ("a", "b", "broken", "c")
    about = {"device_bytes": 1, "base_bytes": 1, "speedup": 1.4, "change": "x"}
    groups = [[{**about, "question": name, "flag": f"--{number}"} for number in range(2)] for name in names]
    runs = gpu.Runs(out, {"device": "none"}, time.monotonic() + 60)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(runs.question, groups))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 8 and not runs.going and not runs.held
    timed = sorted((row["measured"]["began"], row["measured"]["ended"]) for row in rows if row["flag"] == "--0" and "gain" in row["measured"])
    assert len(timed) == 3 and all(before[1] <= after[0] for before, after in itertools.pairwise(timed))
    assert {row["measured"].get("error") for row in rows if row["question"] == "broken"} == {"no such model"}


def test_middles_and_ranges_are_told_apart(scripts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, gpu = scripts
    about = {"question": "a", "joins": 1, "options": {}, "flag": "--x", "change": "x"}
    rows = [
        {**about, "speedup": 2.0, "low": 1.5, "high": 3.0, "sure": True, "measured": {"gain": 2.9}},  # 0.50 said, 0.66 saved: inside its range
        {**about, "speedup": 2.0, "low": 1.5, "high": 3.0, "sure": True, "measured": {"gain": 2.1}},
        {**about, "speedup": 1.1, "low": 0.9, "high": 1.3, "sure": False, "measured": {"gain": 0.95}},
        {**about, "speedup": 1.1, "low": 1.05, "high": 1.3, "sure": True, "measured": {"error": "no answer"}},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    gpu.tell(path)
    told = capsys.readouterr().out
    assert "1 changes did not run" in told and "advised: 2 changes, 2 are faster; share saved within 10 points in 1 " in told
    assert "inside the printed range 2 of 2" in told and "told as unsure: 1 changes, 0 are faster" in told


def test_timing_needs_no_command_line_package() -> None:
    """The machine that it runs on has torch and model libraries, and none of the packages of the command line."""
    blocked = "import sys; sys.modules.update(dict.fromkeys(('typer', 'click', 'rich', 'pydantic'))); sys.argv = ['x']; sys.path.insert(0, '.')"
    needed = [
        f"from {node.module} import {', '.join(name.name for name in node.names)}"
        for function in ast.walk(ast.parse((BENCHMARKS / "advice_gpu.py").read_text()))
        if isinstance(function, ast.FunctionDef) and function.name in ("made", "measured")
        for node in ast.walk(function) if isinstance(node, ast.ImportFrom)
    ]  # fmt: skip
    assert len(needed) >= 4
    done = subprocess.run([sys.executable, "-c", "\n".join([blocked, *needed])], capture_output=True, text=True, cwd=BENCHMARKS.parent)
    assert done.returncode == 0, done.stderr
