"""A run folder given to `run`: what is there, what to do, and nothing of it changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretell.cli import main
from foretell.cli.run.run import _before
from foretell.plan import file as plans
from foretell.plan.types import Plan
from foretell.report.comparison import repeats
from foretell.runtime.train.folder import RunSettings
from tests.pure.test_two_runs import run

ASKED: dict[str, Any] = {"steps": 120, "lr": 1e-3, "seed": 3, "log": ("tensorboard",), "eval_every": 10}
TINY = Plan(model={"model": "gpt-tiny"}, hardware="CPU", precision="fp32", micro_batch=2)


def content(at: Path) -> dict[str, bytes]:
    return {str(path.relative_to(at)): path.read_bytes() for path in at.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("steps", "settled", "problem", "remedy"),
    [
        (120, True, "is a finished run (120 of 120 steps, ended 2026-01-01 00:00 UTC)", "--again for a new run in another folder, or --resume "),
        (40, True, "holds a run that has not ended (40 of 120 steps)", "--resume to go on, or --again"),
        (40, False, "holds the run of a script that was watched", "watch it again: foretell watch -- python train.py"),
    ],
)  # fmt: skip
def test_a_run_is_not_started_from_a_run_folder_unasked(
    steps: int, settled: bool, problem: str, remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = RunSettings(**ASKED).settled(TINY).to_json() if settled else None
    made = run(tmp_path / "a", [1.0] * steps, settings, plan=TINY, command="foretell watch -- python train.py")
    before = content(tmp_path)
    assert main(["run", str(made), "--device", "cpu"]) == 2
    said = capsys.readouterr()
    assert problem in said.err and remedy in said.err and said.err.count("\n") == 1
    assert content(tmp_path) == before and not (tmp_path / "runs").exists(), "nothing is written anywhere"


def test_again_has_the_settings_of_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a schedule only what was asked for: the rest follows from the steps, which may be others now."""
    made = run(tmp_path / "a", [1.0] * 100, RunSettings(**ASKED).settled(TINY).to_json(), plan=TINY)
    assert _before(made, None, resume=False, again=True) == ASKED
    assert RunSettings(**ASKED).settled(TINY).warmup == 6
    longer = RunSettings(**ASKED, schedule_steps=400, warmup=7).settled(TINY)
    made = run(tmp_path / "b", [1.0] * 100, longer.to_json(), plan=TINY)
    assert _before(made, None, resume=False, again=True) == {**ASKED, "schedule_steps": 400, "warmup": 7}
    plans.write(TINY, tmp_path / "plan.json")
    for words, problem in (
        ([str(made), "--again", "--resume"], "--again starts a new run"), ([str(tmp_path / "plan.json"), "--again"], "is a file"),
        ([str(tmp_path / "none"), "--again"], "is not there"), ([str(tmp_path), "--again"], "no run with settings"),
        ([str(made), "--again", "--out", str(made)], "holds a run already"),
    ):  # fmt: skip
        assert main(["run", *words, "--device", "cpu"]) == 2
        assert problem in capsys.readouterr().err


def test_a_folder_with_a_plan_alone_is_run(tmp_path: Path) -> None:
    plans.write(TINY, tmp_path / "plan.json")
    assert _before(tmp_path, None, resume=False, again=False) == {}
    made = run(tmp_path / "a", [1.0], RunSettings(**ASKED).to_json())
    assert _before(made, tmp_path / "b", resume=False, again=False) == {}, "another folder is named"
    assert _before(made, None, resume=True, again=False) == {}


def test_the_command_that_repeats_a_run_names_another_folder() -> None:
    assert repeats("foretell run plan.json --steps 3 --out runs/a --lr 0.1") == "foretell run plan.json --steps 3 --lr 0.1"
    assert repeats("foretell run 'my plan.json' --out=a") == "foretell run 'my plan.json'"
    assert repeats("foretell run plan.json --steps 3") == "foretell run plan.json --steps 3"
    assert repeats("it's") == "it's"
    assert json.dumps(repeats("")) == '""'
