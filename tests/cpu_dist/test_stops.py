"""Runs that are asked to stop, at any time and by any signal, and runs beside each other in one folder."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretell.cli import main
from foretell.errors import UserError
from foretell.plan import file as plans
from foretell.plan.types import Mesh, Plan
from foretell.runtime.data.samples import shuffled
from foretell.runtime.process.lock import NAME
from foretell.runtime.process.signals import Stopped
from foretell.runtime.train import save
from foretell.runtime.train.outcome import DONE, STOPPED
from tests import forks
from tests.cpu_dist.train_cases import PLAN, ROOT, TEXT, Quiet, every_line, go, losses, ten_steps, write_own

STOPS = ("SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTERM")
ALIKE = ("SIGQUIT", "SIGUSR2")


@pytest.fixture(autouse=True)
def _every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    every_line(monkeypatch)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return write_own(tmp_path, monkeypatch)


def kept(out: Path) -> list[int]:
    return [one.step for one in save.complete(out / "checkpoints")]


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow(reason="caught as the others are") if name in ALIKE else ()) for name in STOPS]
)
def test_every_signal_stops_after_the_step_saves_and_resumes(tmp_path: Path, name: str) -> None:
    screen = Quiet({3: lambda: os.kill(os.getpid(), getattr(signal, name))})
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    done = go(tmp_path / "a", screen=screen, save_every=0)
    assert (done.status, done.signal, done.step) == (STOPPED, name, 3) and kept(tmp_path / "a") == [3]
    assert f"{name}: stopping after this step" in screen.said[-1] and not (tmp_path / "a" / NAME).exists()
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before
    if name == "SIGUSR1":
        assert go(tmp_path / "a", resume=True).step == 10
        go(tmp_path / "whole", save_every=0)
        assert losses(tmp_path / "a") == losses(tmp_path / "whole")


def test_a_signal_that_was_ignored_from_the_start_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        done = go(tmp_path / "a", screen=Quiet({2: lambda: os.kill(os.getpid(), signal.SIGHUP)}), steps=4, warmup=0, no_save=True)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (done.status, done.step) == (DONE, 4)


def test_a_signal_while_a_save_is_under_way_leaves_it_whole(tmp_path: Path) -> None:
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            if list((tmp_path / "a" / "checkpoints").glob("*.partial")):
                os.kill(os.getpid(), signal.SIGUSR2)
                return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        done = go(tmp_path / "a", steps=2000, save_every=1, keep=2000)
    finally:
        ended.set()
        thread.join()
    assert done.status == STOPPED and kept(tmp_path / "a") == list(range(done.step, 0, -1))
    assert not list((tmp_path / "a" / "checkpoints").glob("*.partial"))


EARLY = """
def hurt(where):
    if os.environ.get("EARLY") == f"{where}:{os.environ.get('RANK', '0')}": os.kill(os.getpid(), signal.SIGUSR1)

class Early(Net):
    def forward(self, x, mark):
        hurt("forward")
        return super().forward(x, mark)

def model():
    hurt("model")
    return Early()
"""


@pytest.fixture
def early(own: str) -> str:
    path = Path(own)
    path.write_text(path.read_text().replace("def model(): return Net()\n", "") + EARLY)
    return own


@pytest.mark.parametrize("where", ["model", "forward"])
def test_a_signal_before_the_first_step_leaves_at_once_and_nothing_behind(
    tmp_path: Path, early: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    monkeypatch.setenv("EARLY", f"{where}:0")
    plan = PLAN.with_(model={"model": early})
    with pytest.raises(Stopped, match="SIGUSR1"):
        go(tmp_path / "a", plan, data=None)
    assert not (tmp_path / "a").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    plans.write(plan, tmp_path / "plan.json")
    assert main(["run", str(tmp_path / "plan.json"), "--out", str(tmp_path / "mine"), "--device", "cpu"]) == 143
    out, err = capsys.readouterr()
    assert "stopped before the first step (SIGUSR1)" in out and "nothing to save" in err and "Traceback" not in err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    monkeypatch.delenv("EARLY")
    go(tmp_path / "a", plan, data=None, steps=2, warmup=0)
    monkeypatch.setenv("EARLY", f"{where}:0")
    with pytest.raises(Stopped):  # a run that goes on keeps what it has
        go(tmp_path / "a", plan, resume=True, steps=4)
    assert kept(tmp_path / "a") == [2] and not (tmp_path / "a" / NAME).exists()


def _stopped_early(rank: int, world: int, out: str, plan: Plan, where: str) -> tuple[str, float]:
    os.environ["EARLY"] = where
    began = time.monotonic()
    try:
        ten_steps(rank, world, out, plan, {"steps": 4000}, False)
    except Stopped as left:
        return left.signal, time.monotonic() - began
    finally:
        os.environ.pop("EARLY")
    return "went on", 0.0


@pytest.mark.parametrize(
    "where", ["model:1", "forward:1", pytest.param("forward:0", marks=pytest.mark.slow(reason="rank 1 gets it here, and rank 0 where it is alone"))]
)
def test_a_signal_to_one_rank_before_the_first_step_stops_all(ranks: Any, tmp_path: Path, early: str, where: str) -> None:
    plan = PLAN.with_(model={"model": early}, mesh=Mesh(dp_shard=2))
    found = ranks(2).run(_stopped_early, str(tmp_path / "a"), plan, where)
    assert [name for name, _ in found] == ["SIGUSR1"] * 2 and max(seconds for _, seconds in found) < 60
    assert not (tmp_path / "a").exists()


def _all_hurt(rank: int, world: int, out: str, plan: Plan) -> tuple[str, str, int]:
    """Both ranks get the signal, each at a sample of its own of the third step."""
    from foretell.runtime.train.run import run

    sample = int(shuffled(64, 0, 0, np.array([8 * 2 + 2 * rank]))[0])
    os.environ.update(HURT_AT=f"{rank}:{sample}", HURT_WITH="SIGUSR1")
    try:
        done = run(plan, {"steps": 4000, "lr": 1e-3}, screen=Quiet(), out=Path(out), device="cpu")
        return done.status, done.signal, done.step
    finally:
        os.environ.pop("HURT_AT")


@pytest.mark.slow(reason="one rank gets it in test_train.py, and all stop at the same step")
def test_a_signal_to_all_ranks_saves_one_checkpoint(ranks: Any, tmp_path: Path, own: str) -> None:
    found = ranks(2).run(_all_hurt, str(tmp_path / "a"), PLAN.with_(model={"model": own}, mesh=Mesh(dp_shard=2)))
    assert found[0] == found[1] and found[0][:2] == ("stopped", "SIGUSR1") and kept(tmp_path / "a") == [found[0][2]]


# ---------------------------------------------------------------- processes of their own


TALKS = """
class Talks(Net):
    def forward(self, x, mark):
        print("a model that prints", flush=True)
        return super().forward(x, mark)

def model(): return Talks()
"""


AT_A_TERMINAL = """
import os, runpy
os.setsid()
terminal = os.open(os.environ["TERMINAL"], os.O_RDWR)  # the first that a session opens is its own
for number in range(3): os.dup2(terminal, number)
os.close(terminal)
sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)
runpy.run_module("foretell", run_name="__main__", alter_sys=True)
"""
"""`foretell` as the leader of a session that has a terminal."""


def environment() -> dict[str, str]:
    known = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TERM": "xterm"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        known.pop(name, None)
    return known


def test_a_terminal_that_closes_costs_nothing(tmp_path: Path, own: str) -> None:
    """The kernel sends SIGHUP and fails every write from then on, also what the model itself prints."""
    Path(own).write_text(Path(own).read_text().replace("def model(): return Net()\n", "") + TALKS)
    plans.write(PLAN.with_(model={"model": own}), tmp_path / "plan.json")
    out = tmp_path / "run"
    terminal, theirs = pty.openpty()
    words = ["run", str(tmp_path / "plan.json"), "--steps", "1000000", "--out", str(out)]
    child = forks.Command(*words, env={**environment(), "TERMINAL": os.ttyname(theirs)}, code=AT_A_TERMINAL)
    said, deadline = b"", time.monotonic() + 100
    while not re.search(rb"step {1,6}([3-9]|\d\d+)/", said) and time.monotonic() < deadline:  # not every step is told
        if select.select([terminal], [], [], 1)[0]:
            said += os.read(terminal, 65536)
    os.close(theirs)
    os.close(terminal)
    child.communicate()
    assert child.returncode == 143, said[-2000:]
    rows = losses(out)
    assert kept(out) == [rows[-1][0]] and rows[-1][0] >= 3 and not (out / NAME).exists() and (out / "measurement.json").exists()


def test_a_run_has_its_folder_for_itself_until_it_ends(tmp_path: Path) -> None:
    """Another process beside it is refused, in words; once it was killed, its folder is taken over and the run resumes."""
    plans.write(PLAN, tmp_path / "plan.json")
    out = tmp_path / "run"
    words = ["run", str(tmp_path / "plan.json"), "--data", str(TEXT), "--steps", "1000000", "--save-every", "5", "--out", str(out)]
    child = forks.Command(*words, env=environment())
    try:
        deadline = time.monotonic() + 100
        while not (out / "checkpoints" / "step-00000005").exists():
            assert time.monotonic() < deadline and child.poll() is None
            time.sleep(0.05)
        settings = (out / "settings.json").read_bytes()
        with pytest.raises(UserError, match=rf"is in use by process {child.pid} on .*, since .*`kill {child.pid}`: it saves and leaves") as refused:
            go(out, resume=True, steps=7)
        assert refused.value.exit_code == 2 and (out / "settings.json").read_bytes() == settings and child.poll() is None
        child.kill()
    finally:
        child.kill()
        child.communicate()
    assert json.loads((out / NAME).read_text())["pid"] == child.pid
    screen, saved = Quiet(), kept(out)
    done = go(out, resume=True, screen=screen, steps=saved[0] + 2)
    assert any(f"the lock of process {child.pid}" in line and "is taken over" in line for line in screen.said)
    assert done.step == saved[0] + 2 and kept(out)[0] == saved[0] + 2 and not (out / NAME).exists()


def _refused(rank: int, world: int, out: str, plan: Plan) -> tuple[str, int]:
    try:
        ten_steps(rank, world, out, plan, {"steps": 12}, True)
    except UserError as error:
        return str(error), error.exit_code
    return "went on", 0


@pytest.mark.slow(reason="ranks, as one process above")
def test_all_ranks_learn_that_the_folder_is_in_use(ranks: Any, tmp_path: Path) -> None:
    from foretell.runtime.process.lock import take

    plan = PLAN.with_(mesh=Mesh(dp_shard=2))
    ranks(2).run(ten_steps, str(tmp_path / "a"), plan, {"steps": 4, "data": str(TEXT), "lr": 1e-3, "eval_batches": 2}, False)
    held = take(tmp_path / "a", say=lambda _: None)
    found = ranks(2).run(_refused, str(tmp_path / "a"), plan)
    assert all(f"is in use by process {os.getpid()}" in said and status == 2 for said, status in found), found
    with pytest.raises(UserError, match="holds a run already"):
        go(tmp_path / "a")
    held.release()
    (tmp_path / "new").mkdir()
    held = take(tmp_path / "new", say=lambda _: None)
    with pytest.raises(UserError, match=f"is in use by process {os.getpid()}"):  # for new runs too
        go(tmp_path / "new")
    held.release()
    assert not list((tmp_path / "new").iterdir())
