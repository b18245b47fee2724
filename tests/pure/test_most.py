"""The largest size that fits, held against trying all of them; several kinds of hardware in one table, against asking for each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretell import api
from foretell.cli import main
from foretell.cli.fit import table as fit_table
from foretell.errors import ModelError
from foretell.quantities import FITS, NO, TIGHT, Prediction
from foretell.search.advice.largest import most

ROOM = 10_000


@pytest.fixture(scope="module")
def answer() -> Prediction:
    return api.fit("gpt-tiny", hardware="H200", seq=32)


BYTES: dict[str, Callable[[int], int]] = {
    "a line": lambda size: 100 + 37 * size, "steep": lambda size: 9000 + 400 * size, "a square": lambda size: 50 + size * size // 3,
    "steps": lambda size: 2048 * (size // 64 + 1), "flat, then steep": lambda size: 4000 + max(0, size - 100) * 900,
    "nothing fits": lambda size: 20_000 + size, "only the first": lambda size: 9_999 if size == 1 else 20_000,
}  # fmt: skip


@pytest.mark.parametrize("name", BYTES)
def test_it_is_the_largest_of_all(name: str, answer: Prediction) -> None:
    tried: list[int] = []

    def attempt(size: int) -> Prediction:
        tried.append(size)
        used = BYTES[name](size)
        memory = replace(answer.memory, device_bytes=used, capacity_bytes=ROOM, margin_bytes=ROOM - used)
        return replace(answer, verdict=FITS if used <= ROOM else NO, memory=memory)

    found = most(attempt)
    fitting = [size for size in range(1, 2000) if BYTES[name](size) <= ROOM]
    assert found.size == (max(fitting) if fitting else 0) and found.next_size == found.size + 1
    assert found.next_short is not None and found.next_short > 0
    assert len(tried) == len(set(tried)) <= 24


def test_what_the_model_refuses_ends_it_too(answer: Prediction) -> None:
    def attempt(size: int) -> Prediction:
        if size > 77:
            raise ModelError(f"{size} positions are too many", "give fewer")
        return answer

    found = most(attempt)
    assert found.size == 77 and found.next_short is None and "78 positions are too many" in found.why
    with pytest.raises(ModelError):
        most(lambda size: attempt(1000))


def test_it_begins_where_the_model_does(answer: Prediction) -> None:
    """A batch norm takes two samples at least."""

    def attempt(size: int) -> Prediction:
        if size == 1 or size > 9:
            error = ModelError("not so", "otherwise")
            error.change = {"micro_batch": 2} if size == 1 else {}
            raise error
        return answer

    assert most(attempt).size == 9


def told(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    status = main([*words, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_the_largest_batch_of_a_model_fits_and_the_next_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fit", "gpt-tiny", "--on", "H200,memory=910MiB", "--set", "layers=1", "--seq", "64"]
    status, found = told([*words, "--micro-batch", "max"], capsys)
    size = found["largest"]["size"]
    assert status == 0 and found["verdict"] == FITS and found["model"]["micro_batch"] == size > 4 and found["largest"]["next_size"] == size + 1
    assert told([*words, "--micro-batch", str(size)], capsys)[1]["verdict"] == FITS
    assert told([*words, "--micro-batch", str(size + 1)], capsys)[1]["verdict"] != FITS
    assert main([*words, "--micro-batch", "max"]) == 0
    assert f"--micro-batch {size}" in capsys.readouterr().out
    assert main([*words, "--micro-batch", "0"]) == 2 and main(["fit", "gpt-tiny", "--on", "T4", "--micro-batch", "max", "--seq", "max"]) == 2


def test_several_kinds_of_hardware_are_rows_of_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert fit_table.several("H100,memory=60GiB,2xA100,T4") == ["H100,memory=60GiB", "2xA100", "T4"]
    words = ["gpt-tiny", "--seq", "32", "--tokens", "1B"]
    status, found = told(["fit", *words, "--on", "T4,H100,memory=500MiB,H200", "--objective", "cost"], capsys)
    assert status == 0 and [one["on"] for one in found["answers"]][-1] == "H100,memory=500MiB" and found["answers"][-1]["verdict"] == NO
    money = [one["run"]["money"] for one in found["answers"][:-1]]
    assert money == sorted(money)
    alone = told(["fit", *words, "--on", "T4"], capsys)[1]
    row = next(one for one in found["answers"] if one["on"] == "T4")
    assert all(row[name] == alone[name] for name in ("memory", "time", "run", "verdict"))
    assert main(["fit", *words, "--on", "T4,H200"]) == 0
    screen = capsys.readouterr().out
    assert screen.splitlines()[2].startswith("H200") and max(map(len, screen.splitlines())) <= 120
    assert main(["fit", *words, "--on", "T4,H200", "--objective", "luck"]) == 2


@pytest.mark.slow(reason="two searches; several kinds of hardware are rows of one table above")
def test_plans_of_several_kinds_of_hardware_are_rows_too(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["plan", "gpt-tiny", "--global-batch", "8", "--micro-batch", "4", "--tokens", "1M", "--objective", "cost"]
    assert main([*words, "--on", "H100,RTX4090,nosuch", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["answers"]
    assert [set(row) & {"error"} for row in rows] == [set(), set(), {"error"}]
    alone = {}
    for name in ("H100", "RTX4090"):
        assert main([*words, "--on", name, "--json"]) == 0
        alone[name] = json.loads(capsys.readouterr().out)
    for row in rows[:2]:
        mine, other = row["plan"], alone[row["on"]]["plan"]
        assert mine["predicted"]["step_seconds"] == other["predicted"]["step_seconds"] and mine["mesh"] == other["mesh"]
    money = [alone[row["on"]]["run"]["money"] for row in rows[:2]]
    assert money == sorted(money)
    assert main([*words, "--on", "H100,RTX4090"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[2:4]] == [row["on"] for row in rows[:2]]
    assert shown[-1] == f"Write it:  foretell {' '.join(words)} --on {rows[0]['on']}"


@pytest.mark.parametrize("name", ["a line", "steps", "a square"])
def test_a_likely_size_is_begun_with_and_the_largest_that_runs_is_told(name: str, answer: Prediction) -> None:
    """Less than 5 % to spare is tight; what a run lacks grows in a line from where it does not run."""
    tried: list[int] = []

    def attempt(size: int) -> Prediction:
        tried.append(size)
        used = BYTES[name](size)
        memory = replace(answer.memory, device_bytes=used, capacity_bytes=ROOM, margin_bytes=ROOM - used)
        return replace(answer, verdict=FITS if used <= 0.95 * ROOM else TIGHT if used <= ROOM else NO, memory=memory)

    found = most(attempt, first=16)
    fitting = [size for size in range(1, 2000) if BYTES[name](size) <= 0.95 * ROOM]
    running = [size for size in range(1, 2000) if BYTES[name](size) <= ROOM]
    assert found.size == max(fitting) and found.next_size == found.size + 1 and tried[0] == 16
    assert found.tight is not None and found.size <= found.tight
    near = {"a line": 1, "a square": 0.25 * max(running), "steps": 64}[name]
    assert abs(found.tight - max(running)) <= near
    assert len(tried) == len(set(tried))
    assert most(attempt).tight is None


def test_long_sizes_are_told_to_one_part_in_128(answer: Prediction) -> None:
    tried: list[int] = []

    def attempt(size: int) -> Prediction:
        tried.append(size)
        used = 70 * size + 3 * (size % 7)
        memory = replace(answer.memory, device_bytes=used, capacity_bytes=4_000_000, margin_bytes=4_000_000 - used)
        return replace(answer, verdict=FITS if used <= 3_800_000 else TIGHT if used <= 4_000_000 else NO, memory=memory)

    found = most(attempt, first=4096)
    assert found.size <= 3_800_000 / 70 < found.next_size <= found.size * (1 + 1 / 128) + 1
    assert found.tight is not None and abs(found.tight - 4_000_000 / 70) < 3
    assert len(tried) <= 8 and min(tried) == 4096


def test_where_the_likely_size_does_not_fit_the_least_is_begun_with(answer: Prediction) -> None:
    def attempt(size: int) -> Prediction:
        used = 9000 + 400 * size
        memory = replace(answer.memory, device_bytes=used, capacity_bytes=ROOM, margin_bytes=ROOM - used)
        return replace(answer, verdict=FITS if used <= ROOM else NO, memory=memory)

    assert most(attempt, first=16).size == 2 and most(attempt, first=16).tight == 2
