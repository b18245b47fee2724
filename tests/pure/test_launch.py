"""The launcher, with ranks that are real processes and no torch: signals are passed on, hung ranks named, nobody left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import IO, Any

import pytest

from foretell.runtime.process import proc
from foretell.runtime.process.blame import Limits
from foretell.runtime.process.launch import CRASHED, GRACE_SECONDS, KILLED, LOST, Launcher, RunEnded, launch

ROOT = Path(__file__).resolve().parents[2]

RANK = """
import ctypes, os, signal, sys, threading, time
sys.path.insert(0, {root!r})
from foretell.runtime.process import launch
from foretell.runtime.process.progress import DATA, STEP, Monitor, Progress
from foretell.runtime.process.signals import Signals, exit_status

HOW = sys.argv[1].split(",")[int(os.environ["RANK"])]
spaces = {{}}
CODE = "import time\\ndef forward(seconds):\\n    time.sleep(seconds)\\n"
for name in ("torch/distributed/c10d.py", "own.py"):
    spaces[name] = {{"__name__": name}}
    exec(compile(CODE, {folder!r} + "/" + name, "exec"), spaces[name])

def say(*words):  # in one write: ranks share the stream, and an unbuffered print is several
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def report(monitor):
    while True:
        launch.tell_launcher(monitor.report().to_json())
        time.sleep(0.25)

told = Progress()
told.stepped(6)
told.stepped(7)
told.at(DATA if HOW == "data" else STEP)
threading.Thread(target=report, args=(Monitor(told),), daemon=True).start()
if HOW == "waits":
    spaces["torch/distributed/c10d.py"]["forward"](100)
if HOW == "leaves":
    spaces["torch/distributed/c10d.py"]["forward"](6)
if HOW in ("sleeps", "data"):
    spaces["own.py"]["forward"](100)
if HOW == "stops":
    os.kill(os.getpid(), signal.SIGSTOP)
if HOW == "holds the GIL":
    time.sleep(1)
    ctypes.PyDLL(None).sleep(100)
if HOW == "computes":
    end = time.monotonic() + 6
    while time.monotonic() < end: sum(range(1000))
if HOW == "listens":
    with Signals() as signals:
        say("listens", os.getpid())
        while not signals.asked: time.sleep(0.01)
        say("heard", signals.asked)
        time.sleep(1.0)  # saving
    sys.exit(exit_status(signals.asked))
if HOW == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
if HOW == "crashes":
    os._exit(7)
if HOW == "lost":
    launch.tell_launcher({{"transient": True}})
    os._exit(1)
if HOW == "raises":
    launch.tell_launcher({{"transient": "so they say"}})
    os.write(int(os.environ[launch.HEARS]), b"[" * 100_000 + b"\\n" + b"x" * 70_000)  # nonsense, and a line without an end
    os._exit(1)
if HOW == "deaf":
    say("listens", os.getpid())
    time.sleep(100)
"""


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("rank")
    (folder / "rank.py").write_text(textwrap.dedent(RANK.format(root=str(ROOT), folder=str(folder))))
    return str(folder / "rank.py")


def children() -> set[int]:
    return set(proc.children(os.getpid()))


def ended(rank: str, ways: str) -> RunEnded:
    before = children()
    found = launch([ways], len(ways.split(",")), limits=Limits(hang_s=1.5), program=[rank])
    assert children() == before  # none is left
    return found


# ---------------------------------------------------------------- who hangs


GIL = pytest.mark.slow(reason="another way to stand still; one that computes and answers is waited for below")


@pytest.mark.parametrize(
    ("ways", "culprit"),
    [
        pytest.param("waits,stops", 1, marks=pytest.mark.slow(reason="the other rank is stopped below")), ("stops,waits", 0),
        pytest.param("waits,sleeps,waits", 1, marks=pytest.mark.slow(reason="one of two that sleeps is named in test_hangs.py")),
        pytest.param("holds the GIL,waits", 0, marks=GIL),
    ],
)  # fmt: skip
def test_a_rank_that_is_stopped_or_asleep_is_named_and_all_are_ended(rank: str, ways: str, culprit: int) -> None:
    began = time.monotonic()
    found = ended(rank, ways)
    assert found.status == 1 and time.monotonic() - began < 40, found
    how = ways.split(",")[culprit]
    if how == "stops":
        assert f"rank {culprit} is stopped (SIGSTOP to process " in found.problem and "kill -CONT" in found.remedy
    else:
        assert f"rank {culprit} made no progress for " in found.problem and "in step 8" in found.problem
        assert ("own.py:3 in forward" if how == "sleeps" else "does not answer") in found.problem
    assert found.problem.endswith("; all ranks stopped")


def test_a_rank_that_computes_is_waited_for(rank: str) -> None:
    """Three times as long as a sleeper would be."""
    assert ended(rank, "leaves,computes") == RunEnded(0)


# ---------------------------------------------------------------- what is worth another start


@pytest.mark.parametrize(("how", "fault"), [("dies", KILLED), ("crashes", CRASHED), ("lost", LOST), ("raises", "")])
def test_faults_are_told_apart_and_peers_of_the_killed_are_ended_at_once(rank: str, how: str, fault: str) -> None:
    ways = f"{how},deaf" if how == "dies" else how
    began = time.monotonic()
    with Launcher(len(ways.split(",")), program=[rank], restarts=True) as launcher:
        for _ in range(2):  # as often as it is asked to
            found = launcher.attempt([ways])
            assert (found.fault, found.status, found.ranks) == (fault, 1, (0,) if how in ("dies", "crashes") else ())
            assert began < found.noticed < time.monotonic()
    assert how != "dies" or time.monotonic() - began < 2 * GRACE_SECONDS  # nobody was waited for, twice


# ---------------------------------------------------------------- signals

SIGNAL = pytest.mark.slow(reason="another signal through the same handler, as SIGUSR1 or SIGINT")

LAUNCHER = """
import sys
sys.path.insert(0, sys.argv[1])
from foretell.runtime.process.launch import launch
ended = launch([sys.argv[3]], len(sys.argv[3].split(",")), program=[sys.argv[2]])
print(ended, flush=True)
sys.exit(ended.status)
"""


def started(rank: str, ways: str, **more: Any) -> tuple[subprocess.Popen[str], list[int]]:
    """A launcher and its ranks, which listen."""
    words = [sys.executable, "-c", LAUNCHER, str(ROOT), rank, ways]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more)
    return child, [int(_line(child, "listens").split()[1]) for _ in ways.split(",")]


def _line(child: subprocess.Popen[str], begin: str) -> str:
    stream: IO[str] | None = child.stdout
    assert stream is not None
    limit = threading.Timer(60, child.kill)  # nothing to read is a failure, not a wait
    limit.start()
    line = stream.readline()
    limit.cancel()
    assert line.startswith(begin), line + stream.read()
    return line


def gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 30
    while any(map(proc.lives, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("name", [*(pytest.param(name, marks=SIGNAL) for name in ("SIGHUP", "SIGQUIT", "SIGUSR2", "SIGTERM")), "SIGUSR1", "SIGINT"])
def test_every_signal_that_asks_to_stop_reaches_all_ranks(rank: str, name: str) -> None:
    child, pids = started(rank, "listens,listens" if name == "SIGUSR1" else "listens")
    child.send_signal(getattr(signal, name))
    for _ in pids:
        assert _line(child, "heard") == f"heard {name}\n"
    if name in ("SIGHUP", "SIGUSR1", "SIGUSR2"):
        time.sleep(0.6)
        child.send_signal(getattr(signal, name))  # terminals and schedulers say it twice: they still save
    status = 130 if name == "SIGINT" else 143
    assert child.communicate(timeout=30)[0] == f"RunEnded(status={status}, problem='', remedy='')\n" and child.returncode == status
    gone(pids)


def test_a_signal_before_ranks_listen_is_no_failure(rank: str) -> None:
    child, pids = started(rank, "deaf,deaf")
    child.send_signal(signal.SIGUSR1)
    assert child.communicate(timeout=30)[0] == "RunEnded(status=143, problem='', remedy='')\n"
    gone(pids)


def test_a_second_signal_ends_all_at_once(rank: str) -> None:
    child, pids = started(rank, "listens,deaf")
    for pid in pids[1:]:
        os.kill(pid, signal.SIGSTOP)  # it never hears of it
    child.send_signal(signal.SIGTERM)
    _line(child, "heard")
    time.sleep(0.6)
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=30) == 143
    assert child.stdout is not None
    child.stdout.close()
    gone(pids)


def test_what_nohup_ignores_stays_ignored(rank: str) -> None:
    child, pids = started(rank, "listens", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    child.send_signal(signal.SIGHUP)
    os.kill(pids[0], signal.SIGHUP)
    time.sleep(0.3)
    child.send_signal(signal.SIGUSR2)
    assert _line(child, "heard") == "heard SIGUSR2\n" and "status=143" in child.communicate(timeout=30)[0]


def test_stopped_ranks_are_woken_to_save(rank: str) -> None:
    child, pids = started(rank, "listens,listens")
    os.kill(pids[1], signal.SIGSTOP)
    child.send_signal(signal.SIGTERM)
    assert sorted(_line(child, "heard") for _ in pids) == ["heard SIGTERM\n"] * 2 and "status=143" in child.communicate(timeout=30)[0]


def test_a_launcher_that_is_killed_leaves_nobody_not_even_the_stopped(rank: str) -> None:
    child, pids = started(rank, "listens,listens")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    child.kill()
    for _ in pids:
        assert _line(child, "heard") in ("heard SIGTERM\n", "heard SIGHUP\n")
    child.communicate(timeout=30)
    gone(pids)


def test_a_rank_that_does_not_end_after_its_launcher_is_ended(rank: str) -> None:
    from foretell.runtime.process import guardian

    sleeper = subprocess.Popen(["sleep", "100"], start_new_session=True)
    other = subprocess.Popen(["sleep", "100"], start_new_session=True)
    try:
        guardian.guard(f"{sleeper.pid} {guardian._started(sleeper.pid)}\n{other.pid} 1\nno rank\n".encode(), most_s=0.2)
        assert sleeper.wait(10) == -signal.SIGKILL and other.poll() is None  # the other has that number by chance
        guardian.guard(f"{other.pid} {guardian._started(other.pid)}\ndone\n".encode(), most_s=0.0)
        assert other.poll() is None
    finally:
        sleeper.kill()
        other.kill()
        other.wait()
