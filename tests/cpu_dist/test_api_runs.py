"""`foretell.run`, `verify`, `compare` and `report`, from Python, with what the commands do beside them."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

import foretell
from foretell.cli import main
from foretell.errors import UserError
from foretell.plan import file
from foretell.plan.types import Mesh
from tests import forks
from tests.cpu_dist.train_cases import PLAN, TEXT, losses

STEPS = 4
RUN = """
import json, foretell
found = foretell.run(sys.argv[1], **json.loads(sys.argv[2]))
print(json.dumps([found.step, found.checkpoint is None]))
"""
"""In a process whose own ranks are forked."""


def test_a_run_is_the_commands_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = foretell.run(PLAN, steps=STEPS, data=str(TEXT), lr=1e-2, out=str(tmp_path / "api"), device="cpu", save_every=2, eval_batches=2)
    assert found.status == "done" and found.step == STEPS and found.checkpoint is not None
    assert found.measurement is not None and found.measurement["step_seconds"] > 0
    file.write(PLAN, tmp_path / "plan.json")
    words = ["run", str(tmp_path / "plan.json"), "--steps", str(STEPS), "--data", str(TEXT), "--lr", "1e-2", "--save-every", "2",
             "--eval-batches", "2"]  # fmt: skip
    done = forks.run(*words, "--out", str(tmp_path / "cli"), "--device", "cpu", "--json", env=os.environ)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)["run"]
    assert set(told) - {"profile"} == set(found.to_json())
    assert losses(tmp_path / "api") == losses(tmp_path / "cli"), "the same bits"
    longer = foretell.run(tmp_path / "api", steps=2 * STEPS, resume=True, device="cpu")
    assert longer.step == 2 * STEPS and longer.folder == tmp_path / "api"

    both = foretell.compare(tmp_path / "cli", longer)
    assert "cli" in repr(both) and both.to_json()["lines"]
    page = foretell.report(found)
    assert page.path.read_text().startswith("<!doctype html>") and str(page.path) in repr(page)
    capsys.readouterr()
    assert main(["compare", str(found.folder), str(tmp_path / "cli"), "--json"]) in (0, 1)
    assert set(json.loads(capsys.readouterr().out)["runs"]) == set(both.to_json())


@pytest.mark.slow(reason="the command starts two ranks in test_train_failures.py")
def test_a_plan_of_two_ranks_is_run_by_two_processes(tmp_path: Path) -> None:
    wide = replace(PLAN, mesh=Mesh(dp_shard=2), accumulate=1)
    file.write(wide, tmp_path / "plan.json")
    asked = {"steps": STEPS, "data": str(TEXT), "lr": 1e-2, "device": "cpu", "no_save": True, "eval_batches": 2}
    done = forks.run(str(tmp_path / "plan.json"), json.dumps({**asked, "out": str(tmp_path / "two")}), env=os.environ, code=RUN)
    assert done.returncode == 0, done.stderr
    alone = foretell.run(PLAN, out=str(tmp_path / "one"), **asked)
    assert json.loads(done.stdout.splitlines()[-1]) == [alone.step, True] and alone.step == STEPS
    assert losses(tmp_path / "two")[0] == pytest.approx(losses(tmp_path / "one")[0], rel=1e-3)
    assert json.loads((tmp_path / "two" / "plan.json").read_text())["mesh"] == {"dp_shard": 2}


@pytest.mark.usefixtures("ranks")
def test_verify_says_what_the_command_says(tmp_path: Path) -> None:
    found = foretell.verify(replace(PLAN, mesh=Mesh(dp_shard=2)), steps=2)
    assert found.good and "computes what one process computes" in repr(found)
    assert {case["ranks"] for case in found.to_json()["cases"]} >= {2} and "<table>" in found._repr_html_()


def test_what_is_no_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="for a plan"):
        foretell.run(3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="there is no plan file"):
        foretell.verify(tmp_path / "none.json")
    with pytest.raises(UserError, match="without a run to resume"):
        foretell.run(PLAN, resume=True)
