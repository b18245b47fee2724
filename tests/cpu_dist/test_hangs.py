"""Ranks that hang, for real: stopped by a signal or asleep in the user's code while the others wait in a collective."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.plan import file as plans
from foretell.plan.types import Mesh, Plan
from foretell.runtime.parallel import ranks as members
from foretell.runtime.process import proc
from foretell.runtime.process.blame import HANG_VARIABLE
from foretell.runtime.process.control import Control
from foretell.runtime.process.pool import RankFailure
from foretell.runtime.process.progress import STEP
from foretell.runtime.process.watch import RankWatch
from foretell.runtime.train import save
from foretell.runtime.train.run import run
from tests import forks
from tests.cpu_dist.train_cases import PLAN, ROOT, Quiet, go, ten_steps, write_own

HANGS = """
import time

class Hangs(Net):
    calls = 0
    def forward(self, x, mark):
        rank, at, how = os.environ.get("HANG", "::").split(":")
        Hangs.calls += 1
        if rank == os.environ.get("RANK", "0") and Hangs.calls == int(at):
            if how == "stops": os.kill(os.getpid(), signal.SIGSTOP)
            if how == "sleeps": time.sleep(1000)
            end = time.monotonic() + 6
            while how == "computes" and time.monotonic() < end: torch.randn(100, 100) @ torch.randn(100, 100)
        return super().forward(x, mark)

def model():
    Hangs.calls = 0
    return Hangs()
"""
AT = 11
"""The call of `forward` that hangs: in step 6."""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    path = Path(write_own(tmp_path, monkeypatch))
    path.write_text(path.read_text().replace("def model(): return Net()\n", "") + HANGS)
    return PLAN.with_(model={"model": str(path)}, mesh=Mesh(dp_shard=2))


class Written(Quiet):
    """What was said outlives the process that said it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def say(self, text: str) -> None:
        with self.path.open("a") as stream:
            stream.write(text + "\n")


def _hang(rank: int, world: int, out: str, plan: Plan, how: str) -> tuple[str, int]:
    torch.set_num_threads(1)
    os.environ.update({"HANG": how, HANG_VARIABLE: "2"})
    try:
        done = run(plan, {"steps": 8, "lr": 1e-3, "save_every": 2}, screen=Written(Path(f"{out}.{rank}")), out=Path(out), device="cpu")
    finally:
        del os.environ["HANG"], os.environ[HANG_VARIABLE]
    return done.status, done.step


@pytest.mark.parametrize(
    ("rank", "how"),
    [
        (1, "sleeps"),
        pytest.param(0, "stops", marks=pytest.mark.slow(reason="rank 0 is stopped under the command below, rank 1 on another machine")),
        pytest.param(1, "stops", marks=pytest.mark.slow(reason="rank 0 is stopped under the command below, rank 1 on another machine")),
        pytest.param(0, "sleeps", marks=pytest.mark.slow(reason="rank 1 sleeps here; rank 0 is stopped under the command below")),
    ],
)  # fmt: skip
def test_a_rank_that_hangs_is_named_and_nobody_is_left(ranks: Any, tmp_path: Path, plan: Plan, rank: int, how: str) -> None:
    """As under torchrun: no launcher of ours watches, and rank 0 serves the store that all talk through."""
    out = tmp_path / "run"
    began = time.monotonic()
    with pytest.raises(RankFailure) as failed:
        ranks(2).run(_hang, str(out), plan, f"{rank}:{AT}:{how}")
    assert time.monotonic() - began < 60
    told = [path.read_text() for path in (out.with_name("run.0"), out.with_name("run.1")) if path.exists()]
    said = "".join(told) + str(failed.value)
    named = {"stops": f"rank {rank} is stopped (SIGSTOP to process ", "sleeps": f"rank {rank} made no progress for "}[how]
    assert named in said and "the other ranks wait" in said, said
    assert ("own.py:" in said and " in forward" in said) == (how == "sleeps")
    assert "the last checkpoint is of step" in said and "foretell has a bug" not in said
    assert said.count(f"error: {named}") <= 1
    kept = save.complete(out / "checkpoints")
    assert kept and f"the last checkpoint is of step {kept[0].step};" in said
    assert kept[0].step == 4 or (how == "stops" and kept[0].step == 2)  # the save of step 4 may have been under way in it
    if (rank, how) == (0, "stops"):
        assert ranks(2).run(ten_steps, str(out), plan, {}, True) == [("done", 8)] * 2


@pytest.mark.slow(reason="a launcher waits for one in tests/pure/test_launch.py; it is told from a sleeper in tests/pure/test_blame.py")
def test_a_rank_that_computes_is_waited_for(ranks: Any, tmp_path: Path, plan: Plan) -> None:
    """Three times as long as a sleeper would be."""
    assert ranks(2).run(_hang, str(tmp_path / "run"), plan, f"1:{AT}:computes") == [("done", 8)] * 2


def _one_late(rank: int, world: int) -> tuple[str, str]:
    """Rank 1 computes for longer than a collective may take: rank 0's fails, and has something to say."""
    control = Control(members.start(PLAN.with_(mesh=Mesh(dp_shard=2)), device="cpu"), timeout_s=3.0)
    watch = RankWatch(control, tell=lambda _: None, grace_s=60.0)
    watch.progress.stepped(4)
    watch.progress.at(STEP)
    said = hint = ""
    if rank == 0:
        try:
            control.gather(None)
        except RuntimeError as error:
            said = watch.explain(error)
            hint = watch.hint()
    else:
        end = time.monotonic() + 60
        while not watch.verdict and time.monotonic() < end:
            sum(range(10000))
        said = watch.verdict
    watch.stop()
    return said, hint


@pytest.mark.slow(reason="waits for a time limit; test_detect.py names ranks whose collectives differ")
def test_a_collective_that_fails_names_the_rank_that_did_not_take_part(ranks: Any) -> None:
    (said, hint), (other, _) = ranks(2).run(_one_late)
    assert said == other and "the other ranks waited for rank 1, which " in said and "a collective failed (" in said, said
    assert "test_hangs.py:" in said and "in step of step 5" in said and hint


def _silent_rank(rank: int, world: int, silence: float) -> tuple[str, float, bool]:
    """Rank 1 is stopped by the kernel for a while, and nobody sees its process; rank 0 must notice, name it and go free."""
    plan = PLAN.with_(mesh=Mesh(dp_shard=2))
    control = Control(members.start(plan, device="cpu"))
    seen, proc.place = proc.place, lambda: f"machine {rank}"
    watch = RankWatch(control, tell=lambda _: None, silence_s=silence, grace_s=60.0)
    proc.place = seen
    other = control.gather(os.getpid())[1]
    began = time.monotonic()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    while not watch.verdict and time.monotonic() < began + 40:
        time.sleep(0.05)
    if rank == 0:
        os.kill(other, signal.SIGCONT)
    seconds = time.monotonic() - began
    control.gather(None)
    watch.stop()
    return watch.verdict, seconds, watch.speaks


def test_a_rank_of_another_machine_that_gives_no_sign_of_life_is_named_in_time(ranks: Any) -> None:
    (said, seconds, speaks), (whole, _, other) = ranks(2).run(_silent_rank, 6.0)
    assert said == "rank 1 is gone (no sign of life for 6 s)" and 6 <= seconds < 20
    assert speaks and not other and whole == said


def test_a_run_of_one_rank_that_stands_still_says_where_and_goes_on(tmp_path: Path) -> None:
    said: list[str] = []
    watch = RankWatch(Control(members.start(PLAN, device="cpu")), tell=said.append, say_s=1.5)
    watch.progress.stepped(4)
    watch.progress.at(STEP)
    end = time.monotonic() + 20
    while not said and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(1.5)
    watch.stop()
    assert len(said) == 1 and said[0].startswith("no step for ") and "in step of step 5, at " in said[0], said
    assert "test_hangs.py:" in said[0] and not watch.verdict


def test_the_command_names_a_stopped_rank_and_ends_with_one_error(tmp_path: Path, plan: Plan) -> None:
    """The launcher watches from outside: rank 0 itself is stopped, which serves all others."""
    path, out = tmp_path / "plan.json", tmp_path / "run"
    plans.write(plan, path)
    known = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HANG": f"0:{AT}:stops", HANG_VARIABLE: "2"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        known.pop(name, None)
    child = forks.Command("run", str(path), "--steps", "200", "--save-every", "2", "--out", str(out), env=known)
    told, said = child.communicate(timeout=150)
    assert child.returncode == 1 and told == "", said
    (line,) = [line for line in said.splitlines() if "error" in line or "Traceback" in line or "bug" in line]
    assert "rank 0 is stopped (SIGSTOP to process " in line
    assert any(f"the last checkpoint is of step {step};" in line for step in (2, 4))  # the second may have been under way
    assert f"foretell run {out} --resume" in line
    pid = int(line.partition("to process ")[2].partition(")")[0])
    assert not proc.lives(pid)
    assert go(out, plans.read(out / "plan.json").with_(mesh=Mesh(), accumulate=4), resume=True, steps=6).step == 6
