"""Messages between the parent and a kernel's process: what is no message is refused, never unpickled or waited for."""

from __future__ import annotations

import os
import socket
import time

import pytest
import torch

from foretell.tune.verify import wire
from foretell.tune.verify.compare import torch_of
from foretell.tune.verify.inside.calls import raw_of, tensor_of
from foretell.tune.verify.wire import RawTensor


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int64", "uint8", "bool"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (5, 7)])
def test_a_tensor_comes_back(dtype: str, shape: tuple[int, ...]) -> None:
    value = (torch.randn(shape) * 3).to(getattr(torch, dtype))
    raw = raw_of(value)
    assert torch.equal(torch_of(raw), value) and torch_of(raw).dtype == value.dtype
    there = tensor_of(RawTensor.of(raw.header(), raw.data), "cpu")
    assert torch.equal(there, value) and there.shape == value.shape


def test_new_values_can_come_into_the_same_memory() -> None:
    first, second = raw_of(torch.zeros(4)), raw_of(torch.arange(4.0))
    tensor = tensor_of(first, "cpu")
    pointer, version = tensor.data_ptr(), tensor._version
    assert torch.equal(tensor_of(second, "cpu", tensor), torch.arange(4.0))
    assert (tensor.data_ptr(), tensor._version) == (pointer, version)


@pytest.mark.parametrize("header", [
    {"dtype": "float32", "shape": [4], "stride": [1], "offset": 1}, {"dtype": "float32", "shape": [-1], "stride": [1], "offset": 0},
    {"dtype": "object", "shape": [1], "stride": [1], "offset": 0}, {"dtype": "float32", "shape": [2], "stride": [], "offset": 0},
    {"dtype": "float32", "shape": [1.5], "stride": [1], "offset": 0},
])  # fmt: skip
def test_a_header_that_reaches_beyond_its_bytes_is_refused(header: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        RawTensor.of(header, bytes(16))


@pytest.mark.parametrize("content", [b"\xff" * 8, (5).to_bytes(8, "big") + b"hello", (2).to_bytes(8, "big") + b"{}",
                                     (13).to_bytes(8, "big") + b'{"blobs":[-1]}'])  # fmt: skip
def test_what_is_no_message_is_refused(content: bytes) -> None:
    here, there = socket.socketpair()
    with here, there:
        os.write(there.fileno(), content)
        with pytest.raises(wire.Malformed):
            wire.read(here.fileno(), time.monotonic() + 5)


def test_a_message_that_does_not_end_is_not_waited_for() -> None:
    here, there = socket.socketpair()
    with here, there:
        os.write(there.fileno(), (100).to_bytes(8, "big") + b"{")
        with pytest.raises(TimeoutError):
            wire.read(here.fileno(), time.monotonic() + 0.05)
        there.close()
        with pytest.raises(wire.PeerGone):
            wire.read(here.fileno(), time.monotonic() + 5)
