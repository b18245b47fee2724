"""Any command, kept alive: started again after a fault or a standstill, ended with all that it has started.

Its processes may put themselves in sessions of their own, as torchrun's ranks do: whatever loses its parent comes to this
process, which ends it before the next start. If this process is killed, another one beside it does that.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from foretell.errors import UserError
from foretell.runtime.process.guardian import Guardian
from foretell.runtime.process.launch import RESTARTS, end_with_parent
from foretell.runtime.process.signals import INTERRUPTED, SECOND_AFTER_SECONDS, STOPS, TERMINATED
from foretell.runtime.process.supervise import reaper
from foretell.runtime.process.supervise.budget import RestartBudget
from foretell.runtime.process.supervise.notices import Notices

FINAL = (0, 2, 126, 127, INTERRUPTED, TERMINATED)
"""Exit statuses after which it is not started again: done, wrong usage, not to be run, asked to stop."""
LASTED_SECONDS = 300.0
"""A command that has run so long has got further, where nothing else says so."""
GUARDIAN_SECONDS = 30.0
"""What is left of a command so long after its supervisor was killed is ended."""
_LOOK_SECONDS = 0.05
_CHUNK = 2**16


@dataclass(frozen=True, kw_only=True)
class CommandRequest:
    """How a command is kept alive."""

    words: Sequence[str]
    restarts: int
    stall_s: float | None = None
    """Without a sign of life for so long, it is ended and started again; None = never."""
    heartbeat: Path | None = None
    """The sign of life: this file changes. None = it writes to stdout or stderr."""
    grace_s: float = 2.0
    """From SIGTERM to SIGKILL, where it stands still or processes of it are left."""
    notices: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """More of it."""


class CommandKeeper:
    """One command."""

    def __init__(self, request: CommandRequest, say: Callable[[str], None]) -> None:
        self.request, self.say = request, say
        self.budget = RestartBudget(request.restarts)
        self.asked = ""
        """The signal that asked to stop."""
        self._child: subprocess.Popen[bytes] | None = None
        self._ending = 0.0
        self._passed: set[int] = set()

    def run(self) -> int:
        """Its last exit status; 128 and the signal's number where one ended it."""
        before = {number: signal.signal(number, self._forward) for number in STOPS if signal.getsignal(number) != signal.SIG_IGN}
        try:
            with reaper.adopting(), Notices(self.request.notices, self.say, lambda: self._forward(signal.SIGUSR1, None)):
                return self._kept()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _kept(self) -> int:
        reached = 0.0
        while True:
            began = time.monotonic()
            status, why, stalled = self._once()
            if self.asked or (status in FINAL and not stalled):
                return status
            if time.monotonic() - began >= LASTED_SECONDS:
                reached += 1
            pause = self.budget.spend(reached)
            if pause is None:
                if self.request.restarts:
                    self.say(f"{why}; it was restarted {self.request.restarts} times in a row: no more")
                return status
            self.say(f"{why}; restart {self.budget.row} of {self.request.restarts}" + (f" in {pause:.0f} s" if pause else ""))
            deadline = time.monotonic() + pause
            while time.monotonic() < deadline:
                if self.asked:
                    return status
                time.sleep(_LOOK_SECONDS)

    # ------------------------------------------------------------ one start

    def _once(self) -> tuple[int, str, bool]:
        """Start it and wait for it; its status, what became of it and whether it stood still. Nothing of it is left afterwards."""
        piped = self.request.stall_s is not None and self.request.heartbeat is None
        environment = {**os.environ, **self.request.environment, RESTARTS: str(self.budget.total)}
        try:
            child = self._child = subprocess.Popen(
                list(self.request.words), env=environment, start_new_session=True, preexec_fn=end_with_parent(os.getpid()),
                stdout=subprocess.PIPE if piped else None, stderr=subprocess.PIPE if piped else None,
            )  # fmt: skip
        except OSError as error:
            raise UserError(f"{self.request.words[0]} cannot be started: {error.strerror or error}", "give a command that is there") from error
        guardian = Guardian(most_s=GUARDIAN_SECONDS, tree=True)
        guardian.add(child.pid)
        for number in sorted(self._passed):
            child.send_signal(number)
        known = {guardian.process.pid}
        try:
            signs = _Signs(child, self.request)
            stalled = self._waited(child, signs)
            if stalled:
                self.say(f"{stalled}: it is ended")
                reaper.end(child.pid, known, grace_s=self.request.grace_s)
            status = child.wait()
            if left := reaper.others(known):
                self.say(f"{len(left)} processes that it has left are ended")
                reaper.end(None, known, grace_s=self.request.grace_s)
            signs.finish()
        finally:
            self._child = None
            reaper.end(child.pid if child.returncode is None else None, known)
            child.wait()
            guardian.close()
        if stalled:
            return _status(status) or 1, stalled, True
        name = os.path.basename(self.request.words[0])
        how = f"was ended by signal {-status} ({_name(-status)})" if status < 0 else f"ended with exit status {status}"
        return _status(status), f"{name} {how}", False

    def _waited(self, child: subprocess.Popen[bytes], signs: _Signs) -> str:
        """Until it has ended, or stands still: then how."""
        while child.poll() is None:
            signs.look(_LOOK_SECONDS)
            reaper.collect({child.pid})
            if self.request.stall_s is not None and signs.silent_seconds() > self.request.stall_s and not self.asked:
                what = f"{self.request.heartbeat} has not changed" if self.request.heartbeat else "it has written nothing"
                return f"{what} for {self.request.stall_s:.0f} s"
        return ""

    def _forward(self, number: int, _: FrameType | None) -> None:
        """Each signal once, and to stopped processes too; a second one that asks to end ends all at once."""
        now, child = time.monotonic(), self._child
        if number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
            if self._ending and now - self._ending > SECOND_AFTER_SECONDS:
                if child is not None:
                    reaper.end(child.pid, set())
                os._exit(128 + number)
            self._ending = self._ending or now
        self.asked = self.asked or _name(number)
        if number not in self._passed:
            self._passed.add(number)
            if child is not None and child.poll() is None:
                child.send_signal(number)
                child.send_signal(signal.SIGCONT)


class _Signs:
    """Signs of life of a command: what it writes, which is passed on, or a file that changes."""

    def __init__(self, child: subprocess.Popen[bytes], request: CommandRequest) -> None:
        self.heartbeat = request.heartbeat
        self._last = time.monotonic()
        self._seen = self._stamp()
        self._streams = selectors.DefaultSelector()
        for stream, handle in ((child.stdout, 1), (child.stderr, 2)):
            if stream is not None:
                os.set_blocking(stream.fileno(), False)
                self._streams.register(stream, selectors.EVENT_READ, handle)

    def silent_seconds(self) -> float:
        return time.monotonic() - self._last

    def look(self, seconds: float) -> None:
        """Wait so long, or until there is something."""
        if self._streams.get_map():
            for key, _ in self._streams.select(seconds):
                self._pass_on(key)
        else:
            time.sleep(seconds)
        if (seen := self._stamp()) != self._seen:
            self._seen, self._last = seen, time.monotonic()

    def finish(self) -> None:
        """Pass on what is still there."""
        while self._streams.get_map() and (ready := self._streams.select(0)):
            for key, _ in ready:
                self._pass_on(key)
        for key in list(self._streams.get_map().values()):
            self._streams.unregister(key.fileobj)

    def _pass_on(self, key: selectors.SelectorKey) -> None:
        part = b""
        with contextlib.suppress(BlockingIOError):
            part = os.read(key.fd, _CHUNK)
            if not part:
                self._streams.unregister(key.fileobj)
                return
        self._last = time.monotonic()
        with contextlib.suppress(OSError):
            left = memoryview(part)
            while left:
                left = left[os.write(key.data, left) :]

    def _stamp(self) -> Any:
        """Changes with the file; compared with itself alone, never with a clock."""
        if self.heartbeat is None:
            return None
        with contextlib.suppress(OSError):
            about = self.heartbeat.stat()
            return about.st_mtime_ns, about.st_size, about.st_ino
        return None


def _status(code: int) -> int:
    return 128 - code if code < 0 else code


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
