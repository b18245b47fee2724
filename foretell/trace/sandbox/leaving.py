"""Code that ends its own process, told as an exception at the line that does it.

    os._exit, os.abort, os.kill(os.getpid(), ...)    `Left`: the trace fails with the user's line
    the same in a process that the code has forked   what they always do
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from foretell.trace.sandbox.replaced import replaced

_HARMLESS = {0, signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH}


class Left(Exception):
    """The user's code wanted to end the process."""


@contextmanager
def staying() -> Iterator[None]:
    """Until the end of the block, code in this process cannot end it without a word."""
    process = os.getpid()

    def unless_here(plain: Callable[..., Any], name: str) -> Callable[..., Any]:
        def leave(*args: Any) -> Any:
            if os.getpid() == process:
                _left(name)
            return plain(*args)

        return leave

    def kill(plain: Callable[..., Any], name: str) -> Callable[..., Any]:
        def send(pid: int, number: int) -> Any:
            mine = process if name == "kill" else os.getpgid(0)
            if os.getpid() == process and number not in _HARMLESS and pid in (mine, 0) and not _handled(number):
                _left(name)
            return plain(pid, number)

        return send

    changes = [(os, name, unless_here(getattr(os, name), name)) for name in ("_exit", "abort")]
    with replaced([*changes, *((os, name, kill(getattr(os, name), name)) for name in ("kill", "killpg"))]):
        yield


def _handled(number: int) -> bool:
    return callable(signal.getsignal(number)) or signal.getsignal(number) is signal.SIG_IGN


def _left(name: str) -> NoReturn:
    raise Left(f"os.{name} ends the process")
