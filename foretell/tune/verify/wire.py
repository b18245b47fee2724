"""What goes between the parent and a process that runs a kernel: a JSON header and raw bytes. Nothing is unpickled.

    length of the header (8 bytes) │ header: JSON, with the length of each blob │ blobs
"""

from __future__ import annotations

import json
import math
import os
import select
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretell.decode import json_of

_LENGTH = 8
_MOST_HEADER = 1 << 26
_PIECE = 1 << 20

BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
FLOATS = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class RawTensor:
    """A tensor as bytes: a storage, and how it is looked at. Strides and offset count elements."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    data: bytes

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * BYTES[self.dtype]

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS

    def header(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "shape": list(self.shape), "stride": list(self.stride), "offset": self.offset}

    @classmethod
    def of(cls, header: Mapping[str, Any], data: bytes) -> RawTensor:
        """Raises ValueError where the header does not go with the bytes."""
        shape, stride = tuple(_counts(header["shape"])), tuple(_counts(header["stride"]))
        (offset,) = _counts([header["offset"]])
        if header["dtype"] not in BYTES or len(shape) != len(stride):
            raise ValueError(f"no tensor: {str(dict(header))[:200]}")
        last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1 if math.prod(shape) else 0
        if last * BYTES[header["dtype"]] > len(data):
            raise ValueError(f"a tensor of {last} elements in {len(data)} bytes")
        return cls(str(header["dtype"]), shape, stride, offset, data)


def _counts(values: Any) -> list[int]:
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 1 << 48 for value in values):
        raise ValueError("a size is not a whole number")
    return values


@dataclass(frozen=True)
class WireMessage:
    header: dict[str, Any]
    blobs: tuple[bytes, ...]


class Malformed(ValueError):
    """Bytes that are no message."""


class PeerGone(Exception):
    """The other side closed."""


def encode(header: Mapping[str, Any], blobs: Sequence[bytes | memoryview] = ()) -> bytes:
    text = json.dumps({**header, "blobs": [len(blob) for blob in blobs]}).encode()
    return len(text).to_bytes(_LENGTH, "big") + text


def write(handle: int, header: Mapping[str, Any], blobs: Sequence[bytes | memoryview] = (), until: float = math.inf) -> None:
    """Raises `TimeoutError` where the other side does not take it before `until`, and `PeerGone`."""
    for part in (encode(header, blobs), *blobs):
        left = memoryview(part)
        while left:
            _wait(handle, until, select.POLLOUT)
            try:
                left = left[os.write(handle, left[:_PIECE]) :]
            except (BrokenPipeError, ConnectionError):
                raise PeerGone from None


def read(handle: int, until: float = math.inf, most_bytes: int = 1 << 36) -> WireMessage:
    """The next message; raises `TimeoutError`, `PeerGone` and `Malformed`."""
    length = int.from_bytes(_exactly(handle, _LENGTH, until), "big")
    if length > _MOST_HEADER:
        raise Malformed(f"a header of {length} bytes")
    try:
        header = json_of(_exactly(handle, length, until))
        lengths = _counts(header.pop("blobs"))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise Malformed(f"a header that cannot be read: {error}") from None
    if sum(lengths) > most_bytes:
        raise Malformed(f"{sum(lengths)} bytes, and at most {most_bytes} were asked for")
    return WireMessage(header, tuple(_exactly(handle, length, until) for length in lengths))


def _exactly(handle: int, count: int, until: float) -> bytes:
    content = bytearray()
    while len(content) < count:
        _wait(handle, until, select.POLLIN)
        try:
            more = os.read(handle, min(_PIECE, count - len(content)))
        except ConnectionError:
            more = b""
        if not more:
            raise PeerGone
        content += more
    return bytes(content)


def _wait(handle: int, until: float, what: int) -> None:
    if until == math.inf:
        return
    left = until - time.monotonic()
    watch = select.poll()
    watch.register(handle, what)
    if left <= 0 or not watch.poll(left * 1000):
        raise TimeoutError
