"""Messages between a replica and the hub: a signed header and bytes that it vouches for, over one connection.

    4 bytes    length of the header
    header     JSON: kind, what else is said, how many bytes follow and their digest; signed where the job has a token (`secure`)
    bytes      as many as the header says

Sizes are checked before memory is taken. What is signed names the connection, the direction and the number of the message, so that none
can be played again elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
from dataclasses import dataclass
from typing import Any

from foretell.runtime.process import secure

MOST_HEADER = 16384
_NONCE = 16
_AT_ONCE = 2**20
"""Bytes that memory is taken for at a time: as they come, not as somebody says that they will."""


class Gone(ConnectionError):
    """The other side left, in the middle of a message or between two."""


@dataclass(frozen=True)
class HubMessage:
    kind: str
    said: dict[str, Any]
    content: bytearray


class HubChannel:
    """One connection; `side` tells who sends."""

    def __init__(self, link: socket.socket, side: str, *, opens: bool) -> None:
        self.link, self.side = link, side
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sent = self._got = 0
        if opens:  # the hub draws what names the connection
            self._nonce = secrets.token_bytes(_NONCE)
            self._write(self._nonce)
        else:
            self._nonce = bytes(self._read(_NONCE))

    def send(self, kind: str, content: bytes | bytearray | memoryview = b"", **said: Any) -> None:
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        header = json.dumps({"kind": kind, "bytes": len(content), "digest": digest, **said}).encode()
        sealed = secure.seal(header, self._about(self.side, self._sent))
        self._sent += 1
        self._write(len(sealed).to_bytes(4, "big") + sealed)
        self._write(content)

    def receive(self, most: int) -> HubMessage:
        """The next message, with at most so many bytes."""
        size = int.from_bytes(self._read(4), "big")
        if not 0 < size <= MOST_HEADER:
            raise secure.Forged(f"the header of a message has {size:,} bytes")
        other = "peer" if self.side == "hub" else "hub"
        try:
            header = json.loads(secure.unseal(bytes(self._read(size)), self._about(other, self._got)))
            kind, length, digest = str(header.pop("kind")), int(header.pop("bytes")), str(header.pop("digest"))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise secure.Forged(f"the header of a message says nothing that is known here: {type(error).__name__}") from error
        self._got += 1
        if not 0 <= length <= most:
            raise secure.Forged(f"a message has {length:,} bytes, and at most {most:,} belong there")
        content = self._read(length)
        if hashlib.blake2b(content, digest_size=16).hexdigest() != digest:
            raise secure.Forged("a message is not as it was sent")
        return HubMessage(kind, header, content)

    def close(self) -> None:
        self.link.close()

    def _about(self, side: str, number: int) -> str:
        return f"replicas {self._nonce.hex()} {side} {number}"

    def _write(self, content: bytes | bytearray | memoryview) -> None:
        try:
            self.link.sendall(content)
        except OSError as error:
            raise Gone(str(error)) from error

    def _read(self, size: int) -> bytearray:
        found = bytearray()
        while len(found) < size:
            some = memoryview(bytearray(min(_AT_ONCE, size - len(found))))
            try:
                got = self.link.recv_into(some)
            except OSError as error:
                raise Gone(str(error)) from error
            if not got:
                raise Gone("the connection was closed")
            found += some[:got]
        return found


def hung_up(link: socket.socket) -> bool:
    """Whether the other side left; nothing is read."""
    try:
        return link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
