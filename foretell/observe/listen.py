"""Where the processes of a watched script tell what they do: a socket that any of them may connect to, one JSON object a line."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import shutil
import socket
import struct
import sys
import tempfile
from collections.abc import Iterator
from typing import Any


class Connection:
    """One of the processes."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.buffer = bytearray()

    def answer(self) -> None:
        """It waits no longer. It may have ended meanwhile."""
        with contextlib.suppress(OSError):
            self.connection.sendall(b"told\n")


class Listener:
    """`at` is where they connect to. On Linux it is no file, so that nothing is left behind; of other users nobody is heard."""

    def __init__(self) -> None:
        name = f"foretell-watch-{os.getpid()}-{secrets.token_hex(8)}"
        self._folder = None if sys.platform.startswith("linux") else tempfile.mkdtemp(prefix="foretell-")
        self.at = f"\0{name}" if self._folder is None else os.path.join(self._folder, "socket")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.at)
        self._socket.listen(128)
        self._socket.setblocking(False)
        self._ready = selectors.DefaultSelector()
        self._ready.register(self._socket, selectors.EVENT_READ)

    def messages(self, seconds: float) -> Iterator[tuple[Connection, dict[str, Any]]]:
        """What was told within that time: a None of a message says that its process tells nothing more."""
        for key, _ in self._ready.select(seconds):
            if key.data is None:
                self._accept()
                continue
            for message in self._read(key.data):
                yield key.data, message

    def pending(self) -> bool:
        return bool(self._ready.select(0.0))

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._socket.accept()
            if _user_of(connection) not in (None, os.getuid()):
                connection.close()
                return
            self._ready.register(connection, selectors.EVENT_READ, Connection(connection))

    def _read(self, teller: Connection) -> Iterator[dict[str, Any]]:
        try:
            piece = teller.connection.recv(1 << 16)
        except OSError:  # it was killed
            piece = b""
        if not piece:
            self._ready.unregister(teller.connection)
            teller.connection.close()
            yield {"kind": "gone"}
            return
        teller.buffer += piece
        *whole, rest = teller.buffer.split(b"\n")
        teller.buffer = bytearray(rest)
        for line in whole:
            with contextlib.suppress(ValueError):
                yield json.loads(line)

    def close(self) -> None:
        for key in list(self._ready.get_map().values()):
            with contextlib.suppress(OSError):
                key.fileobj.close()  # type: ignore[union-attr]
        self._ready.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _user_of(connection: socket.socket) -> int | None:
    """Whose process it is, as the kernel knows; None where it does not say."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(user)
