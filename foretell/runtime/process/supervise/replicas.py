"""A run whose replicas come and go, watched from outside: one process joins them, and a replica that is lost is started again.

    hub         started first; says where it listens, how each round ended, and who was left out
    replicas    one for each slot; one that ends, or that was left out and stands still, is lost: the others go on

The run ends when the hub does. If that is lost, one replica saves what the round began from. No torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretell.decode import json_of
from foretell.runtime.process import proc
from foretell.runtime.process.blame import TIMEOUT_SECONDS, Limits
from foretell.runtime.process.launch import (
    CRASHED,
    GRACE_SECONDS,
    KILLED,
    TOKEN,
    TRAINS,
    Launcher,
    RankProcess,
    RunEnded,
    rank_environment,
)
from foretell.runtime.process.replica import HUB, ROLE, ReplicaRole
from foretell.runtime.process.supervise import reaper
from foretell.runtime.process.supervise.budget import RestartBudget
from foretell.runtime.process.supervise.keep import Supervision
from foretell.runtime.process.supervise.notices import Notices
from foretell.runtime.process.supervise.standby import Standby
from foretell.runtime.train.folder import note_fault

POLL_SECONDS = 0.02
LOOK_SECONDS = 1.0
SAVE_SECONDS = 300.0
"""For the last save: of the hub that is asked to leave, and of a replica once the hub is lost."""
_MOST_STANDBYS = 10
_MOST_BYTES = 2**16
_HOST = "127.0.0.1"


@dataclass(eq=False)
class Member:
    """A process of the run, or the place of one."""

    slot: int
    budget: RestartBudget
    process: RankProcess | None = None
    pipe: int = -1
    text: bytes = b""
    trains: bool = False
    done: bool = False
    """It has ended as it was to."""
    why: str = ""
    """What it said that it fails of."""
    rounds: int = 0
    """That its steps were in."""
    lost_at: float | None = None
    start_at: float | None = None
    """When it is to be started; None where it runs, or is given up."""
    idle: proc.Idle | None = None
    stopped_at: float | None = None

    @property
    def lives(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def name(self) -> str:
        return "the process that joins replicas" if self.slot == HUB else f"replica {self.slot}"


@dataclass
class _Told:
    """What the hub said last."""

    port: int = 0
    round: int = -1
    absent: set[int] = field(default_factory=set)


class ReplicaKeeper:
    """One run: `run` starts it and keeps it going."""

    def __init__(
        self, words: Sequence[str], count: int, quorum: int, out: Path, *, how: Supervision, say: Callable[[str], None],
        program: Sequence[str] = ("-m", "foretell"),
    ) -> None:  # fmt: skip
        self.words, self.count, self.quorum, self.out, self.how, self.say, self.program = words, count, quorum, out, how, say, program
        self.hub = Member(HUB, RestartBudget(0))
        self.replicas = [Member(slot, RestartBudget(how.restarts)) for slot in range(count)]
        self.told = _Told()
        self.problem = ""
        """Why the hub was asked to leave, where that was not the user's wish."""
        self.hang_s = Limits.usual(TIMEOUT_SECONDS, restarts=how.restarts > 0).hang_s
        self._standby: Standby | None = None
        self._standbys = 0
        self._next_look = self._leaves_at = 0.0

    def run(self) -> RunEnded:
        """Until the hub has ended."""
        with contextlib.ExitStack() as stack:
            adopts = stack.enter_context(reaper.adopting())
            self.launcher = stack.enter_context(Launcher(self.count, say=self.say, program=self.program, restarts=True))
            stack.callback(self._close)
            stack.enter_context(Notices(self.how.notices, self.say, lambda: self.launcher.forward(signal.SIGUSR1, None)))
            self._standbys = _MOST_STANDBYS if self.how.standby and self.how.restarts > 0 and adopts else 0
            self._warm(stack)
            self._start(self.hub)
            for member in self.replicas:
                member.start_at = 0.0
            while self.hub.lives:
                self._hear()
                self._keep_replicas()
                if time.monotonic() >= self._next_look:
                    self._next_look = time.monotonic() + LOOK_SECONDS
                    self._warm(stack)
                    self._look()
                time.sleep(POLL_SECONDS)
            self._hear()
            return self._ended()

    # ------------------------------------------------------------ processes

    def _warm(self, stack: contextlib.ExitStack) -> None:
        if self._standbys and (self._standby is None or not self._standby.lives):
            self._standbys -= 1
            self._standby = stack.enter_context(contextlib.closing(Standby(self.count)))
            self.launcher.start = self._standby.start

    def _start(self, member: Member) -> None:
        self._forget(member)
        member.pipe, theirs = os.pipe()
        os.set_blocking(member.pipe, False)
        os.set_blocking(theirs, False)
        address = None if member.slot == HUB else (_HOST, self.told.port)
        role = ReplicaRole(slot=member.slot, count=self.count, address=address)
        environment = rank_environment(member.slot + 1, self.count, 0, theirs) | {
            TOKEN: self.launcher.token, ROLE: role.text(), "LOCAL_RANK": str(max(0, member.slot))
        }  # fmt: skip
        try:
            member.process = self.launcher.start([*self.program, *self.words], environment, theirs)
        finally:
            os.close(theirs)
        member.start_at, member.idle, member.stopped_at = None, proc.Idle(member.process.pid), None
        member.trains, member.why = False, ""
        self.launcher.children[:] = [one.process for one in (self.hub, *self.replicas) if one.process is not None]
        self.launcher.guardian.add(member.process.pid)
        self.launcher.forward.catch_up(member.process)

    def _forget(self, member: Member) -> None:
        if member.pipe >= 0:
            os.close(member.pipe)
        member.pipe, member.text = -1, b""

    def _close(self) -> None:
        for member in (self.hub, *self.replicas):
            if member.process is not None:
                _kill(member.process)
                reaper.end_sessions([member.process.pid])
            self._forget(member)

    def _keep_replicas(self) -> None:
        """Take note of those that ended, and start those whose time it is."""
        leaves = bool(self.launcher.forward.asked or self.problem)
        for member in self.replicas:
            if member.process is not None and not member.lives:
                code = member.process.poll() or 0
                self._listen(member)
                _kill(member.process)  # what it had started: loader processes, say
                reaper.end_sessions([member.process.pid])
                pid, member.process = member.process.pid, None
                if code == 0:
                    member.done = True
                elif not leaves:
                    self._lost(member, code, pid)
            elif member.start_at is not None and self.told.port and time.monotonic() >= member.start_at and not leaves:
                self._start(member)
        if self.problem and time.monotonic() > self._leaves_at and self.hub.process is not None:
            _kill(self.hub.process)

    def _lost(self, member: Member, code: int, pid: int) -> None:
        """The others go on; another one is started in its place."""
        member.lost_at = member.lost_at or time.monotonic()
        how = f"was ended by signal {-code} ({_signal_name(-code)})" if code < 0 else f"ended with exit status {code}"
        if member.stopped_at is not None:
            how = f"stood still for {self.hang_s:.0f} s and was ended"
        words = f"{member.name} {how}" + (f": {member.why}" if member.why else "")
        pause = member.budget.spend(member.rounds)
        member.start_at = time.monotonic() + pause if pause is not None else None
        alive = sum(one.lives for one in self.replicas)
        note_fault(self.out, "replica lost", replica=member.slot, pid=pid, words=words, round=self.told.round + 1, alive=alive,
                   starts_in_seconds=pause)  # fmt: skip
        when = "it is not started again" if pause is None else f"it is started again{f' in {pause:.0f} s' if pause else ''}"
        self.say(f"{words}; the others go on ({alive} of {self.count}), and {when}")
        left = sum(one.lives or one.start_at is not None or one.done for one in self.replicas)
        if left < self.quorum and not self.problem:
            lost_again = "; the others were lost again after every restart"
            given_up = lost_again if self.how.restarts else "; without --max-restarts none is started again"
            self.problem = f"{left} of {self.count} replicas are left, and a round needs {self.quorum}{given_up}"
            self._leaves_at = time.monotonic() + SAVE_SECONDS
            self._send(self.hub, signal.SIGUSR1)

    def _look(self) -> None:
        """End who stands still: the hub, and replicas that were left out of a round and are not heard of, or are stopped."""
        now = time.monotonic()
        for member in (self.hub, *self.replicas):
            if not member.lives or member.process is None or member.idle is None:
                continue
            if proc.state(member.process.pid) == proc.STOPPED:
                member.stopped_at = member.stopped_at or now
            else:
                member.stopped_at = None
                if member.slot in self.told.absent:
                    member.idle.look(now)
                    since = member.idle.seconds()
                    member.stopped_at = now - since if since >= self.hang_s else None
                else:
                    member.idle.forget()
            again = member.slot == HUB or self.how.restarts > 0
            if again and member.stopped_at is not None and now - member.stopped_at >= self.hang_s:
                member.lost_at = now
                _kill(member.process)

    def _send(self, member: Member, number: int) -> None:
        if member.process is not None and member.lives:
            member.process.send_signal(number)
            member.process.send_signal(signal.SIGCONT)

    # ------------------------------------------------------------ what is said

    def _hear(self) -> None:
        for said in self._listen(self.hub):
            self.told.port = said["hub_port"] if type(said.get("hub_port")) is int else self.told.port
            if isinstance(absent := said.get("absent"), list):
                self.told.absent = {one for one in absent if type(one) is int}
            if type(said.get("round")) is int and isinstance(said.get("replicas"), list):
                self._round_ended(said["round"], said["replicas"], said.get("step"))
        for member in self.replicas:
            self._listen(member)

    def _round_ended(self, number: int, replicas: Sequence[int], step: Any) -> None:
        self.told.round = number
        for member in self.replicas:
            if member.slot not in replicas:
                continue
            member.rounds += 1
            if member.lost_at is not None and member.lives:
                seconds, member.lost_at = time.monotonic() - member.lost_at, None
                self.say(f"{member.name} is in round {number} again, {seconds:.1f} s after it was lost, to step {step}")
                note_fault(self.out, "replica back", replica=member.slot, round=number, step=step, seconds=round(seconds, 3))

    def _listen(self, member: Member) -> list[Mapping[str, Any]]:
        """What a process said since it was last asked."""
        if member.pipe < 0:
            return []
        found: list[Mapping[str, Any]] = []
        text = member.text
        with contextlib.suppress(OSError):
            while part := os.read(member.pipe, _MOST_BYTES):
                text += part
        *lines, rest = text.split(b"\n")
        member.text = rest if len(rest) < _MOST_BYTES else b""
        for line in lines:
            with contextlib.suppress(ValueError):
                said = json_of(line)
                if isinstance(said, dict):
                    found.append(said)
                    member.trains = member.trains or TRAINS in said
                    member.why = str(said.get("why") or member.why)
        return found

    # ------------------------------------------------------------ the end

    def _ended(self) -> RunEnded:
        """What the hub's end means; replicas have a moment to end by themselves."""
        assert self.hub.process is not None
        code = self.hub.process.poll() or 0
        if code < 0 or code == 70:
            return self._without_hub(code)
        deadline = time.monotonic() + GRACE_SECONDS
        while code == 0 and any(one.lives for one in self.replicas) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        if self.problem and code:
            return RunEnded(1, self.problem, "look for what ends them in faults.jsonl; --max-restarts N allows more", CRASHED)
        return RunEnded(code)

    def _without_hub(self, code: int) -> RunEnded:
        """One replica that has trained saves what its round began from."""
        how = f"was ended by signal {-code} ({_signal_name(-code)})" if code < 0 else f"ended with exit status {code}"
        saver = next((one for one in self.replicas if one.trains and one.lives), None)
        for member in self.replicas:
            if member is not saver and member.process is not None:
                _kill(member.process)
        deadline = time.monotonic() + SAVE_SECONDS
        if saver is not None:
            self._send(saver, signal.SIGUSR2)
            while saver.lives and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        status = saver.process.poll() if saver is not None and saver.process is not None else None
        what = f"{saver.name} saved what its round began from" if saver is not None and status == 143 else "nothing was saved after that"
        by = saver.slot if saver is not None and status == 143 else None
        note_fault(self.out, "hub lost", words=f"{self.hub.name} {how}", round=self.told.round + 1, saved_by=by)
        return RunEnded(1, f"{self.hub.name} {how}, and replicas cannot be joined without it: {what}", "", KILLED)


def _kill(process: RankProcess) -> None:
    """With what it has started."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
