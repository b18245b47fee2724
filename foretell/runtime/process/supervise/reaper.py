"""Descendants that lost their parent become children of this process, so that it can end them and collect what is left of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator

from foretell.runtime.process import proc

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_LOOK_SECONDS = 0.02


@contextlib.contextmanager
def adopting() -> Iterator[bool]:
    """Within the block; False where the system has no such thing."""
    if sys.platform != "linux":
        yield False
        return
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int(0)
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    try:
        yield prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def collect(known: Collection[int]) -> None:
    """Take away what is left of adopted processes that have ended; those `known` are waited for elsewhere."""
    for pid in proc.children(os.getpid()):
        if pid not in known and not proc.lives(pid):
            with contextlib.suppress(OSError):
                os.waitpid(pid, os.WNOHANG)


def others(known: Collection[int]) -> list[int]:
    """Children that live and are not known: adopted ones."""
    return [pid for pid in proc.children(os.getpid()) if pid not in known and proc.lives(pid)]


def end(root: int | None, known: Collection[int], *, grace_s: float = 0.0) -> None:
    """End a child that was not waited for yet, all that came of it, and what was adopted: those not `known`. SIGTERM first where
    there is a grace."""
    number = signal.SIGTERM if grace_s else signal.SIGKILL
    deadline = time.monotonic() + grace_s
    told: set[int] = set()
    while left := _left(root, known):
        if number == signal.SIGTERM and time.monotonic() >= deadline:
            number = signal.SIGKILL
        for pid in left if number == signal.SIGKILL else left - told:
            with contextlib.suppress(OSError):
                os.kill(pid, number)
                os.kill(pid, signal.SIGCONT)
        told |= left
        time.sleep(_LOOK_SECONDS)
        collect(known if root is None else {*known, root})


def _left(root: int | None, known: Collection[int]) -> set[int]:
    waiting = [*([] if root is None else [root]), *others(known)]
    found: set[int] = set()
    while waiting:
        pid = waiting.pop()
        if pid not in found and proc.lives(pid):
            found.add(pid)
            waiting += proc.children(pid)
    return found


def end_sessions(leaders: Collection[int]) -> None:
    """End and collect adopted processes of these sessions, whose leaders are dead."""
    while left := [pid for pid in proc.children(os.getpid()) if pid not in leaders and _session(pid) in leaders]:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1
