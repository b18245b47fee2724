"""What tensors travel over from stage to stage: a plain TCP socket, or gloo.

Both sides know which tensors come, so nothing that arrives says how large it is. Over TCP each frame is a number, a digest and the
bytes; the digest (HMAC-SHA256) is of the run's token, the link and the frame's number, so that none can be made up, changed or played
again. gloo signs nothing: it is for networks that are trusted (`process.secure`).
"""

from __future__ import annotations

import hmac
import math
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from foretell.runtime.parallel.pipeline.part import BoundaryTensor
from foretell.runtime.process.secure import Forged

TAG_BYTES, NUMBER_BYTES = 32, 8
WAIT_SECONDS = 120.0
Forms = Sequence[BoundaryTensor]


class Closed(Exception):
    """The other side is gone."""


class StageLink(Protocol):
    """One direction between two stages."""

    def send(self, tensors: Sequence[Tensor]) -> None: ...

    def receive(self, forms: Forms) -> tuple[Tensor, ...]: ...

    def close(self) -> None: ...


def nbytes(form: BoundaryTensor) -> int:
    return math.prod(form.shape) * form.dtype.itemsize


class TcpLink:
    """Frames over a socket that is connected."""

    def __init__(self, connected: socket.socket, token: bytes, name: str) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.token, self.name = connected, token, name
        self.sent = self.received = 0

    def send(self, tensors: Sequence[Tensor]) -> None:
        content = b"".join(_bytes_of(one) for one in tensors)
        number = self.sent.to_bytes(NUMBER_BYTES, "big")
        self.sent += 1
        try:
            self.socket.sendall(number + self._tag(number, content))
            self.socket.sendall(content)
        except OSError as error:
            raise Closed(f"{self.name}: {error.strerror or error}") from error

    def receive(self, forms: Forms) -> tuple[Tensor, ...]:
        size = sum(map(nbytes, forms))
        head = self._exactly(NUMBER_BYTES + TAG_BYTES)
        number, tag = bytes(head[:NUMBER_BYTES]), bytes(head[NUMBER_BYTES:])
        content = self._exactly(size)
        if int.from_bytes(number, "big") != self.received or not hmac.compare_digest(tag, self._tag(number, content)):
            raise Forged(f"what came over {self.name} is not of this run, or not what was due")
        self.received += 1
        return _tensors_in(content, forms)

    def close(self) -> None:
        self.socket.close()

    def _tag(self, number: bytes, content: bytes | bytearray) -> bytes:
        digest = hmac.new(self.token, number, "sha256")
        digest.update(self.name.encode() + b"\0")
        digest.update(content)
        return digest.digest()

    def _exactly(self, size: int) -> bytearray:
        content = bytearray(size)
        view, place = memoryview(content), 0
        while place < size:
            try:
                count = self.socket.recv_into(view[place:])
            except OSError as error:
                raise Closed(f"{self.name}: {error.strerror or error}") from error
            if not count:
                raise Closed(f"{self.name} was closed")
            place += count
        return content


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _tensors_in(content: bytearray, forms: Forms) -> tuple[Tensor, ...]:
    """What came, without a copy."""
    found, place = [], 0
    for form in forms:
        count = math.prod(form.shape)
        found.append(torch.frombuffer(content, dtype=form.dtype, count=count, offset=place).reshape(form.shape) if count else
                     torch.empty(form.shape, dtype=form.dtype))  # fmt: skip
        place += nbytes(form)
    return tuple(found)


class GlooLink:
    """Point to point in a group of all stages; all tensors of a message as one, since each one sent waits for gloo's threads."""

    def __init__(self, peer: int) -> None:
        self.peer = peer

    def send(self, tensors: Sequence[Tensor]) -> None:
        content = bytearray(b"".join(_bytes_of(one) for one in tensors))
        self._do(lambda: dist.send(torch.frombuffer(content, dtype=torch.uint8), self.peer))

    def receive(self, forms: Forms) -> tuple[Tensor, ...]:
        content = bytearray(sum(map(nbytes, forms)))
        self._do(lambda: dist.recv(torch.frombuffer(content, dtype=torch.uint8), self.peer))
        return _tensors_in(content, forms)

    def close(self) -> None:
        """The group ends with its process."""

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except RuntimeError as error:
            raise Closed(f"gloo, stage {self.peer}: {str(error).splitlines()[0][:100]}") from error


# ---------------------------------------------------------------------- who is at the other end


def listener(host: str = "127.0.0.1") -> socket.socket:
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.bind((host, 0))
    found.listen(4)
    return found


def connect(host: str, port: int, token: bytes, name: str) -> TcpLink:
    """To whoever listens there; it is told which link this is, with the token's digest."""
    try:
        made = socket.create_connection((host, port), timeout=WAIT_SECONDS)
    except OSError as error:
        raise Closed(f"{name}: nobody listens at {host}:{port}") from error
    made.settimeout(WAIT_SECONDS)
    made.sendall(_hello(token, name))
    return TcpLink(made, token, name)


def accept(place: socket.socket, token: bytes, name: str) -> TcpLink:
    """The first that knows the token; others are turned away."""
    place.settimeout(WAIT_SECONDS)
    while True:
        try:
            made, _ = place.accept()
        except OSError as error:
            raise Closed(f"{name}: nobody came within {WAIT_SECONDS:g} s") from error
        made.settimeout(WAIT_SECONDS)
        link = TcpLink(made, token, name)
        try:
            if hmac.compare_digest(bytes(link._exactly(TAG_BYTES)), _hello(token, name)):
                return link
        except Closed:
            pass
        made.close()


def _hello(token: bytes, name: str) -> bytes:
    return hmac.digest(token, b"hello " + name.encode(), "sha256")
