"""One run under way, and what is done to it. Linux: processes are found by what /proc says of them."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from foretell.decode import json_of
from foretell.runtime.process import proc
from foretell.runtime.process.launch import end_with_parent
from foretell.trace.sandbox.process import package_parent

MARK = "FORETELL_CHAOS"
"""In the environment of every process of a trial: which."""
RESTARTS = 3
_LOOK_SECONDS = 0.004
_TAIL_BYTES = 4096


class NotTried(Exception):
    """The fault could not be done to this run, which says nothing of it."""


@dataclass(frozen=True, kw_only=True)
class ChaosRequest:
    """A plan, how long it runs, and what its runs are told besides."""

    plan: Path
    world: int
    work: Path
    """Where trials and twins run."""
    steps: int = 60
    save_every: int = 5
    words: tuple[str, ...] = ()
    """More of `foretell run`: --device, --data, ..."""
    environment: tuple[tuple[str, str], ...] = ()
    limit_s: float = 150.0
    """For each part of a trial: to come to the fault, to train again, to end."""

    @property
    def first(self) -> int:
        """Faults come after this step, when there is a checkpoint."""
        return self.save_every + 3

    @property
    def last(self) -> int:
        """And not later than this, so that the run is still there for them."""
        return max(self.first, self.steps - max(4 * self.save_every, self.steps // 5))

    def check(self) -> str:
        """Why it cannot be done; empty where it can. Two checkpoints and room behind them are needed."""
        if self.save_every >= 1 and self.steps >= 2 * self.save_every + 6:
            return ""
        return f"{self.steps} steps with a checkpoint every {self.save_every} leave no room for faults"


@dataclass
class Trial:
    """A run under way, and what was done to it."""

    request: ChaosRequest
    folder: Path
    flags: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    twin_flags: list[str] = field(default_factory=list)
    """With these its twin runs too: they change what is computed."""
    twin_env: dict[str, str] = field(default_factory=dict)
    rng: random.Random = field(default_factory=random.Random)
    child: subprocess.Popen[bytes] | None = None
    at: float = 0.0
    """When the fault came, by the monotonic clock."""
    at_step: int = 0
    """The last step in the log then."""
    again_from: int | None = None
    """The step after which it went on."""
    named: float | None = None
    """Seconds until the supervisor had told of it."""
    resumed: float | None = None
    statuses: list[int] = field(default_factory=list)

    @property
    def out(self) -> Path:
        return self.folder / "run"

    @property
    def said(self) -> str:
        with contextlib.suppress(OSError):
            return (self.folder / "said").read_text(errors="replace")
        return ""

    def begin(self) -> None:
        asked = self.request
        self.start(str(asked.plan), "--steps", str(asked.steps), "--save-every", str(asked.save_every), "--out", str(self.out),
                   "--max-restarts", str(RESTARTS))  # fmt: skip

    def start(self, *words: str) -> None:
        paths = [*self.env.get("PYTHONPATH", "").split(os.pathsep), package_parent(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        known = {**os.environ, **dict(self.request.environment), **self.env, MARK: str(self.folder.resolve())}
        known["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        command = [sys.executable, "-m", "foretell", "run", *words, *self.request.words, *self.flags]
        with open(self.folder / "said", "ab") as said:
            self.child = subprocess.Popen(
                command, env=known, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True,
                preexec_fn=end_with_parent(os.getpid()),
            )  # fmt: skip

    def step(self) -> int:
        """The last one in the log."""
        return next((row["step"] for row in reversed(rows_of_tail(self.out)) if isinstance(row.get("step"), int)), 0)

    def reach(self, step: int) -> None:
        """Wait until that step is done, and a little longer."""
        self.until(lambda: self.step() >= step)
        time.sleep(self.rng.uniform(0, 0.06))

    def until(self, true: Callable[[], Any], what: str = "come so far") -> None:
        deadline = time.monotonic() + self.request.limit_s
        while not true():
            if self.child is not None and self.child.poll() is not None and not true():
                raise TimeoutError(f"the run ended with {self.child.returncode} and did not {what}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"the run did not {what} within {self.request.limit_s:.0f} s")
            time.sleep(_LOOK_SECONDS)

    def pids(self) -> dict[int, int]:
        """Rank → its process; not the supervisor, nor loader processes. One that was forked says in its name which it is."""
        found: dict[int, int] = {}
        for pid in proc.children(self.child.pid) if self.child is not None else []:
            with contextlib.suppress(OSError):
                name = re.sub("^rank ([0-9]+) .*", r"\1", Path(f"/proc/{pid}/comm").read_text().strip())
                rank = _environment(pid).get("RANK", name)
                if rank.isdecimal() and proc.lives(pid):
                    found[int(rank)] = pid
        return found

    def one(self) -> int:
        """The process of a rank that is drawn."""
        pids = self.pids()
        if not pids:
            raise NotTried("the run was over before the fault came; more --steps give it room")
        return pids[self.rng.choice(sorted(pids))]

    def hit(self, pid: int, number: int = signal.SIGKILL) -> None:
        self.at, self.at_step = time.monotonic(), self.step()
        if self.at_step >= self.request.steps or not proc.lives(pid):
            raise NotTried("the run was over before the fault came; more --steps give it room")
        os.kill(pid, number)

    def trains_again(self) -> None:
        """Wait for the first step after the fault. A log is cut to its checkpoint before whoever goes on says so in a row: only a
        step after such a row that was not there before is one."""
        before = self._last_begin()

        def again() -> bool:
            if self.named is None and (self.out / "faults.jsonl").exists():
                self.named = time.monotonic() - self.at
            rows = rows_of(log(self.out))
            place = max((number for number, row in enumerate(rows) if row.get("event") in ("resume", "start")), default=None)
            return place is not None and rows[place] != before and any(row.get("event") == "step" for row in rows[place:])

        self.until(again, "train again")
        self.resumed = time.monotonic() - self.at
        self.again_from = self._last_begin().get("step")

    def _last_begin(self) -> dict[str, Any]:
        """The row of whoever trains: each has its own time."""
        return next((row for row in reversed(rows_of(log(self.out))) if row.get("event") in ("resume", "start")), {})

    def end(self) -> int:
        assert self.child is not None
        status = self.child.wait(self.request.limit_s)
        self.statuses.append(status)
        return status

    def resume(self) -> None:
        """As a person would, or the next job."""
        self.start(str(self.out), "--resume")
        with contextlib.suppress(TimeoutError):
            self.trains_again()

    def clean(self) -> int:
        """End what is left of it; how many processes that were."""
        left = [pid for pid, _ in marked(str(self.folder.resolve()))]
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if self.child is not None:
            self.child.wait()
        return len(left)


def log(out: Path) -> str:
    with contextlib.suppress(OSError):
        return (out / "log.jsonl").read_text(errors="replace")
    return ""


def rows_of(text: str) -> list[dict[str, Any]]:
    """Whole rows of a log: the last one may be half written."""
    found = []
    for line in text.split("\n"):
        with contextlib.suppress(ValueError):
            row = json_of(line)
            if isinstance(row, dict):
                found.append(row)
    return found


def rows_of_tail(out: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(OSError), open(out / "log.jsonl", "rb") as stream:
        return rows_of(_tail(stream).decode(errors="replace"))
    return []


def _tail(stream: IO[bytes]) -> bytes:
    """The last rows, but for one that begins before them."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - _TAIL_BYTES))
    text = stream.read()
    return text if size <= _TAIL_BYTES else text.partition(b"\n")[2]


def marked(mark: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Processes of a trial, by a variable in their environment."""
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            with contextlib.suppress(OSError):
                env = _environment(int(path.name))
                if env.get(MARK) == mark and proc.lives(int(path.name)):
                    yield int(path.name), env


def _environment(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    return dict(item.split("=", 1) for item in text.split("\0") if "=" in item)
