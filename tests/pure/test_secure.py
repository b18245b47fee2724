"""Messages of the control plane: of this job, in their place, of a size that was looked at; stores that listen where they should."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
import torch.distributed as dist

from foretell.runtime.process import secure
from foretell.runtime.process.launch import TOKEN, Launcher
from foretell.runtime.process.secure import Forged, seal, served_store, unseal


def test_only_what_this_job_said_in_that_place_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "a" * 64)
    message = seal(b'{"why": "x"}', "verdict")
    assert unseal(message, "verdict") == b'{"why": "x"}'
    for bad in (message[:-1], message + b" ", b"\0" + message[1:], message[:31], b"", b'{"why": "x"}'):
        with pytest.raises(Forged):
            unseal(bad, "verdict")
    with pytest.raises(Forged):
        unseal(message, "verdict ")  # played again elsewhere
    monkeypatch.setenv(TOKEN, "b" * 64)
    with pytest.raises(Forged):
        unseal(message, "verdict")


def test_without_a_token_nothing_is_signed_and_nothing_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    assert unseal(seal(b"x", "a"), "b") == b"x"
    monkeypatch.setattr(secure, "MOST_BYTES", 3)
    with pytest.raises(Forged, match="has 4 bytes"):
        unseal(b"1234", "a")


def test_every_job_has_a_token_of_its_own() -> None:
    assert len({Launcher(1).token for _ in range(3)}) == 3 and len(bytes.fromhex(Launcher(1).token)) == 32


def test_a_store_listens_at_the_address_that_it_was_given_and_no_other() -> None:
    limit = timedelta(seconds=20)
    store = served_store("127.0.0.1", 0, limit)
    store.set("said", "here")
    assert dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=limit).get("said") == b"here"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", store.port), timeout=5)
