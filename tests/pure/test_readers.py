"""Wrong types in files of a run: exit 2 and one line with the file and the field."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from foretell.cli import main
from foretell.decode import decode
from foretell.errors import FileFormatError
from foretell.plan.types import Plan
from foretell.runtime.observe.measurement import Measurement
from foretell.runtime.train import folder, log
from foretell.runtime.train.folder import RunSettings
from foretell.search.traces import file as traces_file
from tests.pure import report_sample as sample


def a_run(at: Path) -> Path:
    plan = Plan(model={"model": "gpt-tiny"}, hardware="gone.toml", predicted={"step_seconds": 0.1, "device": "H100"})
    return sample.with_front(sample.run_folder(at / "run", plan))


def changed(path: Path, names: str, value: Any) -> None:
    """A JSON file with one value replaced; `names` is its place, with dots."""
    data = json.loads(path.read_text())
    *parents, last = names.split(".")
    holder = data
    for name in parents:
        holder = holder[int(name) if isinstance(holder, list) else name]
    holder[last] = value
    path.write_text(json.dumps(data))


MEASURED: list[tuple[str, Any, str]] = [
    ("step_seconds", "fast", "step_seconds is \"fast\" and should be a number"),
    ("step_seconds", 10**400, "should be a number"),
    ("per_step", 10**400, "per_step is 1000000"),
    ("steps", 25.5, "steps is 25.5 and should be a whole number"),
    ("steps", True, "steps is true and should be a whole number"),
    ("hardware", [], "hardware is [] and should be an object"),
    ("hardware.count", "two", "hardware.count is \"two\" and should be a whole number or null"),
    ("phases.update", {}, "phases.update is {} and should be a number"),
    ("stretches", 5, "stretches is 5 and should be a list"),
    ("stretches", [1, None], "stretches[1] is null and should be a number"),
    ("versions.torch", 2.13, "versions.torch is 2.13 and should be text"),
    ("mfu", "high", "mfu is \"high\" and should be a number or null"),
    ("by_rank", [[]], "by_rank[0] is [] and should be an object"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "words"), MEASURED)
@pytest.mark.parametrize("command", ["compare", "report"])
def test_measurements(command: str, name: str, value: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path)
    changed(run / "measurement.json", name, value)
    assert main([command, str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {run / 'measurement.json'}: ") and words in line and line.endswith("run the plan again")


@pytest.mark.parametrize("content", ["[]", "5", "null", "{}", '{"steps": 1}', "[" * 5000, ""])
def test_measurements_that_are_none(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path)
    (run / "measurement.json").write_text(content)
    assert main(["compare", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(run / "measurement.json") in line


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path)
    for name in ("measurement.json", "settings.json"):
        (run / name).unlink()
        os.mkfifo(run / name)
    assert main(["compare", str(run)]) == 2 and main(["report", str(run)]) == 2
    assert "is no regular file" in capsys.readouterr().err


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"steps": "many"}, 'steps is "many" and should be a whole number'), ({"lr": []}, "lr is [] and should be a number or null"),
    ({"log": "wandb"}, 'log is "wandb" and should be a list'), ({"log": [1]}, "log[0] is 1 and should be text"),
    ({"schedule": "zigzag"}, "unknown schedule 'zigzag'"), ({"keep": 0}, "at least one checkpoint is kept"),
    ({"no_save": 1}, "no_save is 1 and should be true or false"), ({"data": {}}, "data is {} and should be text or null"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "words"), SETTINGS)
def test_settings(values: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path)
    (run / "settings.json").write_text(json.dumps(values))
    for command in (["report", str(run)], ["eject", str(run), "--out", str(tmp_path / "x.py")]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert f"{run / 'settings.json'}: {words}" in said and len(said.splitlines()) == 1
    with pytest.raises(FileFormatError, match=r"settings\.json"):
        folder.go_on(run, folder.plans.read(run / "plan.json"), {})


def test_settings_of_another_version_are_read() -> None:
    assert RunSettings.from_json({"steps": 7, "later": 1}) == RunSettings(steps=7)


ROWS: list[tuple[Any, str]] = [
    ({"event": "step", "step": "one"}, 'step is "one" and should be a whole number'), ({"event": "step"}, "step is missing"),
    ([1, 2], "it is [1, 2] and should be an object"), ({"event": "step", "step": 3, "loss": {}}, "loss is {} and should be"),
    ({"event": "start", "step": 0, "command": 5}, "command is 5 and should be text or null"), ({"event": 1, "step": 1}, "event is 1"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "words"), ROWS)
def test_rows_of_a_log(row: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path)
    path = run / "log.jsonl"
    good = log.read(path)
    path.write_text(json.dumps(row) + "\n" + path.read_text())
    assert main(["report", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path}, line 1: {words}" in line
    log.RunLog(run, last_step=10).close()
    assert log.read(path) == [one for one in good if one["step"] <= 10], "a resumed run drops the row and goes on"


def test_lines_that_were_cut_are_left_out_of_a_log(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"event": "step", "st{"event": "step", "step": 1}\n\xff\n\n{"event": "step", "step": 2, "loss": "nan"}\n{"ev')
    assert [row["step"] for row in log.read(path)] == [2]


FRONTS: list[tuple[str, Any]] = [
    ("dropped", 5), ("points.0.seconds", "x"), ("costed", []), ("provenance", {"time": 1}), ("points.1.memory_bytes", 10**400),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), FRONTS)
def test_fronts(name: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path)
    changed(run / "plan.front.json", name, value)
    assert main(["report", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(run / "plan.front.json") in line and name.rpartition(".")[2] in line


PLANS: list[tuple[str, Any, str]] = [
    ("predicted.phases", "x", "predicted.phases"), ("predicted.bands", {"device_bytes": [1]}, "predicted.bands.device_bytes"),
    ("predicted.collectives", [{"nbytes": []}], "predicted.collectives[0].nbytes"), ("mesh", {"pp": 10**12}, "mesh.pp"),
    ("mesh", {"pp": 100_000, "tp": 100_000}, "10,000,000,000 ranks"), ("accumulate", 2**40, "accumulate"),
    ("predicted.collectives", [{"times": None}], "predicted.collectives[0].times"),
    ("predicted.step_seconds", 10**400, "is too large a number"), ("predicted.pace", {}, "predicted.pace"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "words"), PLANS)
def test_plans(name: str, value: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path)
    changed(run / "plan.json", name, value)
    for command in (["show", str(run / "plan.json")], ["compare", str(run)], ["report", str(run)]):
        assert main(command) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert str(run / "plan.json") in line and words in line


@pytest.mark.parametrize("how", ["cut", "no gzip", "another kind", "wrong types", "no trace"])
def test_traces_of_a_run(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = sample.run_folder(tmp_path / "run", Plan(model={"model": "gpt-tiny"}, hardware="H100"))
    path = run / traces_file.NAME
    good = {"kind": "foretell-traces", "schema": 1, "traces": {"q": {"trace": "{}", "notes": []}}}
    made: Mapping[str, Callable[[], bytes]] = {
        "cut": lambda: gzip.compress(json.dumps(good).encode())[:-9], "no gzip": lambda: b"{}",
        "another kind": lambda: gzip.compress(json.dumps({**good, "kind": "x"}).encode()),
        "wrong types": lambda: gzip.compress(json.dumps({**good, "traces": {"q": {"trace": 5}}}).encode()),
        "no trace": lambda: gzip.compress(json.dumps(good).encode()),
    }  # fmt: skip
    path.write_bytes(made[how]())
    assert main(["report", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {path} cannot be read: ") and "delete it" in line


# ---------------------------------------------------------------- how types are checked


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int
    note: str | None
    """May be missing, since it may be null."""


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner
    pairs: tuple[tuple[int, str], ...] = ()
    either: Inner | str = ""
    by_name: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    anything: Any = None


GOOD: dict[str, Any] = {"inner": {"size": 1}, "pairs": [[1, "a"]], "either": {"size": 2}, "by_name": {"x": [1, 2.5]}, "new": 1}


def test_lists_become_tuples_objects_dataclasses_and_unknown_names_are_passed_over() -> None:
    found = decode(Outer, GOOD, "file", "mend it")
    assert found == Outer(inner=Inner(size=1, note=None), pairs=((1, "a"),), either=Inner(size=2, note=None), by_name={"x": (1, 2.5)})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"inner": {}}, "inner.size is missing"), ({"inner": {"size": 1.0}}, "inner.size is 1.0 and should be a whole number"),
        ({"pairs": [[1]]}, "pairs[0] is [1] and should be a list of 2"), ({"pairs": [[1, 2]]}, "pairs[0][1] is 2 and should be text"),
        ({"either": {"size": "x"}}, 'either.size is "x"'), ({"either": 5}, "either is 5 and should be an object or text"),
        ({"by_name": {"a b": [None]}}, "by_name['a b'][0] is null and should be a number"), ({"by_name": []}, "by_name is []"),
    ],
)  # fmt: skip
def test_what_is_of_another_type_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(FileFormatError) as caught:
        decode(Outer, {**GOOD, **changes}, "file", "mend it")
    assert caught.value.problem.startswith(f"file: {words}") and caught.value.remedy == "mend it"


def test_a_measurement_comes_back_as_it_was() -> None:
    data = sample._measurement(Plan(model={}, hardware="x"), 0.1, 30, "foretell run")
    found = Measurement.from_json(data)
    assert Measurement.from_json(json.loads(json.dumps(found.to_json()))) == found
