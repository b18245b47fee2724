"""What Linux tells of a process from outside: whether it is there, stopped, at work. No torch.

Elsewhere little is known: a process is there or not, and nothing is said of its work.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

STOPPED = "T"
"""State of a process that got SIGSTOP; a debugger's is another, `t`."""
IDLE_CPU_SHARE = 0.05
"""Of one core: a process that uses less, with all its children, computes nothing."""
IDLE_IO_BYTES = 2**20
"""To and from disks: less than this in a while is no work."""
RESTLESS_SHARE = 0.25
"""Of the looks at it: a process that is found ready to compute, or waiting for a disk, more often is not idle."""
_KEEP_SECONDS = 900.0
_MOST_CHILDREN = 1000
_PROC = Path("/proc")
_LINUX = sys.platform == "linux"
_TICKS = os.sysconf("SC_CLK_TCK") if _LINUX else 100


def boot_id() -> str:
    """Another after every start of the machine; empty where it is not told."""
    with contextlib.suppress(OSError):
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return ""


def boot_time() -> float | None:
    """When this machine was started, by the clock on the wall."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return time.time() - float((_PROC / "uptime").read_text().split()[0])
    return None


def space() -> str:
    """Equal for processes of one machine that see each other's process numbers; empty where it is not told."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def place() -> str:
    """Equal for processes that see each other's process numbers."""
    boot, inside = boot_id(), space()
    return f"{boot} {inside}" if boot and inside else f"{socket.gethostname()} {os.getpid()}"


def _fields(path: str) -> list[str]:
    """A stat file from the state on; empty where there is none."""
    with contextlib.suppress(OSError):
        return Path(path).read_text().rpartition(")")[2].split()
    return []


def state(pid: int) -> str:
    """`R`, `S`, `D`, `T`, ...; empty where there is no such process, or it is not told."""
    return (_fields(f"/proc/{pid}/stat") or [""])[0]


def lives(pid: int) -> bool:
    """Whether a process runs: one that has ended and is not yet collected does not."""
    if _LINUX:
        return state(pid) not in ("", "Z", "X")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def started(pid: int) -> str:
    """When a process was started, to compare with what was said before: a number may come again, with another start."""
    if _LINUX:
        found = _fields(f"/proc/{pid}/stat")
        return found[19] if len(found) > 19 else ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = ["ps", "-o", "lstart=", "-p", str(pid)]
        return subprocess.run(asked, capture_output=True, text=True, timeout=5, check=False).stdout.strip()
    return ""


def children(pid: int) -> list[int]:
    """Of all its threads."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += [int(child) for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    return found


def work(pid: int) -> tuple[float, bool] | None:
    """CPU seconds of a process and all its descendants, those that have ended included, and whether all of them wait, and not
    for a disk. None where it is not told."""
    ticks, calm, waiting, seen = 0, True, [pid], set[int]()
    while waiting and len(seen) < _MOST_CHILDREN:
        one = waiting.pop()
        found = _fields(f"/proc/{one}/stat")
        if one not in seen and len(found) >= 15:
            ticks += sum(map(int, found[11:15]))
            calm = calm and found[0] in ("S", "I", "Z", STOPPED)
            waiting += children(one)
        elif one == pid:
            return None
        seen.add(one)
    return ticks / _TICKS, calm


def io_bytes(pid: int) -> int:
    """That a process moved to and from disks."""
    total = 0
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/io").read_text().splitlines():
            if line.startswith(("read_bytes", "write_bytes")):
                total += int(line.split()[1])
    return total


@dataclass(frozen=True)
class _Sample:
    at: float
    cpu_seconds: float
    io_bytes: int
    calm: bool
    """It waits, and not for a disk, and so do its children."""


class Idle:
    """Since when a process does nothing: its main thread waits, and neither it nor its children compute or use a disk."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._samples: deque[_Sample] = deque()

    def forget(self) -> None:
        self._samples.clear()

    def look(self, now: float) -> None:
        """To be called about once a second."""
        found = work(self.pid) if _LINUX else None
        if found is None:
            self._samples.clear()
            return
        self._samples.append(_Sample(now, found[0], io_bytes(self.pid), found[1]))
        while self._samples and self._samples[0].at < now - _KEEP_SECONDS:
            self._samples.popleft()

    def seconds(self) -> float:
        """How long that has been so, up to the last look."""
        if not self._samples:
            return 0.0
        last, since, restless = self._samples[-1], self._samples[-1].at, 0
        for number, sample in enumerate(reversed(self._samples), 1):
            restless += not sample.calm
            if last.io_bytes - sample.io_bytes > IDLE_IO_BYTES:
                break
            computes = last.cpu_seconds - sample.cpu_seconds > IDLE_CPU_SHARE * (last.at - sample.at) + 2 / _TICKS
            if not computes and restless <= RESTLESS_SHARE * number:
                since = sample.at
        return last.at - since
