"""Ranks as the controller sees them: steps go out to all, tokens come back from one, and any that is lost ends all.

Messages are JSON over a socket in a folder that is this user's alone; whoever connects proves that it knows the key (HMAC).
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import AuthenticationError, connection
from pathlib import Path
from typing import Any

import torch

from foretell.errors import UserError
from foretell.serve.sampling import ChosenToken, Sampling
from foretell.serve.thread import EngineLost
from foretell.simulate.serving.scheduler import Step

SIGNALLED = "ended by signal"
OF_THE_NETWORK = ("gloo", "NCCL", "onnection")
SETTLES_SECONDS = 0.5
"""After which all that ended with a rank has said so."""
START_SECONDS, STEP_SECONDS, END_SECONDS = 600.0, 300.0, 10.0


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """How a model lies on ranks; rank = pp · tp ranks + tp, as in a plan's mesh."""

    tp: int = 1
    pp: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.pp

    @property
    def samples(self) -> int:
        """The rank that has the logits and chooses tokens."""
        return (self.pp - 1) * self.tp

    def told(self, rank: int) -> str:
        return f"rank {rank} (tp {rank % self.tp}, pp {rank // self.tp})"


class Meeting:
    """Where ranks find their controller: a socket that no one else can open."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="foretell-serve-"))
        self.key = secrets.token_bytes(32)
        self.address = str(self.folder / "steps")
        self._listener = connection.Listener(self.address, "AF_UNIX", backlog=64, authkey=self.key)

    def accept(self) -> connection.Connection:
        return self._listener.accept()

    def close(self) -> None:
        self._listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def interrupt(self) -> None:
        """Wake whoever waits in `accept`: nobody comes any more."""
        with contextlib.suppress(OSError):
            connection.Client(self.address, "AF_UNIX").close()


class _Sent:
    """A step under way."""

    def __init__(self, runner: RankedRunner) -> None:
        self.runner = runner

    def collect(self) -> list[ChosenToken]:
        return self.runner.collect()


class RankedRunner:
    """What an engine calls in the place of a model: all ranks."""

    ahead = False

    def __init__(self, links: Mapping[int, connection.Connection], layout: RankLayout, ended: Callable[[int], str] | None = None) -> None:
        """`links` by rank; `ended(rank)` says what became of a process that is gone."""
        self.links, self.layout, self.depth = dict(links), layout, layout.pp
        self._ended: Callable[[int], str] = ended or (lambda rank: "")
        about = [self._ready(rank) for rank in sorted(self.links)]
        self.words, self.context = int(about[0]["words"]), int(about[0]["context"])
        self.device, self.dtype = torch.device(about[0]["device"]), getattr(torch, about[0]["dtype"])
        self.weights_bytes = [int(one["weights_bytes"]) for one in about]
        """Of each rank."""
        self.kv_bytes = [int(one["kv_bytes"]) for one in about]
        self.processes = [int(one["process"]) for one in about]

    def launch(self, step: Step, tokens: Sequence[Sequence[int]], asked: Sequence[tuple[Sampling, int]]) -> _Sent:
        rows = [[row.sequence.pages, row.start, row.count, row.samples, list(given)] for row, given in zip(step, tokens, strict=True)]
        message = json.dumps({"rows": rows, "asked": [[asdict(how), place] for how, place in asked]}).encode()
        for rank, link in self.links.items():
            try:
                link.send_bytes(message)
            except OSError:
                raise self._lost(rank) from None
        return _Sent(self)

    def collect(self) -> list[ChosenToken]:
        """The tokens of the oldest step, from the rank that samples."""
        found = self._hear(self.layout.samples, STEP_SECONDS)["tokens"]
        return [ChosenToken(one, log, tuple((number, other) for number, other in likeliest)) for one, log, likeliest in found]

    def look(self) -> None:
        """Raises where a rank is gone."""
        for link in connection.wait(list(self.links.values()), 0):
            self._hear_from(next(rank for rank, one in self.links.items() if one is link))

    def close(self) -> None:
        for link in self.links.values():
            link.close()

    # ------------------------------------------------------------------ what ranks say

    def _ready(self, rank: int) -> Any:
        return self._hear(rank, START_SECONDS)

    def _hear(self, wanted: int, seconds: float) -> Any:
        """What a rank says; whatever another one says meanwhile is an error."""
        until = time.monotonic() + seconds
        waiting = {link: rank for rank, link in self.links.items() if rank == wanted or seconds != START_SECONDS}
        while (left := until - time.monotonic()) > 0:
            ready = connection.wait(list(waiting), left)
            for link in sorted(ready, key=lambda one: waiting[one] == wanted):  # type: ignore[index]  # those that only end first
                found = self._hear_from(waiting[link])  # type: ignore[index]
                if waiting[link] == wanted:  # type: ignore[index]
                    return found
        raise EngineLost(f"{self.layout.told(wanted)} did not answer within {seconds:g} s")

    def _hear_from(self, rank: int) -> Any:
        try:
            found = json.loads(self.links[rank].recv_bytes())
        except (EOFError, OSError):
            raise self._lost(rank) from None
        if "refused" in found:
            raise UserError(*found["refused"])
        if "failed" in found:
            raise self._lost(rank, found["failed"])
        return found

    def _lost(self, rank: int, words: str = "") -> EngineLost:
        """Why a rank is gone, or failed with some words. When one goes, others fail in what they were about to hear from it: one that was
        ended by a signal comes first, then words that are not of the network."""
        time.sleep(SETTLES_SECONDS)
        heard = {rank: words} if words else {}
        for other, link in self.links.items():
            with contextlib.suppress(EOFError, OSError, ValueError):
                while other not in heard and link.poll():
                    heard |= {other: told["failed"]} if "failed" in (told := json.loads(link.recv_bytes())) else {}
        fates = {other: self._ended(other) for other in self.links}
        for other, fate in fates.items():
            if fate.startswith(SIGNALLED):
                return EngineLost(f"{self.layout.told(other)} is gone: {fate}")
        own = {other: told for other, told in heard.items() if not any(word in told for word in OF_THE_NETWORK)} or heard
        for other, told in own.items():
            return EngineLost(f"{self.layout.told(other)} failed: {told}")
        return EngineLost(f"{self.layout.told(rank)} is gone: {fates[rank] or 'its connection was closed'}")


class RankProcesses:
    """Ranks as processes of this machine, which end with this one however it ends."""

    def __init__(self, layout: RankLayout, setup: Mapping[str, Any]) -> None:
        self.layout, self.meeting = layout, Meeting()
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(layout.world):
                told = {
                    "rank": rank, "tp": layout.tp, "pp": layout.pp, "address": self.meeting.address, "key": self.meeting.key.hex(),
                    "setup": dict(setup),
                }  # fmt: skip
                process = subprocess.Popen([sys.executable, "-m", "foretell.serve.ranks.worker"], stdin=subprocess.PIPE)
                self._processes.append(process)
                assert process.stdin is not None
                process.stdin.write(json.dumps(told).encode() + b"\n")
                process.stdin.flush()
            self.links = met(self.meeting, layout, lambda: any(one.poll() is not None for one in self._processes))
            if len(self.links) < layout.world:
                gone = next((rank for rank, one in enumerate(self._processes) if one.poll() is not None), 0)
                raise EngineLost(f"{layout.told(gone)} did not start: {self.ended(gone)}")
        except BaseException:
            self.close()
            raise

    def ended(self, rank: int) -> str:
        """What became of a process; empty while it lives."""
        code = self._processes[rank].poll()
        return "" if code is None else f"{SIGNALLED} {-code}" if code < 0 else f"ended with status {code}"

    @property
    def ids(self) -> list[int]:
        return [one.pid for one in self._processes]

    def close(self) -> None:
        until = time.monotonic() + END_SECONDS
        for process in self._processes:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        for process in self._processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.meeting.close()


def met(meeting: Meeting, layout: RankLayout, gone: Callable[[], bool], seconds: float = START_SECONDS) -> dict[int, connection.Connection]:
    """Connections by rank, as ranks call; fewer where one is gone before it has."""
    done = threading.Event()

    def watch() -> None:
        until = time.monotonic() + seconds
        while not done.wait(0.2):
            if gone() or time.monotonic() > until:
                meeting.interrupt()
                return

    threading.Thread(target=watch, daemon=True).start()
    links: dict[int, connection.Connection] = {}
    try:
        while len(links) < layout.world:
            try:
                link = meeting.accept()
                links[int(json.loads(link.recv_bytes())["rank"])] = link
            except (EOFError, OSError, AuthenticationError):
                if gone():
                    break
    finally:
        done.set()
    return links
