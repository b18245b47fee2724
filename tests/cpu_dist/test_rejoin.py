"""Runs whose replicas come and go: whoever is lost, the others finish their round, and the weights are those of one process that plays the
same members in each round (`replayed.py`).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foretell.runtime.train import save
from tests import forks
from tests.cpu_dist.replayed import EVERY, MICRO, equal, plan_of, rounds, rows, sample_of, words
from tests.cpu_dist.train_cases import ROOT
from tests.further import further


def command(plan: Path, out: Path, steps: int, *more: str, **env: str) -> forks.Command:
    """A run of that plan, started."""
    known = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **env}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        known.pop(name, None)
    return forks.Command(*words(plan, out, steps, *more), env=known)


def ran(*asked: Any, **env: str) -> subprocess.CompletedProcess[str]:
    """The same, ended."""
    run = command(*asked, **env)
    try:
        told = run.communicate(240)
    finally:
        run.kill()
    return subprocess.CompletedProcess([], run.returncode or 0, *told)


# ---------------------------------------------------------------- lost replicas

HOW = further([("SIGKILL", "fp32"), ("SIGKILL", "int8"), ("SIGSTOP", "int8"), ("RAISE", "fp32")], [("SIGKILL", "int8")],
              "a replica that is lost in another way, or another format of what is sent")  # fmt: skip


@pytest.mark.parametrize(("how", "format"), HOW)
def test_the_others_finish_the_round_and_a_new_one_joins(how: str, format: str, tmp_path: Path) -> None:
    """Replica 1 is lost in the middle of round 1; replica 0 waits in round 3 until it is there again."""
    plan, out = plan_of(tmp_path, 3, format=format, grace=1.0 if how == "SIGSTOP" else 20.0), tmp_path / "run"
    mark, back = tmp_path / "mark", tmp_path / "back"
    hurt = f"{sample_of(1, EVERY + 2, 3)} {how} {mark};{sample_of(0, 3 * EVERY + 1, 3)} WAIT {back}"
    more = {"HURT": hurt, "MARK": str(mark), "BACK": str(back), "FORETELL_HANG_SECONDS": "1.5"}
    steps = 14 * EVERY
    done = ran(plan, out, steps, "--max-restarts", "2", **more)
    assert done.returncode == 0, done.stderr
    found = rounds(out)
    assert found[1]["missing"] == [1] and found[1]["replicas"] == [0, 2], "the others did not wait for it"
    assert any(1 in row["joined"] for row in found[3:]) and found[-1]["replicas"] == [0, 1, 2]
    known = equal(plan, out, steps)
    lost = [row for row in rows(out, "faults.jsonl") if row["event"] == "replica lost"]
    assert [row["replica"] for row in lost] == [1] and lost[0]["alive"] == 2
    without = [row for row in rows(out, "faults.jsonl") if row["event"] == "round"]
    away = [row for row in found if row["missing"]]
    assert [row["round"] for row in without] == [row["round"] for row in away] and all(row["alive"] == 2 for row in without)
    assert without[0]["trained_next"] == [{"replica": 1, "own_steps": [EVERY + 1, 2 * EVERY], "first_sample": EVERY * 3 * MICRO}]
    assert known.used == [steps, steps - len(away) * EVERY, steps]
    (end,) = [row for row in rows(out, "faults.jsonl") if row["event"] == "end"]
    assert end["not_trained"] == {"1": len(away) * EVERY} and f"the last {len(away) * EVERY} steps of replica 1" in done.stderr
    assert [row["replica"] for row in rows(out, "faults.jsonl") if row["event"] == "replica back"] == [1]


@pytest.mark.slow(reason="eight kills of a run; one is above, and benchmarks/diloco_churn.py does sixty at random moments")
def test_replicas_are_killed_again_and_again(tmp_path: Path) -> None:
    """At steps that are drawn, of replicas that are drawn; all of them come back."""
    plan, out, chance = plan_of(tmp_path, 4, format="int8", grace=5.0), tmp_path / "run", random.Random(3)
    kills = [(slot, step) for slot in range(4) for step in sorted(chance.sample(range(2, 30), 2))]
    hurt = ";".join(f"{sample_of(slot, step, 4)} SIGKILL {tmp_path / f'mark-{slot}-{step}'}" for slot, step in kills)
    steps = 60 * EVERY
    done = ran(plan, out, steps, "--max-restarts", "3", HURT=hurt, SLEEP="0.01")
    assert done.returncode == 0, done.stderr
    lost = [row["replica"] for row in rows(out, "faults.jsonl") if row["event"] == "replica lost"]
    assert sorted(lost) == sorted(slot for slot, _ in kills)
    assert rounds(out)[-1]["replicas"] == [0, 1, 2, 3] and all(row["alive"] >= 2 and row["differed"] == 0 for row in rounds(out))
    equal(plan, out, steps)


def test_below_the_quorum_the_run_is_saved_and_ends(tmp_path: Path) -> None:
    """One that is lost at the same sample every time is given up: the other waits for it, and what was joined is resumed later."""
    plan, out = plan_of(tmp_path, 2, format="int8"), tmp_path / "run"
    hurt = f"{sample_of(1, 2 * EVERY + 1, 2)} ALWAYS {tmp_path / 'mark'}"
    done = ran(plan, out, 6 * EVERY, "--max-restarts", "1", HURT=hurt)
    assert done.returncode == 1 and "1 of 2 replicas are left, and a round needs 2" in done.stderr, done.stderr
    assert len(rounds(out)) == 2
    equal(plan, out, 2 * EVERY)
    done = ran(plan, out, 6 * EVERY - 1, "--resume", "--max-restarts", "1")
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in rounds(out)] == [4, 8, 12, 16, 20, 23], "the last round is shorter"
    equal(plan, out, 6 * EVERY - 1)


@pytest.mark.slow(reason="one that is stopped for good is above, and one that comes late is in tests/pure/test_sync_hub.py")
def test_one_that_wakes_takes_the_weights_of_the_others_and_does_its_round_again(tmp_path: Path) -> None:
    plan, out, mark = plan_of(tmp_path, 3, format="int8", grace=0.5), tmp_path / "run", tmp_path / "mark"
    hurt = f"{sample_of(1, EVERY + 2, 3)} SIGSTOP {mark}"
    run = command(plan, out, 40 * EVERY, HURT=hurt, SLEEP="0.01", FORETELL_HANG_SECONDS="60")
    try:
        until(lambda: len(rounds(out)) > 2)
        os.kill(int(mark.read_text()), signal.SIGCONT)
        _, told = run.communicate(240)
    finally:
        run.kill()
    assert run.returncode == 0, told
    found = rounds(out)
    assert found[1]["left_out"] == [1] and found[2]["left_out"] == [], "later rounds do not wait for it"
    assert [row for row in found if 1 in row["joined"]][1:] and found[-1]["replicas"] == [0, 1, 2]
    assert not [row for row in rows(out, "faults.jsonl") if row["event"] == "replica lost"]
    equal(plan, out, 40 * EVERY)


def until(ask: Callable[[], Any], seconds: float = 120.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := ask()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)
    return found


@pytest.mark.parametrize("how", further([("kill",), ("stop",)], [("kill",)], "the same, once it is noticed"))
def test_without_the_process_that_joins_them_a_replica_saves(how: str, tmp_path: Path) -> None:
    plan, out = plan_of(tmp_path, 2, format="int8"), tmp_path / "run"
    run = command(plan, out, 500 * EVERY, "--max-restarts", "1", SLEEP="0.01", FORETELL_HANG_SECONDS="2")
    try:
        until(lambda: len(rounds(out)) > 2)
        os.kill(json.loads((out / "run.lock").read_text())["pid"], signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        _, told = run.communicate(240)
    finally:
        run.kill()
    assert run.returncode == 1 and "the process that joins replicas was ended by signal 9" in told and "replica 0 saved" in told
    (saved,) = save.complete(out / "checkpoints")
    assert saved.step >= 3 * EVERY and saved.about["used"] == [saved.step] * 2
    equal(plan, out, saved.step)
    if how == "kill":
        return
    before = [row for row in rounds(out) if row["step"] <= saved.step]
    done = ran(plan, out, saved.step + EVERY, "--resume")
    assert done.returncode == 0 and rounds(out)[: len(before)] == before, done.stderr
    assert rounds(out)[-1]["joined"] == [0, 1]
