"""From a watched script to the process that started it: JSON objects, one a line, which never make the script wait.

Loaded by its path into the script's Python, as `hooks` is: the standard library and torch.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any

from .process_state import about_this

ANSWER_SECONDS = 300.0
"""That the explanation of an error may take."""
LAST_SECONDS = 20.0
"""That a script waits at its end for what it tells to be read."""


class Channel:
    """To the process that started the script. It never makes the script wait. A process that was forked has one of its own,
    once it has an optimizer: workers that load data have none."""

    def __init__(self, at: str) -> None:
        self.at = at
        self._left = bytearray()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._ended: Callable[[], None] | None = None
        self._connect()

    def _connect(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(self.at)
        self._socket.setblocking(False)

    def leave(self, ended: Callable[[], None]) -> None:
        """In a process that was forked: its parent's connection is none of its own. `ended` is for when it ends."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self._ended = None, ended
        self._left, self._lock = bytearray(), threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        with self._lock:
            if self._ended is not None and (message["kind"] == "model" or message.get("step")):
                ended, self._ended = self._ended, None
                with contextlib.suppress(OSError):
                    self._connect()
                    self._left += json.dumps(about_this()).encode() + b"\n"
                    Finalize(None, ended, exitpriority=100)  # such a process ends without `atexit`
            if self._socket is None:
                return
            if len(self._left) < 1 << 20:
                self._left += json.dumps(message).encode() + b"\n"
            self._push()

    def _push(self) -> None:
        try:
            while self._left and self._socket is not None:
                del self._left[: self._socket.send(self._left)]
        except BlockingIOError:
            pass
        except OSError:
            self._socket = None

    def ask(self, message: dict[str, Any]) -> None:
        """Send, and wait until it was answered: the other side prints first."""
        self.send(message)
        self._whole(ANSWER_SECONDS)
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.recv(4096)

    def close(self) -> None:
        self._whole(LAST_SECONDS)
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _whole(self, seconds: float) -> None:
        """What is left goes out; whoever does not read for so long gets nothing more."""
        with self._lock:
            if self._socket is not None:
                self._socket.settimeout(seconds)
                self._push()
