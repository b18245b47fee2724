"""A process beside a launcher that outlives it: ranks whose launcher was killed are woken if they are stopped, so that they
save and end as they were asked to, and are ended if they do not. No torch, and nothing else of foretell: it starts at once.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

MOST_SECONDS = 600.0
"""A rank that has not ended so long after its launcher is ended."""
LOOK_SECONDS = 0.5
_DONE = b"done\n"
_FOLDER = "folder "


class Guardian:
    """The launcher's end of it."""

    def __init__(self, *, most_s: float = MOST_SECONDS, tree: bool = False) -> None:
        """With `tree`, what came of the processes is looked after as well."""
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(most_s), *(["tree"] if tree else [])],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def add(self, pid: int) -> None:
        """A rank was started."""
        self._write(f"{pid} {_started(pid)}\n".encode())

    def forget(self, folder: str) -> None:
        """A folder that is taken away once no rank is left."""
        self._write(f"{_FOLDER}{folder}\n".encode())

    def close(self) -> None:
        """No rank is left."""
        self._write(_DONE)
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait(10)

    def _write(self, words: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):  # it was killed: then nobody looks after the ranks
            assert self.process.stdin is not None
            self.process.stdin.write(words)
            self.process.stdin.flush()


def _started(pid: int) -> str:
    """Tells a process from a later one of the same number; empty where there is none, or it is not told."""
    with contextlib.suppress(OSError, IndexError):
        with open(f"/proc/{pid}/stat") as stream:
            found = stream.read().rpartition(")")[2].split()
        return "" if found[0] in "ZX" else found[19]
    return ""


def _lives(pid: int, started: str) -> bool:
    if os.path.exists("/proc/self/stat"):
        return bool(started) and _started(pid) == started
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        return True
    return False


def _tree(pid: int) -> list[int]:
    """What came of a process."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as stream:
                found += map(int, stream.read().split())
    return [*found, *(below for one in found for below in _tree(one))]


def guard(said: bytes, most_s: float = MOST_SECONDS, *, tree: bool = False) -> None:
    """What the launcher said, until it ended."""
    if said.endswith(_DONE):
        return
    ranks = [(int(words[0]), words[-1]) for line in said.decode().splitlines() if (words := line.split(" "))[0].isdigit()]
    if tree:
        ranks += [(below, _started(below)) for pid, _ in ranks for below in _tree(pid)]
    if sys.platform != "linux":  # there the kernel has sent it
        _send(ranks, signal.SIGTERM)
    end = time.monotonic() + most_s
    while left := [rank for rank in ranks if _lives(*rank)]:
        _send(left, signal.SIGCONT if time.monotonic() < end else signal.SIGKILL)
        time.sleep(LOOK_SECONDS)
    for line in said.decode().splitlines():
        if line.startswith(_FOLDER):
            shutil.rmtree(line.removeprefix(_FOLDER), ignore_errors=True)


def _send(ranks: list[tuple[int, str]], number: int) -> None:
    for pid, _ in ranks:
        with contextlib.suppress(OSError):
            leads = number == signal.SIGKILL and os.getpgid(pid) == pid
            os.killpg(pid, number) if leads else os.kill(pid, number)


if __name__ == "__main__":
    for name in ("SIGHUP", "SIGINT", "SIGTERM", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    guard(sys.stdin.buffer.read(), float(sys.argv[1]), tree="tree" in sys.argv)
