"""Faults on purpose: what is compared, what is kept of trials, what is refused. The faults themselves: tests/cpu_dist/test_chaos.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretell.cli import main
from foretell.cli.run import chaos as command
from foretell.plan import file as plans
from foretell.plan.types import Plan
from foretell.runtime.chaos import campaign as campaigns
from foretell.runtime.chaos import faults
from foretell.runtime.chaos.campaign import ChaosTrial, begun, campaign, trials_in
from foretell.runtime.chaos.remains import Remains
from foretell.runtime.chaos.table import render, rows_by_fault
from foretell.runtime.chaos.trial import ChaosRequest, Trial, rows_of_tail

GOOD = ChaosTrial(fault="kill", ranks=2, seed=0, step=9, good=True, losses=True, files=True, data=True, seconds=1.5, steps_again=2, whole_seconds=9.0)
LOST = replace(GOOD, seed=1, good=False, losses=False, seconds=2.5, lost=8)


def request(at: Path, **more: Any) -> ChaosRequest:
    return ChaosRequest(**{"plan": at / "plan.json", "world": 2, "work": at / "work", **more})


# ---------------------------------------------------------------- what is compared


def remains(steps: int, *, position: int = 0, epoch: int = 0, losses: float = 0.5) -> Remains:
    return Remains(losses={str(step): losses for step in range(1, steps + 1)}, times={}, files={"a": 1},
                   data={"seed": 0, "epoch": epoch, "position": position})  # fmt: skip


def test_what_differs_from_the_twin_is_counted_in_samples() -> None:
    twin = remains(10, position=80)
    assert remains(10, position=80).same(twin) == {"losses": True, "files": True, "data": True} and twin.off(twin, 8) == (0, 0)
    assert remains(9, position=80).off(twin, 8) == (8, 0), "a step is not in the log"
    assert remains(10, position=96).off(twin, 8) == (16, 0) and remains(10, position=72).off(twin, 8) == (0, 8)
    assert replace(twin, times={"3": 2}).off(twin, 8) == (0, 8), "a step counts twice"
    assert remains(10, position=80, losses=0.6).same(twin) == {"losses": False, "files": True, "data": True}
    assert not replace(twin, files={"a": 2}).same(twin)["files"] and not remains(10, position=72).same(twin)["data"]


@pytest.mark.parametrize(("steps", "every", "good"), [(60, 5, True), (12, 3, True), (11, 3, False), (60, 0, False), (60, 30, False)])
def test_faults_come_between_the_first_checkpoint_and_the_end(steps: int, every: int, good: bool, tmp_path: Path) -> None:
    asked = request(tmp_path, steps=steps, save_every=every)
    assert (asked.check() == "") == good
    if good:
        assert every < asked.first <= asked.last < steps


def test_the_last_step_of_a_log_is_found_in_a_half_written_file(tmp_path: Path) -> None:
    trial = Trial(request(tmp_path), tmp_path)
    assert trial.step() == 0
    trial.out.mkdir()
    lines = [json.dumps({"event": "step", "step": step, "loss": 0.5, "x": "y" * 90}) for step in range(1, 101)]
    (trial.out / "log.jsonl").write_text("\n".join([*lines, '{"event": "step", "st']))
    assert trial.step() == 100 and len(rows_of_tail(trial.out)) < 40


def test_the_clock_of_one_rank_jumps_when_it_is_told_to(tmp_path: Path) -> None:
    trial = Trial(request(tmp_path, world=1), tmp_path)
    faults.with_clock(trial)
    code = "import os, sys, time\nmark = sys.argv[1]\na = time.time(); open(mark, 'w').close(); print(round(abs(time.time() - a)))"
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("print('own')")
    jumps = []
    for rank in ("0", "1"):
        (tmp_path / "jump").unlink(missing_ok=True)
        env = {**os.environ, **trial.env, "RANK": rank, "PYTHONPATH": os.pathsep.join([trial.env["PYTHONPATH"], str(tmp_path / "own")])}
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "jump")], env=env, capture_output=True, text=True, check=True)
        own, jump = done.stdout.split()
        assert own == "own", "another one is found too"
        jumps.append(int(jump))
    assert jumps == [abs(int(trial.env["FORETELL_CHAOS_CLOCK"].split()[1])), 0] and jumps[0] > 0


# ---------------------------------------------------------------- trials that are kept


def test_a_campaign_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, int]] = []

    def tried(name: str, seed: int, asked: ChaosRequest, **_: Any) -> ChaosTrial:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append((name, seed))
        return replace(GOOD, fault=name, seed=seed, not_tried="" if name == "kill" or len(done) > 3 else "no room", good=name == "kill")

    monkeypatch.setattr(campaigns, "tried", tried)
    monkeypatch.setattr(campaigns, "twin", lambda *_: None)
    asked, identity = request(tmp_path), {"plan": "a", "save_every": 5}
    with pytest.raises(KeyboardInterrupt):
        campaign(asked, ["kill", "hang"], 2, 7, identity=identity)
    assert done == [("kill", 7), ("hang", 7), ("kill", 8)] and len(trials_in(asked.work / "trials.jsonl")) == 3
    done.clear()
    found = campaign(asked, ["kill", "hang"], 2, 7, identity=identity)
    assert done == [("hang", 7), ("hang", 8)], "what could not be tried is tried again"
    assert [(one.fault, one.seed) for one in found] == [("kill", 7), ("hang", 7), ("kill", 8), ("hang", 8)]
    with pytest.raises(Exception, match="trials of another save every"):
        campaign(asked, ["kill"], 1, 0, identity={**identity, "save_every": 6})


def test_a_trials_file_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    path.write_text("\n".join([json.dumps(GOOD.to_json()), json.dumps({**LOST.to_json(), "later": 1}), '{"fault": "ki']))
    assert trials_in(path) == [GOOD, LOST], "the last line is half written; what a later version says besides is left out"
    for bad in ("{}", "[]", "nonsense", json.dumps({**GOOD.to_json(), "seconds": "soon"}), json.dumps({**GOOD.to_json(), "good": 1}), "[" * 9999):
        path.write_text(f"{bad}\n")
        with pytest.raises(Exception, match=r"trials.jsonl, line 1: no trial"):
            trials_in(path)


def test_a_folder_of_something_else_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(Exception, match="holds no trials"):
        begun(tmp_path, {"plan": "a"})
    (tmp_path / "chaos.json").write_text("[")
    with pytest.raises(Exception, match="holds trials of another plan"):
        begun(tmp_path, {"plan": "a"})


# ---------------------------------------------------------------- telling


def test_the_table() -> None:
    untried = replace(GOOD, fault="loader", good=False, not_tried="no loader", seconds=None, steps_again=None)
    stopped = replace(GOOD, fault="sigterm", seconds=20.0)
    wrong = replace(GOOD, fault="hang", good=False, problem="exit status 1", seconds=None)
    text = render([GOOD, LOST, untried, stopped, wrong]).splitlines()
    assert [line.split()[:2] for line in text[1:5]] == [["kill", "NO,"], ["loader", "not"], ["sigterm*", "yes"], ["hang", "NO,"]]
    assert "1 of 2" in text[1] and "2.0 s, 2.5 s" in text[1] and "8, 0" in text[1]
    assert text[5:] == ["kill: losses unlike the twin's", "hang: exit status 1", "loader was not tried: no loader",
                        "* resumed by hand: with the seconds of a start"]  # fmt: skip
    assert "not compared" in render([replace(GOOD, losses=False, repeatable=False)])
    assert rows_by_fault([GOOD])[0]["survived"] == 1


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    plans.write(Plan(model={"model": "gpt-tiny", "seq": 32}, hardware="CPU"), path)
    return path


@pytest.mark.parametrize(("found", "status"), [([GOOD], 0), ([GOOD, LOST], 1), ([replace(GOOD, good=False, not_tried="no room")], 1)])
def test_exit_1_if_anything_was_lost(
    found: list[ChaosTrial], status: int, plan: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_campaign", lambda *_: found)
    assert main(["chaos", str(plan)]) == status
    assert ("LOST" in capsys.readouterr().out) == (LOST in found)
    assert main(["run", "chaos", str(plan), "--json"]) == status
    assert json.loads(capsys.readouterr().out)["chaos"]["status"] == {0: "survived"}.get(status, "lost" if LOST in found else "not tried")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--faults", "kill,earthquake"], "'earthquake' is no fault"), (["--faults", ","], "names no fault"), (["--trials", "0"], "--trials 0"),
        (["--seed", "-1"], "--seed must not be negative"), (["--steps", "7"], "leave no room for faults"), (["--steps", "0"], "--steps 0"),
        (["--save-every", "0"], "leave no room"), (["--save-every", "30"], "leave no room"), (["--device", "tpu"], "--device tpu"),
        (["--limit", "0"], "--limit"), (["--limit", "nan"], "--limit"), (["--out", "{}"], "is a file"), (["--out", "{}/.."], "holds no trials"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(
    words: list[str], says: str, plan: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(campaigns, "twin", lambda *_: pytest.fail("a run was started"))
    words = [str(plan.parent) if word == "{}/.." else word.replace("{}", str(plan)) for word in words]
    assert main(["chaos", str(plan), "--device", "cpu", *words]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1 and said.startswith("error: ")


def test_every_fault_is_in_the_help_and_says_what_it_is() -> None:
    assert command.NAMES.split(", ") == list(faults.FAULTS)
    assert all(one.says and not one.says.endswith(".") for one in faults.FAULTS.values())


def test_no_plan_no_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", str(tmp_path / "none.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_log_that_was_cut_is_no_step_after_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cut to its checkpoint first; then there is a row of who goes on, and only then a step."""
    trial = Trial(request(tmp_path), tmp_path)
    trial.out.mkdir()
    begin, again = {"event": "start", "step": 0, "time": 1.0}, {"event": "resume", "step": 1, "time": 2.0}
    steps = [{"event": "step", "step": step, "loss": 0.5} for step in (1, 2, 3)]
    states = [[begin, *steps], [begin, steps[0]], [begin, steps[0], again], [begin, steps[0], again, steps[1]]]
    seen: list[bool] = []

    def write(rows: list[dict[str, Any]]) -> None:
        (trial.out / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def until(true: Any, _: str) -> None:
        for rows in states:
            write(rows)
            seen.append(bool(true()))

    write(states[0])
    monkeypatch.setattr(trial, "until", until)
    trial.trains_again()
    assert seen == [False, False, False, True] and trial.again_from == 1
