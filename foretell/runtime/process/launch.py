"""Start a plan's ranks on this machine, with the environment that torchrun gives, and watch them. No torch in the parent.

Children are in sessions of their own: Ctrl-C reaches the parent, which passes it on once. A parent that is killed takes its
children with it: they get SIGTERM, save and end; the stopped among them are woken for that (`guardian`). A child that dies
ends the others in bounded time, and so does one that hangs (`blame`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from foretell.decode import json_of
from foretell.errors import UserError
from foretell.hardware.this_machine import physical_cores
from foretell.plan.legal import launch as command_for
from foretell.plan.types import Plan
from foretell.runtime.process.blame import TIMEOUT_SECONDS, EndReason, Judge, Limits
from foretell.runtime.process.guardian import Guardian
from foretell.runtime.process.progress import RankReport
from foretell.runtime.process.signals import ENDS, SECOND_AFTER_SECONDS, STOPS, caught, exit_status, leave_dead_terminal

LAUNCHED = "FORETELL_LAUNCHED"
"""Set for ranks that were started here: the process that did."""
HEARS = "FORETELL_WATCH_FD"
"""Set for them too: where to write what they are at."""
GRACE_SECONDS = 15.0
"""How long the others may take once one has failed."""
LOOK_SECONDS = 1.0
_MOST_BYTES = 2**16
_PR_SET_PDEATHSIG = 1
_SPOKEN = (1, 2, 70, 130, 143)
"""Exit statuses of a rank that has said why."""


@dataclass(frozen=True)
class RunEnded:
    """How a launched run ended, and what to say if nobody has said it."""

    status: int
    problem: str = ""
    remedy: str = ""


def is_rank() -> bool:
    """Whether this process was started as a rank, by torchrun, Slurm's wrapper or `launch`."""
    return bool(os.environ.get("WORLD_SIZE")) and bool(os.environ.get("RANK"))


def launcher_lives() -> bool:
    """Whether whoever started this rank is still there: it watches, and tells."""
    return os.environ.get(LAUNCHED) == str(os.getppid())


def tell_launcher(content: Mapping[str, Any]) -> None:
    """What this rank is at. A launcher that does not listen, because it is stopped, misses it."""
    where = os.environ.get(HEARS)
    if where and launcher_lives():
        with contextlib.suppress(OSError, ValueError):
            os.write(int(where), json.dumps(content).encode() + b"\n")


def check_room(plan: Plan, device: str) -> None:
    """Refuse, with the command to use, a plan for more GPUs than this machine has."""
    world = plan.mesh.world
    there = gpus()
    if device == "cpu" or (device == "auto" and not there) or there >= world:
        return
    raise UserError(
        f"the plan wants {world} GPUs and this machine has {there}",
        f"start it on every machine with `{command_for(plan, max(1, there))}`, or try it with --device cpu",
    )


def gpus() -> int:
    """How many this process may use, without torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() and name.strip() != "-1"])
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # no driver, no library: no GPU
        return 0


def launch(
    words: Sequence[str], world: int, *, say: Callable[[str], None] = lambda _: None, limits: Limits | None = None,
    program: Sequence[str] = ("-m", "foretell"),
) -> RunEnded:  # fmt: skip
    """Run `python -m foretell WORDS` as so many ranks; `say` gets lines for the screen."""
    outlook = _Outlook(world, limits or Limits.usual(TIMEOUT_SECONDS), say)
    port = _free_port()
    children: list[subprocess.Popen[bytes]] = []
    forward, guardian = SignalForwarder(children), Guardian()
    before = {number: signal.signal(number, forward) for number in caught()}
    try:
        for rank in range(world):
            children.append(_start([*program, *words], rank, world, port, outlook.pipe(rank)))
            guardian.add(children[-1].pid)
            forward.catch_up(children[-1])
        return _wait(children, outlook)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _end(children)
        guardian.close()
        outlook.close()


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """At once, with whatever they have started; stopped processes too."""
    _kill(children)
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_SECONDS)


def _kill(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in reversed(children):  # the first serves the others, and they would complain
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def _start(words: Sequence[str], rank: int, world: int, port: int, pipe: int) -> subprocess.Popen[bytes]:
    threads = max(1, physical_cores() // world)
    env = {
        **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), LAUNCHED: str(os.getpid()), HEARS: str(pipe),
    }  # fmt: skip
    env.setdefault("OMP_NUM_THREADS", str(threads))
    if sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        return subprocess.Popen(
            [sys.executable, *words], env=env, stdin=subprocess.DEVNULL, start_new_session=True,
            pass_fds=(pipe,), preexec_fn=end_with_parent(os.getpid()),
        )  # fmt: skip
    finally:
        os.close(pipe)


def end_with_parent(parent: int) -> Callable[[], None] | None:
    """What a child does first: ask the kernel for SIGTERM when its parent ends."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return ask


class SignalForwarder:
    """Passes signals on to children, each once, and wakes those that are stopped, so that they can save; a second one that
    asks to end ends them."""

    def __init__(self, children: list[subprocess.Popen[bytes]]) -> None:
        self.children = children
        self._passed: list[int] = []
        self._ending = 0.0

    def __call__(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGHUP:
            leave_dead_terminal()
        if number in ENDS:
            if self._ending and now - self._ending > SECOND_AFTER_SECONDS:
                _kill(self.children)
                os._exit(128 + number)
            self._ending = self._ending or now
        if number not in self._passed:
            self._passed.append(number)
            for child in self.children:
                _send(child, number)

    def catch_up(self, child: subprocess.Popen[bytes]) -> None:
        """Tell a child that was not there yet what the others were told."""
        for number in self._passed:
            _send(child, number)


def _send(child: subprocess.Popen[bytes], number: int) -> None:
    if child.poll() is None:
        child.send_signal(number)
        child.send_signal(signal.SIGCONT)


class _Outlook:
    """Hears from ranks what they are at, looks at their processes, and judges."""

    def __init__(self, world: int, limits: Limits, say: Callable[[str], None]) -> None:
        self.judge, self.say = Judge(world, limits), say
        self._pipes: dict[int, int] = {}
        self._texts: dict[int, bytes] = {}
        self._next = 0.0

    def pipe(self, rank: int) -> int:
        """The end that a rank writes to."""
        self._pipes[rank], theirs = os.pipe()
        os.set_blocking(self._pipes[rank], False)
        os.set_blocking(theirs, False)
        self._texts[rank] = b""
        return theirs

    def look(self, children: Sequence[subprocess.Popen[bytes]]) -> EndReason | None:
        """About once a second, however often it is asked."""
        if time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + LOOK_SECONDS
        pids = {rank: child.pid for rank, child in enumerate(children) if child.poll() is None}
        for rank in range(len(children)):
            if rank not in pids:
                self.judge.forget(rank)
        self.judge.see(pids)
        for rank in pids:
            self.judge.hear(rank, self._heard(rank))
        line = self.judge.line()
        if line:
            self.say(line)
        return self.judge.verdict()

    def _heard(self, rank: int) -> RankReport | None:
        """The last whole line that a rank wrote."""
        text = self._texts[rank]
        with contextlib.suppress(OSError):
            while part := os.read(self._pipes[rank], _MOST_BYTES):
                text += part
        *lines, self._texts[rank] = text.split(b"\n")
        with contextlib.suppress(ValueError):
            return RankReport.from_json(json_of(lines[-1])) if lines else None
        return None

    def close(self) -> None:
        for pipe in self._pipes.values():
            os.close(pipe)


def _wait(children: list[subprocess.Popen[bytes]], outlook: _Outlook) -> RunEnded:
    """Until all have ended; after a failure, not for ever."""
    deadline = float("inf")
    first = -1
    while None in (codes := [child.poll() for child in children]):
        if first < 0 and any(codes):
            first = next(rank for rank, code in enumerate(codes) if code)
            deadline = time.monotonic() + GRACE_SECONDS
        if time.monotonic() > deadline:
            _end(children)
        verdict = outlook.look(children) if first < 0 else None
        if verdict is not None:
            _end(children)
            return RunEnded(1, f"{verdict.problem}; all ranks stopped", verdict.remedy)
        time.sleep(0.05)
    failed = [rank for rank, code in enumerate(codes) if code]
    if not failed:
        return RunEnded(0)
    rank = first if first >= 0 else min(failed, key=lambda rank: codes[rank] or 0)  # a signal before a status
    code = codes[rank] or 0
    if -code in STOPS:  # it was asked to stop before it listened: nothing was begun
        return RunEnded(exit_status(_signal_name(-code)))
    if code < 0:
        return RunEnded(1, f"rank {rank} was ended by signal {-code} ({_signal_name(-code)}); all ranks stopped")
    return RunEnded(code) if code in _SPOKEN else RunEnded(1, f"rank {rank} ended with exit status {code}; all ranks stopped")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
