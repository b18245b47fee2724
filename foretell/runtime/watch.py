"""Notices that another rank is gone, names it, and ends this process in bounded time wherever it is stuck.

Every rank gives a sign of life once a second through a store of their own. Ranks on one machine look at each other's
process as well, which tells at once. A collective that waits for the dead cannot be left from Python: after a grace
the process is ended from this thread.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from foretell.runtime.control import Control

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 30.0
"""A rank on another machine that gives no sign of life for so long is taken for dead."""
GRACE_SECONDS = 5.0
"""From knowing to ending, for the main thread to end by itself."""


class Watch:
    """Signs of life; `verdict` says who is gone, if anyone."""

    def __init__(
        self, control: Control, *, tell: Callable[[str], None], silence_s: float = SILENCE_SECONDS,
        grace_s: float = GRACE_SECONDS,
    ) -> None:  # fmt: skip
        self.ranks, self.tell, self.silence_s, self.grace_s = control.ranks, tell, silence_s, grace_s
        self.verdict = ""
        self.died = False
        """A rank went without a word; otherwise it said why."""
        self.speaker = 0
        """On whom it is to tell the user."""
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        if control.ranks.world > 1:
            self._join(control)

    def _join(self, control: Control) -> None:
        limit = timedelta(seconds=max(10.0, self.silence_s))
        host = os.environ.get("MASTER_ADDR") or "127.0.0.1"
        server: Any = None
        if self.ranks.is_first:
            server = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        about = control.gather({"place": _place(), "pid": os.getpid(), "port": server.port if server else 0})
        self.store = server or dist.TCPStore(host, about[0]["port"], is_master=False, timeout=limit)
        self.peers = {
            rank: said["pid"] for rank, said in enumerate(about)
            if rank != self.ranks.rank and said["place"] == about[self.ranks.rank]["place"]
        }  # fmt: skip
        self.store.set(f"beat/{self.ranks.rank}", "0")
        control.gather(None)
        self._thread = threading.Thread(target=self._run, name="foretell-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """This rank is done, or gives up by itself; the others are no longer its business."""
        self._done.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * BEAT_SECONDS)

    def explain(self, wait_s: float = 3 * BEAT_SECONDS) -> str:
        """After a collective failed: who is gone, if that is why."""
        deadline = time.monotonic() + (wait_s if self._thread is not None else 0)
        while not self.verdict and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.verdict

    @property
    def speaks(self) -> bool:
        return self.ranks.rank == self.speaker

    def publish(self, why: str) -> None:
        """This rank cannot go on: tell the others why, and give them the time to hear it."""
        if self._thread is None or self.verdict:
            return
        self._done.set()
        self._thread.join(timeout=2 * BEAT_SECONDS)
        with contextlib.suppress(RuntimeError):
            self.store.set("verdict", why)
            time.sleep(2 * BEAT_SECONDS if self.ranks.is_first else 0)

    def _run(self) -> None:
        heard = dict.fromkeys(range(self.ranks.world), ("", time.monotonic()))
        beat = 0
        while not self._done.wait(BEAT_SECONDS if beat else 0):
            beat += 1
            why = self._wrong(heard, beat)
            if why:
                self.verdict = why
                break
        if self.verdict and not self._done.wait(self.grace_s):
            if self.speaks:
                self.tell(self.verdict)
            os._exit(1)

    def _wrong(self, heard: dict[int, tuple[str, float]], beat: int) -> str:
        """What another rank said before it gave up, or who is no more; empty while all is well."""
        try:
            self.store.set(f"beat/{self.ranks.rank}", str(beat))
            if self.store.check(["verdict"]):
                return self.store.get("verdict").decode()
            for rank, pid in self.peers.items():
                if not _lives(pid) and not self.store.check(["verdict"]):
                    return self._gone(rank, f"its process {pid} ended")
            return self._silent(heard) if self.ranks.is_first else ""
        except RuntimeError as error:
            return self._gone(0, f"its store does not answer: {str(error).splitlines()[0][:80]}")

    def _gone(self, rank: int, how: str) -> str:
        self.died, self.speaker = True, 1 if rank == 0 else 0
        return f"rank {rank} is gone ({how})"

    def _silent(self, heard: dict[int, tuple[str, float]]) -> str:
        now = time.monotonic()
        others = [rank for rank in heard if rank != self.ranks.rank]
        for rank, said in zip(others, self.store.multi_get([f"beat/{rank}" for rank in others]), strict=True):
            beat = said.decode()
            if beat != heard[rank][0]:
                heard[rank] = (beat, now)
            elif now - heard[rank][1] > self.silence_s:
                why = self._gone(rank, f"no sign of life for {self.silence_s:.0f} s")
                self.store.set("verdict", why)
                return why
        return ""


def _place() -> str:
    """Equal for processes that see each other's process numbers."""
    try:
        space = os.readlink("/proc/self/ns/pid")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"
    return f"{boot} {space}"


def _lives(pid: int) -> bool:
    """Whether a process runs: one that has ended and is not yet collected does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")
