"""The faults. Each waits for its moment, does it, and waits for the next step after it."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from foretell.runtime.chaos.trial import NotTried, Trial, marked
from foretell.runtime.process import proc

FULL_BYTES = 20_000
"""No file may grow beyond this, and what the log has by then, while the disk is said to be full."""
STOPPED = 143
_DAY_SECONDS = 86400
_BOOT = Path(__file__).with_name("boot")


def kill(trial: Trial, point: int) -> None:
    """kill -9 of a rank"""
    trial.reach(point)
    trial.hit(trial.one())
    trial.trains_again()


def kill_cold(trial: Trial, point: int) -> None:
    """kill -9 of a rank, with --no-standby"""
    kill(trial, point)


def kill_saving(trial: Trial, point: int) -> None:
    """kill -9 of a rank while a checkpoint is written"""
    trial.reach(point)
    pid = trial.one()
    trial.until(lambda: list((trial.out / "checkpoints").glob("*.partial")), "write another checkpoint")
    trial.hit(pid)
    trial.trains_again()


def kill_twice(trial: Trial, point: int) -> None:
    """kill -9 of a rank, and of another one while ranks start again"""
    trial.reach(point)
    old = set(trial.pids().values())
    trial.hit(trial.one())
    trial.until(lambda: set(trial.pids().values()) - old, "start ranks again")
    time.sleep(trial.rng.uniform(0, 1.0))
    new = sorted(set(trial.pids().values()) - old)
    trial.hit(trial.rng.choice(new))
    trial.trains_again()


def kill_all(trial: Trial, point: int) -> None:
    """kill -9 of every rank at once"""
    trial.reach(point)
    first, *others = [trial.one(), *trial.pids().values()]
    trial.hit(first)
    for pid in set(others) - {first}:
        with contextlib.suppress(ProcessLookupError):  # whoever watches may have ended it already
            os.kill(pid, signal.SIGKILL)
    trial.trains_again()


def standby(trial: Trial, point: int) -> None:
    """kill -9 of the standby process, then of a rank"""
    trial.reach(point)
    assert trial.child is not None
    pid = trial.one()
    for other in proc.children(trial.child.pid):
        if other not in trial.pids().values() and "standby" in Path(f"/proc/{other}/cmdline").read_text():
            os.kill(other, signal.SIGKILL)
    trial.hit(pid)
    trial.trains_again()


def hang(trial: Trial, point: int) -> None:
    """SIGSTOP of a rank"""
    trial.reach(point)
    trial.hit(trial.one(), signal.SIGSTOP)
    trial.trains_again()


def damaged(trial: Trial, point: int) -> None:
    """a bit of the newest checkpoint flips, a file of it is cut or is gone; then kill -9 of a rank"""
    trial.reach(max(point, 2 * trial.request.save_every + 2))
    pid = trial.one()
    newest = max(path for path in (trial.out / "checkpoints").glob("step-*") if not path.name.endswith(".partial"))
    file = trial.rng.choice(sorted(newest.iterdir()))
    content = bytearray(file.read_bytes())
    how = trial.rng.choice(("flip", "cut", "delete"))
    if how == "delete":
        file.unlink()
    else:
        content[trial.rng.randrange(len(content))] ^= 1 << trial.rng.randrange(8)
        file.write_bytes(content if how == "flip" else content[: trial.rng.randrange(len(content))])
    trial.hit(pid)
    trial.trains_again()


def supervisor(trial: Trial, point: int) -> None:
    """kill -9 of the supervisor; its ranks save and leave, and the run is resumed by hand"""
    trial.reach(point)
    assert trial.child is not None
    trial.hit(trial.child.pid)
    trial.end()
    deadline = time.monotonic() + 30
    while list(marked(str(trial.folder.resolve()))) and time.monotonic() < deadline:
        time.sleep(0.02)
    trial.resume()


def sigterm(trial: Trial, point: int) -> None:
    """SIGTERM to the supervisor or to a rank: it saves and leaves, and is resumed by hand"""
    trial.reach(point)
    assert trial.child is not None
    trial.hit(trial.rng.choice([trial.child.pid, *trial.pids().values()]), signal.SIGTERM)
    _stopped(trial)


def notice(trial: Trial, point: int) -> None:
    """a file says that the machine goes away: it saves and leaves, and is resumed by hand"""
    trial.reach(point)
    trial.one()
    trial.at, trial.at_step = time.monotonic(), trial.step()
    (trial.folder / "gone").touch()
    _stopped(trial)


def _stopped(trial: Trial) -> None:
    status = trial.end()
    if status == 0 and trial.step() >= trial.request.steps:
        raise NotTried("the run was over before it had to leave; more --steps give it room")
    if status != STOPPED:
        raise OSError(f"it was asked to leave and ended with exit status {status}, not {STOPPED}")
    trial.flags = trial.flags[:-2] if "--notice" in trial.flags else trial.flags
    trial.resume()


def full_disk(trial: Trial, point: int) -> None:
    """no file may grow for a while, as on a full disk: checkpoints fail, training goes on"""
    trial.reach(point)
    trial.one()
    most = FULL_BYTES + (trial.out / "log.jsonl").stat().st_size
    files = [path.stat().st_size for path in (trial.out / "checkpoints").rglob("*") if path.is_file()]
    if not any(size > most for size in files):
        raise NotTried(f"its checkpoints have no file above {most:,} bytes, so that none fails")
    pids = list(trial.pids().values())
    before = [resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY)) for pid in pids]
    trial.at = time.monotonic()
    trial.until(lambda: "was not saved" in trial.said, "tell that a checkpoint failed")
    for pid, limit in zip(pids, before, strict=True):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)


def loader(trial: Trial, point: int) -> None:
    """kill -9 of a process that prepares samples, with --workers 2"""
    trial.reach(point)
    ranks = trial.pids().values()
    workers = [pid for pid, _ in marked(str(trial.folder.resolve())) if pid not in ranks and os.getsid(pid) in ranks]
    if not workers:
        raise NotTried("it has no processes that prepare samples: its data are none of your own")
    trial.hit(trial.rng.choice(workers))
    trial.until(lambda: "take its place" in trial.said or trial.step() >= trial.request.steps, "replace it")
    trial.resumed = time.monotonic() - trial.at


def clock(trial: Trial, point: int) -> None:
    """the wall clock of a rank jumps by up to a day, and a rank is killed"""
    trial.reach(point)
    (trial.folder / "jump").touch()
    trial.hit(trial.one())
    trial.trains_again()


# --- what they need before the run begins ----------------------------------------------------------------------------


def with_notice(trial: Trial) -> None:
    trial.flags += ["--notice", str(trial.folder / "gone")]


def with_clock(trial: Trial) -> None:
    rank, seconds = trial.rng.randrange(trial.request.world), trial.rng.uniform(-_DAY_SECONDS, _DAY_SECONDS)
    trial.env |= {"FORETELL_CHAOS_CLOCK": f"{rank} {seconds:.0f} {trial.folder / 'jump'}", "PYTHONPATH": str(_BOOT)}


@dataclass(frozen=True, kw_only=True)
class FaultClass:
    """One kind of fault."""

    does: Callable[[Trial, int], None]
    flags: tuple[str, ...] = ()
    """Of `foretell run`, for it alone."""
    prepares: Callable[[Trial], None] = lambda trial: None
    by_hand: bool = False
    """The run leaves, and a person or the next job resumes it: seconds include a start."""

    @property
    def says(self) -> str:
        return (self.does.__doc__ or "").strip()


FAULTS = {
    "kill": FaultClass(does=kill), "kill-cold": FaultClass(does=kill_cold, flags=("--no-standby",)), "kill-saving": FaultClass(does=kill_saving),
    "kill-twice": FaultClass(does=kill_twice), "kill-all": FaultClass(does=kill_all), "standby": FaultClass(does=standby),
    "hang": FaultClass(does=hang), "damaged": FaultClass(does=damaged), "supervisor": FaultClass(does=supervisor, by_hand=True),
    "sigterm": FaultClass(does=sigterm, by_hand=True), "notice": FaultClass(does=notice, prepares=with_notice, by_hand=True),
    "full-disk": FaultClass(does=full_disk), "loader": FaultClass(does=loader, flags=("--workers", "2")),
    "clock": FaultClass(does=clock, prepares=with_clock),
}  # fmt: skip
"""By the name that is typed."""
