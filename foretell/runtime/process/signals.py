"""Signals that ask a run to stop: answered between two steps, at once while no step is done. No torch."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import termios
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""All of them mean the same: save and leave."""
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
"""A second one of these ends at once. The others come twice from terminals and schedulers that mean one."""
_ALWAYS = (signal.SIGINT, signal.SIGTERM)
"""Listened to also where whoever started the process ignored them, as a shell does for what runs in the background."""
INTERRUPTED, TERMINATED = 130, 143
SECOND_AFTER_SECONDS = 0.5
"""A launcher may pass on the same signal that the terminal sent; only a later one is a second one."""
EARLY, STEPS, LATE = "early", "steps", "late"
"""Nothing is done yet that could be saved; steps are done; all is done but for the summary."""


def exit_status(name: str) -> int:
    """Of a run that a signal stopped: Ctrl-C is told apart, the others are alike."""
    return INTERRUPTED if name == "SIGINT" else TERMINATED


def caught() -> list[int]:
    """The signals to listen to: one that was ignored from the start, as SIGHUP under nohup, stays ignored."""
    return [number for number in STOPS if number in _ALWAYS or signal.getsignal(number) != signal.SIG_IGN]


class Stopped(BaseException):
    """A signal before the first step was done: there is nothing to save. No Exception, so that nobody takes it for one."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.signal = name


class Signals:
    """Remembers a signal for the training loop, which stops after the step; in the `early` phase it raises `Stopped`. A
    second one ends the process at once."""

    def __init__(self, tell: Callable[[str], None] = lambda _: None, *, phase: str = STEPS) -> None:
        self.asked, self.tell, self.phase = "", tell, phase
        self._ending = 0.0
        self._process = os.getpid()

    def __enter__(self) -> Signals:
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in caught():
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def check(self) -> None:
        """Raise what user code may have swallowed."""
        if self.asked and self.phase == EARLY:
            raise Stopped(self.asked)

    def _note(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # a worker that was forked from the run: the run itself decides
        now = time.monotonic()
        if number == signal.SIGHUP:
            leave_dead_terminal()
        if number in ENDS and (self.phase != LATE or number == signal.SIGINT):  # torchrun ends who is not quick at the end
            if self._ending and now - self._ending > SECOND_AFTER_SECONDS:
                os._exit(128 + number)
            self._ending = self._ending or now
        if self.asked:
            return
        self.asked = signal.Signals(number).name
        with contextlib.suppress(RuntimeError, OSError, ValueError):  # it may have come in the middle of a line
            if self.phase == EARLY:
                self.tell(f"{self.asked}: stopping; no step is done yet, so there is nothing to save")
            elif self.phase == STEPS:
                self.tell(f"{self.asked}: stopping after this step, then saving; repeat it to quit immediately")
        self.check()


def leave_dead_terminal() -> None:
    """Write to nowhere what would go to a terminal that is closed: every write to it fails, wherever it comes from."""
    for handle in (1, 2):
        try:
            termios.tcgetattr(handle)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                to_nowhere(handle)
        except (OSError, ValueError):
            continue


def to_nowhere(handle: int) -> None:
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, handle)
        os.close(nowhere)
