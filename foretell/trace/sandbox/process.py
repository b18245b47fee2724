"""The user's code in a process of its own, which never outlives foretell and ends at a time limit. Nothing is on disk.

    foretell ── requests: a line on stdin, which then stays open ──►  supervisor ── fork ──►  worker: runs the user's code
             ◄── answers: a JSON line each, on a pipe ────────────────────────────────────────┘

The supervisor is forked from a process that has imported torch (`trace.sandbox.server`). It and the worker are one process group.
It runs no code of the user's: when its stdin closes, however foretell ended, it kills the group. foretell kills it when it
has what it asked for, or when the time is up.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.decode import json_of
from foretell.errors import UserError
from foretell.trace.sandbox import server
from foretell.trace.sandbox.parent import end_with
from foretell.trace.sandbox.server import Forked, environment, forked, import_paths

TIME_LIMIT = 600.0
"""Seconds that tracing one step may take, unless asked otherwise."""
TAIL_BYTES = 16_384
"""What is kept of what the worker prints."""
_PARENT_SECONDS = 0.05
_DUMP_SECONDS = 0.5

Progress = Callable[[str], None]
Message = dict[str, Any]


@dataclass(frozen=True)
class WorkerEnded:
    """A worker that ended, or was ended, before it had answered everything."""

    answers: list[Message]
    code: int | None
    """Its exit status, as `subprocess` has it; None where the time was up."""
    tail: str
    """The end of what it printed; where the time was up, with the line of code it was at."""


def package_parent() -> str:
    return str(Path(__file__).resolve().parents[3])


def ask(
    module: str, requests: Sequence[Mapping[str, Any]], *, time_limit: float = TIME_LIMIT,
    progress: Progress = lambda _: None, imports_from_here: bool = False, stop: Stop | None = None,
) -> list[Message] | WorkerEnded:  # fmt: skip
    """Answers of `python -m MODULE` to requests, in order; the last may hold an error. Each has `time_limit` seconds.

    `imports_from_here`: modules of the current folder can be imported, after all others. `stop` ends it early.
    """
    worker = _WorkerSide(module, requests, [here()] if imports_from_here else [])
    if stop is not None:
        stop.add(worker.kill)
    try:
        return worker.answers(len(requests), time_limit, progress)
    finally:
        worker.end()


class Stop:
    """Ends workers of several threads, those too that are only just starting."""

    def __init__(self) -> None:
        self._ends: list[Callable[[], None]] = []
        self._lock, self._now = threading.Lock(), False

    def add(self, end: Callable[[], None]) -> None:
        with self._lock:
            self._ends.append(end)
            if self._now:
                end()

    def now(self) -> None:
        with self._lock:
            self._now = True
            server.stop()
            for end in self._ends:
                end()


def here() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise UserError("the current folder is gone", "cd to one that exists") from None


class _WorkerSide:
    """The other side, as foretell sees it."""

    def __init__(self, module: str, requests: Sequence[Mapping[str, Any]], more: Sequence[str]) -> None:
        here, there = os.pipe()
        try:
            self.process = _started(module, there, more)
        except BaseException:
            os.close(here)
            raise
        finally:
            os.close(there)
        self.replies, self.tail = here, b""
        self._pieces: list[bytes] = []
        assert self.process.stdin is not None and self.process.stdout is not None
        self.printed = self.process.stdout.fileno()
        with contextlib.suppress(BrokenPipeError):  # it ended at once: its exit status says more
            _write(self.process.stdin.fileno(), json.dumps(list(requests)).encode() + b"\n")

    def answers(self, count: int, time_limit: float, progress: Progress) -> list[Message] | WorkerEnded:
        found: list[Message] = []
        until = time.monotonic() + time_limit
        with selectors.DefaultSelector() as ready:
            for handle in (self.replies, self.printed):
                ready.register(handle, selectors.EVENT_READ)
            while self.replies in ready.get_map():
                left = until - time.monotonic()
                if left <= 0:
                    self._dump(ready)
                    return WorkerEnded(found, None, self._said())
                for message in self._messages(ready, left):
                    until = time.monotonic() + time_limit
                    if "ended" in message:
                        self._drain(ready)
                        return WorkerEnded(found, message["ended"], self._said())
                    if "progress" in message:
                        progress(message["progress"])
                        continue
                    found.append(message)
                    if len(found) == count or "error" in message:
                        return found
            self._drain(ready)
        return WorkerEnded(found, self.process.wait(), self._said())

    def _messages(self, ready: selectors.BaseSelector, seconds: float) -> list[Message]:
        """What has arrived; a line that a killed worker left half written is passed over."""
        lines: list[bytes] = []
        for key, _ in ready.select(min(seconds, 1.0)):
            content = os.read(key.fd, 1 << 20)
            if not content:
                ready.unregister(key.fd)
            elif key.fd == self.printed:
                self.tail = (self.tail + content)[-TAIL_BYTES:]
            else:
                self._pieces.append(content)
                if b"\n" in content:
                    *lines, rest = b"".join(self._pieces).split(b"\n")
                    self._pieces = [rest]
        messages = []
        for line in lines:
            with contextlib.suppress(ValueError):
                messages.append(json_of(line))
        return [message for message in messages if isinstance(message, dict)]

    def _dump(self, ready: selectors.BaseSelector) -> None:
        """Let the worker write down where it is."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGUSR1)
        self._drain(ready, _DUMP_SECONDS)

    def _drain(self, ready: selectors.BaseSelector, seconds: float = 0.1) -> None:
        """Read what is still in the pipe, without waiting for whoever else holds it."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and ready.get_map():
            self._messages(ready, left)

    def _said(self) -> str:
        return self.tail.decode(errors="replace")

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.stdout.close()
        os.close(self.replies)
        self.process.wait()


def _started(module: str, replies: int, more: Sequence[str]) -> subprocess.Popen[bytes] | Forked:
    """`python -m MODULE` in a session of its own, with the pipe it answers on: forked, or where that fails started."""
    try:
        return forked(module, replies, more)
    except OSError:
        return spawned(module, replies, more)


def spawned(module: str, replies: int, more: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(replies), *more], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env={**environment(), "PYTHONPATH": os.pathsep.join(import_paths())}, pass_fds=(replies,),
        start_new_session=True, bufsize=0,
    )  # fmt: skip


def _write(handle: int, content: bytes) -> None:
    while content:
        content = content[os.write(handle, content) :]


# --- the other side --------------------------------------------------------------------------------------------------


def serve(work: Callable[[list[Any], Callable[[Message], None]], None]) -> None:
    """The main of a module that `ask` names: read the requests, and answer them in a process that may die."""
    replies = int(sys.argv[1])
    sys.path += sys.argv[2:]
    os.set_inheritable(replies, False)
    requests = _requests()
    supervisor = os.getpid()
    worker = os.fork()
    if worker:
        _supervise(worker, replies)
    end_with(supervisor)
    sys.dont_write_bytecode = True  # a file that is changed within a second, to the same size, would be run as it was
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    import faulthandler

    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)
    faulthandler.enable(file=2, all_threads=False)  # what crashes says where it was

    def quiet() -> None:  # where the user's code forks, only the worker says where it is
        faulthandler.unregister(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    os.register_at_fork(after_in_child=quiet)
    worker = os.getpid()

    def reply(message: Message) -> None:
        if os.getpid() != worker:  # a process that the user's code has forked came here too
            os._exit(0)
        _write(replies, json.dumps(message).encode() + b"\n")

    work(requests, reply)


def _requests() -> list[Any]:
    line = b""
    while not line.endswith(b"\n"):
        content = os.read(0, 1 << 16)
        if not content:
            os._exit(1)  # whoever asked is gone
        line += content
    requests: list[Any] = json.loads(line)
    return requests


def _supervise(worker: int, replies: int) -> None:
    """Until the worker ends or stdin closes; then all of the group goes, this process with it."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with selectors.DefaultSelector() as ready:
        ready.register(0, selectors.EVENT_READ)
        while not ready.select(_PARENT_SECONDS):
            ended, status = os.waitpid(worker, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                with contextlib.suppress(OSError):
                    _write(replies, b"\n" + json.dumps({"ended": code}).encode() + b"\n")
                break
    os.killpg(0, signal.SIGKILL)
