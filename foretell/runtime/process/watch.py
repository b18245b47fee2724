"""Notices that another rank is gone or hangs, names it, and ends this process in bounded time wherever it is stuck.

Every rank says once a second, through a store of their own, how far its main thread has come. Ranks on one machine look at
each other's process as well, which tells at once. The first two ranks judge, or the launcher where foretell started them: it
hears the same through a pipe. A store whose process is stopped never answers, so it is asked from a thread aside, and whoever
gets no answer judges by what it sees. A collective that waits for the dead cannot be left from Python: after a grace the
process is ended from this thread.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from foretell.decode import json_of
from foretell.runtime.process import proc
from foretell.runtime.process.blame import FRESH_SECONDS, TIMEOUT_SECONDS, EndReason, Judge, Limits, blamed
from foretell.runtime.process.control import Control, is_collective
from foretell.runtime.process.launch import launcher_lives, tell_launcher
from foretell.runtime.process.progress import (
    DATA,
    FAILED,
    GAP_SECONDS,
    LOOK_SECONDS,
    STEP,
    Monitor,
    Progress,
    RankReport,
)
from foretell.runtime.process.secure import Forged, seal, served_store, unseal
from foretell.runtime.process.signals import Stopped, exit_status

BEAT_SECONDS = 1.0
GRACE_SECONDS = 5.0
"""From knowing to ending, for the main thread to end by itself."""
_VERDICT = "verdict"
_JUDGES = (0, 1)
"""Two, so that each is judged by the other."""
_ANSWER_SECONDS = 0.2
"""A store that works answers sooner; one that does not is asked again at the next beat."""
_DEVICE_AFTER_SECONDS = 5.0
"""A device is asked whether it works after such a standstill: to ask while a CUDA graph is captured would break that."""


@dataclass(frozen=True, kw_only=True)
class RankMessage:
    """What one rank tells the others before the run ends."""

    why: str
    remedy: str = ""
    speaker: int = 0
    """On whom it is to tell the user."""
    died: bool = False
    """A rank went without a word."""
    signal: str = ""
    """It was asked to stop before anything was done."""
    ends: tuple[int, ...] = ()
    """Ranks that cannot end by themselves."""
    salvage: int | None = None
    """Save what was trained: after so many updates."""


class RankWatch:
    """Progress of all ranks; `verdict` says who is gone or hangs, if anyone."""

    def __init__(
        self, control: Control, *, tell: Callable[[str], None], left: Callable[[], str] = lambda: "",
        grace_s: float = GRACE_SECONDS, **seconds: float,
    ) -> None:  # fmt: skip
        """`left` tells what is left of the run; `seconds` are fields of `Limits`."""
        self.ranks, self.tell, self.left, self.grace_s = control.ranks, tell, left, grace_s
        self.limits = replace(Limits.usual(TIMEOUT_SECONDS), **seconds)
        self.progress = Progress()
        look_s = min(LOOK_SECONDS, self.limits.hang_s / 2, self.limits.say_s / 2)
        self.monitor = Monitor(self.progress, collectives=_collectives, device_works=self._device_works, look_s=look_s)
        self.said: RankMessage | None = None
        self.salvage: Callable[[int], None] = lambda _: None
        """Called with a number of updates where another rank asks to save that; the main thread is stuck, or on its way out."""
        self._saving = threading.Event()
        self._saving.set()
        self._done = threading.Event()
        self._missing: tuple[int, float] | None = None
        self._told = False
        self._looked = time.monotonic()
        self.peers: dict[int, int] = {}
        if control.ranks.world > 1:
            self._join(control)
        self._thread = threading.Thread(target=self._run, name="foretell-watch", daemon=True)
        self._thread.start()

    def _join(self, control: Control) -> None:
        limit = timedelta(seconds=max(10.0, self.limits.silence_s))
        host = os.environ.get("MASTER_ADDR") or "127.0.0.1"
        server: Any = None
        if self.ranks.is_first:
            server = served_store(host, 0, limit)
        about = control.gather({"place": proc.place(), "pid": os.getpid(), "port": server.port if server else 0})
        self.store = server or dist.TCPStore(host, about[0]["port"], is_master=False, timeout=limit)
        self.peers = {
            rank: said["pid"] for rank, said in enumerate(about)
            if rank != self.ranks.rank and said["place"] == about[self.ranks.rank]["place"]
        }  # fmt: skip
        self._starts = {rank: proc.started(pid) for rank, pid in self.peers.items()}
        self.judge = Judge(self.ranks.world, self.limits)
        self._report(self.monitor.report())
        control.gather(None)
        self._aside = _Aside()

    # ------------------------------------------------------------ what the training loop calls

    @property
    def verdict(self) -> str:
        return self.said.why if self.said is not None else ""

    @property
    def died(self) -> bool:
        return self.said is not None and self.said.died

    @property
    def speaks(self) -> bool:
        return self.ranks.rank == (self.said.speaker if self.said is not None else 0)

    def hint(self) -> str:
        """What to try."""
        return "; ".join(filter(None, [self.said.remedy if self.said is not None else "", self.left()]))

    def stop(self) -> None:
        """This rank is done, or gives up by itself; the others are no longer its business."""
        self._done.set()
        self._thread.join(timeout=2 * BEAT_SECONDS)

    def explain(self, error: Exception | None = None, wait_s: float = 3 * BEAT_SECONDS) -> str:
        """After something failed: who is gone or hangs, if that is why; a collective that failed always has a reason."""
        alone = self.ranks.world == 1
        if error is not None and is_collective(error):
            self.progress.at(FAILED)
        deadline = time.monotonic() + (0 if alone else wait_s)
        while self.said is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if self.said is None and error is not None and not alone and is_collective(error):
            self.said = self._unexplained(error)
            self._send(self.said)
            time.sleep(2 * BEAT_SECONDS if self.ranks.is_first else 0)
        if self.said is not None and self.said.signal:
            raise Stopped(self.said.signal)
        return self.verdict

    def publish(self, why: str, *, signal: str = "", salvage: int | None = None) -> None:
        """This rank cannot go on: tell the others why, and give them the time to hear it."""
        if self.ranks.world == 1 or self.said is not None:
            return
        self._done.set()
        self._thread.join(timeout=2 * BEAT_SECONDS)
        self._send(RankMessage(why=why, signal=signal, salvage=salvage))
        time.sleep(2 * BEAT_SECONDS if self.ranks.is_first else 0)

    def settle(self, seconds: float) -> None:
        """Wait for what another rank asked to save."""
        self._saving.wait(seconds)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        first = True
        while not self._done.wait(0 if first else BEAT_SECONDS):
            first = False
            found = self.said or self._look()
            if found is not None and found.salvage is not None:
                self._saving.clear()  # before anybody knows
            self.said = found
            if self.said is not None:
                break
        if self.said is not None and self.said.salvage is not None:
            self.salvage(self.said.salvage)
            self._saving.set()
        if self.said is not None and not self._done.wait(self.grace_s):
            self._end(self.said)

    def _end(self, said: RankMessage) -> None:
        """The main thread is stuck: end this process, and those beside it that cannot."""
        for rank in said.ends:
            pid = self.peers.get(rank)
            if pid is not None and proc.started(pid) == self._starts[rank]:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        if said.signal:
            os._exit(exit_status(said.signal))
        if self.speaks and not (said.died and launcher_lives()):
            hint = self.hint()
            self.tell(f"error: {said.why}; all ranks stop" + (f"; try: {hint}" if hint else ""))
        os._exit(1)

    def _look(self) -> RankMessage | None:
        """One look around: what another rank said before it gave up, who is no more, or who hangs; None while all is well."""
        report = self.monitor.report()
        tell_launcher(report.to_json())
        if self.ranks.world == 1:
            self._say_alone(report)
            return None
        now = time.monotonic()
        if now - self._looked > GAP_SECONDS:  # stopped and continued: nobody had the time to answer
            self._aside.began = now
        self._looked = now
        told = self._asked(report)
        if told is not None:
            return told
        for rank, pid in self.peers.items():
            if not proc.lives(pid):
                return self._gone_peer(rank, now)
        if launcher_lives():
            return None  # it judges
        hears = self._aside.seconds() < FRESH_SECONDS
        if self.ranks.rank not in _JUDGES and hears:
            return None
        self.judge.see(self.peers)
        self.judge.hear(self.ranks.rank, report)
        if self.ranks.is_first and (line := self.judge.line()):
            self.tell(line)
        verdict = self.judge.verdict(hears=hears)
        return self._sent(verdict) if verdict is not None else None

    def _say_alone(self, report: RankReport) -> None:
        """Nobody waits, so nobody is harmed; but a person may wonder."""
        late = report.steps > 0 and report.phase in (STEP, DATA)
        late = late and report.same_seconds >= max(self.limits.say_s, 10 * report.step_seconds)
        if late and not self._told:
            self.tell(f"no step for {report.same_seconds:.0f} s: in {report.phase} of step {report.step + 1}, at {report.where}")
        self._told = late

    def _asked(self, report: RankReport) -> RankMessage | None:
        """Ask the store aside, about once a second; what another rank said there."""
        aside = self._aside
        if not aside.works:
            wants = list(range(self.ranks.world)) if self.ranks.rank in _JUDGES else []
            aside.begin(lambda: self._exchange(report, wants))
        aside.wait(_ANSWER_SECONDS)
        if aside.works:
            unseen = 0 not in self.peers and not self.ranks.is_first
            away = time.monotonic() - self._looked > GAP_SECONDS  # this process was stopped just now
            if unseen and not away and aside.seconds() > self.limits.silence_s:
                return self._gone(0, f"its store has not answered for {aside.seconds():.0f} s")
            return None
        if aside.error is not None:
            ended = 0 in self.peers and not proc.lives(self.peers[0])
            how = f"its process {self.peers[0]} ended" if ended else f"its store fails: {str(aside.error).splitlines()[0][:80]}"
            return self._gone(0, how)
        said, reports = aside.result
        for rank, text in enumerate(reports):
            self.judge.hear(rank, _report(text))
        return said if isinstance(said, RankMessage) else None

    def _exchange(self, report: RankReport | None, wants: list[int]) -> tuple[RankMessage | None, list[bytes]]:
        if report is not None:
            self._report(report)
        said = _said(self.store.get(_VERDICT)) if self.store.check([_VERDICT]) else None
        keys = [_key(rank) for rank in wants]
        return said, [_genuine(text, key) for key, text in zip(keys, self.store.multi_get(keys), strict=True)] if keys else []

    def _report(self, report: RankReport) -> None:
        key = _key(self.ranks.rank)
        self.store.set(key, seal(json.dumps(report.to_json()).encode(), key))

    def _gone_peer(self, rank: int, now: float) -> RankMessage | None:
        """It may have said why: the store is asked once more before it is said to be gone."""
        self._missing = self._missing or (rank, now)
        first, since = self._missing
        answered = not self._aside.works and self._aside.began > since
        if not answered and now - since < 3 * BEAT_SECONDS:
            return None
        return self._gone(first, f"its process {self.peers[first]} ended")

    def _gone(self, rank: int, how: str) -> RankMessage:
        return RankMessage(why=f"rank {rank} is gone ({how})", died=True, speaker=1 if rank == 0 else 0)

    def _sent(self, verdict: EndReason) -> RankMessage:
        speaker = next((rank for rank in range(self.ranks.world) if rank not in verdict.culprits), 0)
        said = RankMessage(
            why=verdict.problem, remedy=verdict.remedy, speaker=speaker, died=verdict.gone,
            ends=() if verdict.gone else verdict.culprits,
        )  # fmt: skip
        self._send(said)
        return said

    # ------------------------------------------------------------ the store

    def _send(self, said: RankMessage) -> None:
        """The first word counts. A store that does not answer is not waited for."""
        aside = _Aside()
        aside.begin(lambda: self.store.compare_set(_VERDICT, "", _verdict(said)))
        aside.wait(2 * BEAT_SECONDS)

    def _unexplained(self, error: Exception) -> RankMessage:
        """Nobody is gone and nobody was judged, and yet a collective failed: say who did not take part, as far as known."""
        what = f"a collective failed ({' '.join(str(error).split())[:200]})"
        aside = _Aside()
        aside.begin(lambda: self._exchange(None, list(range(self.ranks.world))))
        aside.wait(2 * BEAT_SECONDS)
        found = {rank: report for rank, text in enumerate((aside.result or (None, []))[1]) if (report := _report(text))}
        verdict = blamed(found) if len(found) == self.ranks.world else None
        if verdict is None:
            return RankMessage(why=what, remedy="see that all ranks and the network between them are well")
        return RankMessage(why=f"{verdict.problem}: {what}", remedy=verdict.remedy)

    def _device_works(self) -> bool:
        """Whether the device still has something to do; as good as no where it cannot tell."""
        device = self.ranks.device
        if device.type != "cuda" or self.monitor.still_seconds() < _DEVICE_AFTER_SECONDS:
            return False
        with contextlib.suppress(RuntimeError):
            return not torch.cuda.current_stream(device).query()
        return False


class _Aside:
    """One call at a time in a thread of its own: it may never return."""

    def __init__(self) -> None:
        self.result: Any = None
        self.error: RuntimeError | None = None
        self.began = time.monotonic()
        self._thread: threading.Thread | None = None

    @property
    def works(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(self, work: Callable[[], Any]) -> None:
        self.result, self.error, self.began = None, None, time.monotonic()
        self._thread = threading.Thread(target=self._do, args=(work,), name="foretell-watch-store", daemon=True)
        self._thread.start()

    def seconds(self) -> float:
        """How long the call has not returned."""
        return time.monotonic() - self.began if self.works else 0.0

    def wait(self, seconds: float) -> None:
        if self._thread is not None:
            self._thread.join(seconds)

    def _do(self, work: Callable[[], Any]) -> None:
        try:
            self.result = work()
        except RuntimeError as error:
            self.error = error


def _collectives() -> int:
    """How many were started, in all groups of this process; 0 where torch does not tell."""
    total = 0
    with contextlib.suppress(Exception):  # not torch's public face
        for group in list(dist.distributed_c10d._world.pg_map):
            total += group._get_sequence_number_for_group()
    return total


def _report(text: bytes) -> RankReport | None:
    with contextlib.suppress(ValueError):
        return RankReport.from_json(json_of(text))
    return None


def _key(rank: int) -> str:
    return f"report/{rank}"


def _genuine(text: bytes, key: str) -> bytes:
    """What a rank of this job has said there; empty where it was not one."""
    with contextlib.suppress(Forged):
        return unseal(text, key)
    return b""


def _verdict(said: RankMessage) -> str:
    """As text: a store compares texts alone."""
    return base64.b64encode(seal(json.dumps(asdict(said)).encode(), _VERDICT)).decode()


def _said(text: bytes) -> RankMessage | None:
    with contextlib.suppress(ValueError, TypeError, Forged):
        found = json_of(unseal(base64.b64decode(text, validate=True), _VERDICT))
        return RankMessage(**{**found, "ends": tuple(found.get("ends", ()))})
    return None
