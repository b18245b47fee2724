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
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType, TracebackType
from typing import Any, Protocol

from foretell.cores import physical_cores
from foretell.decode import json_of
from foretell.errors import UserError
from foretell.plan.types import Plan
from foretell.runtime.process.blame import TIMEOUT_SECONDS, EndReason, Judge, Limits
from foretell.runtime.process.guardian import Guardian
from foretell.runtime.process.progress import RankReport
from foretell.runtime.process.signals import ENDS, SECOND_AFTER_SECONDS, STOPS, caught, exit_status, leave_dead_terminal

LAUNCHED = "FORETELL_LAUNCHED"
"""Set for ranks that were started here: the process that did."""
HEARS = "FORETELL_WATCH_FD"
"""Set for them too: where to write what they are at."""
TOKEN = "FORETELL_JOB_TOKEN"
"""Set for them too: what they sign messages with; another for each job."""
REPLANS = "FORETELL_REPLANS"
"""Set for them where whoever started them plans a model that has grown again."""
RESTARTS = "FORETELL_RESTARTS"
"""Tells a command how often `foretell run supervise` has started it before."""
GRACE_SECONDS = 15.0
"""How long the others may take once one has failed."""
LOOK_SECONDS = 1.0
POLL_SECONDS = 0.02
_MOST_BYTES = 2**16
_MOST_TEXT = 2**20
"""Of what a rank has said is read at a time."""
_PR_SET_PDEATHSIG = 1
_SPOKEN = (1, 2, 70, 130, 143)
"""Exit statuses of a rank that has said why."""
KILLED, HUNG, CRASHED, LOST, MEMORY = "killed", "hung", "crashed", "lost", "memory"
"""Faults of a run: a rank was ended by a signal; one holds the others up; one ended with a status and no word; ranks lost each
other in a collective; one had too little device memory, and the run's plan takes less now."""
TRANSIENT, CAUSE, TRAINS, SLOWER, GROWN = "transient", "cause", "trains", "slower", "grown"
"""Words of a rank to its launcher: it fails of something that may not come again; of what; its first step is done; seconds of a step
where they are for long more than the plan predicted; the settings of a model that has changed, saved and left with."""


@dataclass(frozen=True)
class RunEnded:
    """How a launched run ended, and what to say if nobody has said it."""

    status: int
    problem: str = ""
    remedy: str = ""
    fault: str = field(default="", repr=False)
    """Of which kind, where it was one that may not come again."""
    ranks: tuple[int, ...] = field(default=(), repr=False)
    """Whose fault it was, as far as known."""
    noticed: float = field(default=0.0, repr=False, compare=False)
    """When, by the monotonic clock."""
    step: int = field(default=0, repr=False, compare=False)
    """Updates that were done by then, as far as ranks said."""
    cause: str = field(default="", repr=False, compare=False)
    """Of the fault, in the words of the rank that knows it."""


class RankProcess(Protocol):
    """What is used of a Popen."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float) -> int: ...

    def send_signal(self, number: int, /) -> None: ...


StartRank = Callable[[Sequence[str], Mapping[str, str], int], RankProcess]
"""Words of `python`, its environment, and a pipe that it is given → the process. The pipe stays the caller's."""


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
    from foretell.plan.legal import launch as command_for

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
    with Launcher(world, say=say, limits=limits, program=program) as launcher:
        return launcher.attempt(words)


class Launcher:
    """Starts the ranks of a run, as often as it is asked to: signals that reach it are theirs, and none of them outlives it."""

    def __init__(
        self, world: int, *, say: Callable[[str], None] = lambda _: None, limits: Limits | None = None,
        program: Sequence[str] = ("-m", "foretell"), start: StartRank | None = None, restarts: bool = False,
        told: Callable[[int, Mapping[str, Any]], None] = lambda *_: None, beat: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`start` starts a rank. With `restarts`, ranks whose peer was killed are ended at once: they cannot save without it.
        `told` hears what ranks say besides their reports; `beat` is called about once a second."""
        self.world, self.say, self.limits, self.program = world, say, limits or Limits.usual(TIMEOUT_SECONDS), program
        self.start, self.restarts, self.told, self.beat = start or started, restarts, told, beat
        self.token = secrets.token_hex(32)
        self.children: list[RankProcess] = []
        self.forward = SignalForwarder(self.children)

    def __enter__(self) -> Launcher:
        self._before: dict[int, Any] = {}
        self.guardian = Guardian()
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self.forward) for number in caught()}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        _end(self.children)
        self.guardian.close()

    def leave(self) -> None:
        """Ask the ranks to save and leave; nobody has asked the run to stop."""
        for child in self.children:
            _send(child, signal.SIGUSR1)

    def attempt(self, words: Sequence[str]) -> RunEnded:
        """Start them all, and wait until none is left."""
        outlook = _Outlook(self.world, self.limits, self.say, self.told, self.beat)
        port = _free_port()
        self.children.clear()
        try:
            for rank in range(self.world):
                pipe = outlook.pipe(rank)
                try:
                    environment = rank_environment(rank, self.world, port, pipe) | {TOKEN: self.token}
                    self.children.append(self.start([*self.program, *words], environment, pipe))
                finally:
                    os.close(pipe)
                self.guardian.add(self.children[-1].pid)
                self.forward.catch_up(self.children[-1])
            return _wait(self.children, outlook, 0.0 if self.restarts else GRACE_SECONDS)
        finally:
            _end(self.children)
            outlook.close()


def _end(children: Sequence[RankProcess]) -> None:
    """At once, with whatever they have started; stopped processes too."""
    _kill(children)
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_SECONDS)


def _kill(children: Sequence[RankProcess]) -> None:
    for child in reversed(children):  # the first serves the others, and they would complain
        if child.poll() is None:
            _kill_group(child)


def _kill_group(child: RankProcess) -> None:
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)


def rank_environment(rank: int, world: int, port: int, pipe: int) -> dict[str, str]:
    """What torchrun would give a rank, and how it speaks to its launcher."""
    env = {
        **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), LAUNCHED: str(os.getpid()), HEARS: str(pipe),
    }  # fmt: skip
    env.setdefault("OMP_NUM_THREADS", str(max(1, physical_cores() // world)))
    if sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return env


def started(words: Sequence[str], env: Mapping[str, str], pipe: int) -> RankProcess:
    """A rank in a session of its own."""
    return subprocess.Popen(
        [sys.executable, *words], env=dict(env), stdin=subprocess.DEVNULL, start_new_session=True,
        pass_fds=(pipe,), preexec_fn=end_with_parent(os.getpid()),
    )  # fmt: skip


def end_with_parent(parent: int, number: int = signal.SIGTERM) -> Callable[[], None] | None:
    """What a child does first: ask the kernel for a signal when its parent ends."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(1)

    return ask


class SignalForwarder:
    """Passes signals on to children, each once, and wakes those that are stopped, so that they can save; a second one that
    asks to end ends them."""

    def __init__(self, children: Sequence[RankProcess]) -> None:
        self.children = children
        self._passed: list[int] = []
        self._ending = 0.0

    @property
    def asked(self) -> str:
        """The signal that asked to stop; empty where none did."""
        return _signal_name(self._passed[0]) if self._passed else ""

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

    def catch_up(self, child: RankProcess) -> None:
        """Tell a child that was not there yet what the others were told."""
        for number in self._passed:
            _send(child, number)


def _send(child: RankProcess, number: int) -> None:
    if child.poll() is None:
        child.send_signal(number)
        child.send_signal(signal.SIGCONT)


class _Outlook:
    """Hears from ranks what they are at, looks at their processes, and judges."""

    def __init__(
        self, world: int, limits: Limits, say: Callable[[str], None], told: Callable[[int, Mapping[str, Any]], None], beat: Callable[[], None]
    ) -> None:  # fmt: skip
        self.judge, self.say, self.told, self.beat = Judge(world, limits), say, told, beat
        self.step, self.transient, self.cause = 0, False, ""
        """Updates done, as far as ranks said; whether one of them said that what it fails of may not come again."""
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

    def look(self, children: Sequence[RankProcess]) -> EndReason | None:
        """About once a second, however often it is asked."""
        if time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + LOOK_SECONDS
        self.beat()
        pids = {rank: child.pid for rank, child in enumerate(children) if child.poll() is None}
        for rank in range(len(children)):
            if rank not in pids:
                self.judge.forget(rank)
        self.judge.see(pids)
        for rank in pids:
            self.judge.hear(rank, self.listen(rank))
        line = self.judge.line()
        if line:
            self.say(line)
        return self.judge.verdict()

    def listen(self, rank: int) -> RankReport | None:
        """The last report that a rank wrote; what else it said is handed on."""
        text, report = self._texts[rank], None
        with contextlib.suppress(OSError):
            while len(text) < _MOST_TEXT and (part := os.read(self._pipes[rank], _MOST_BYTES)):
                text += part
        *lines, rest = text.split(b"\n")
        self._texts[rank] = rest if len(rest) < _MOST_BYTES else b""
        for line in lines:
            with contextlib.suppress(ValueError):
                said = json_of(line)
                if (found := RankReport.from_json(said)) is not None:
                    report, self.step = found, max(self.step, found.step)
                elif isinstance(said, dict):
                    self.transient = self.transient or said.get(TRANSIENT) is True
                    self.cause = self.cause or str(said.get(CAUSE) or "")
                    self.told(rank, said)
        return report

    def close(self) -> None:
        for pipe in self._pipes.values():
            os.close(pipe)


def _wait(children: Sequence[RankProcess], outlook: _Outlook, killed_grace_s: float) -> RunEnded:
    """Until all have ended; after a failure, not for ever. Where one was killed, the others have `killed_grace_s` left."""
    deadline, first, noticed = float("inf"), -1, 0.0
    while None in (codes := [child.poll() for child in children]):
        if first < 0 and any(codes):
            first, noticed = next(rank for rank, code in enumerate(codes) if code), time.monotonic()
            killed = (codes[first] or 0) < 0 and -(codes[first] or 0) not in STOPS
            deadline = noticed + (killed_grace_s if killed else GRACE_SECONDS)
            if killed:
                _kill_group(children[first])  # what it had started: loader processes, say
        if time.monotonic() > deadline:
            _end(children)
        verdict = outlook.look(children) if first < 0 else None
        if verdict is not None:
            noticed = time.monotonic()
            _end(children)
            return RunEnded(1, f"{verdict.problem}; all ranks stopped", verdict.remedy, HUNG, verdict.culprits, noticed, outlook.step)
        time.sleep(POLL_SECONDS)
    for rank in range(len(children)):
        outlook.listen(rank)
    failed = [rank for rank, code in enumerate(codes) if code]
    if not failed:
        return RunEnded(0)
    rank = first if first >= 0 else min(failed, key=lambda rank: codes[rank] or 0)  # a signal before a status
    ended = replace(_ended(rank, codes[rank] or 0), noticed=noticed or time.monotonic(), step=outlook.step)
    if ended.status == 1 and not ended.fault and outlook.transient:
        return replace(ended, fault=MEMORY if outlook.cause else LOST, cause=outlook.cause)
    return ended


def _ended(rank: int, code: int) -> RunEnded:
    """What the end of the first rank that failed means."""
    if -code in STOPS:  # it was asked to stop before it listened: nothing was begun
        return RunEnded(exit_status(_signal_name(-code)))
    if code < 0:
        problem = f"rank {rank} was ended by signal {-code} ({_signal_name(-code)}); all ranks stopped"
        return RunEnded(1, problem, fault=KILLED, ranks=(rank,))
    if code in _SPOKEN:
        return RunEnded(code)
    return RunEnded(1, f"rank {rank} ended with exit status {code}; all ranks stopped", fault=CRASHED, ranks=(rank,))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
