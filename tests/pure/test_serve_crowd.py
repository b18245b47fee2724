"""The server in a crowd, and how it ends: many clients at once, some that go away, signals; nothing is left behind."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from foretell.cli import main
from foretell.serve.engine import Completion
from tests import forks
from tests.pure.test_serve_http import SIZES, Running, expected

pytestmark = pytest.mark.usefixtures("one_thread")
COMMAND = ["serve", "gpt2", "--device", "cpu", "--pages", "200", *(word for name, value in SIZES.items() for word in ("--set", f"{name}={value}"))]


class Process:
    """The command as typed, in a process of its own: Python is started, or `forked` from one that has torch."""

    def __init__(self, *, forked: bool = False) -> None:
        words, env = [*COMMAND, "--port", "0", "--json"], {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(forks.ROOT)}
        self.process: subprocess.Popen[str] | forks.Command
        if forked:
            self.process, text = forks.Command(*words, env=env), ""
            while not text.endswith("\n}\n") and self.process.poll() is None:
                time.sleep(0.02)
                text = self.process.said()
        else:
            asked = [sys.executable, "-m", "foretell", *words]
            self.process = subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
            assert self.process.stdout is not None
            text = "".join(iter(self.process.stdout.readline, "}\n")) + "}"
        self.port = json.loads(text)["serve"]["port"]

    @property
    def resident(self) -> int:
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{self.process.pid}/status").read_text())
        assert found
        return int(found[1]) * 1024

    def ask(self, number: int, tokens: int = 8, **more: Any) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps({"prompt": f"number {number}", "max_tokens": tokens, "temperature": 0, **more}))
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        return answer.status, text

    def end(self) -> None:
        self.process.kill()
        if self.process.returncode is None:
            self.process.communicate()


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[Process]:
    one = Process(forked=getattr(request, "param", "") == "forked")
    yield one
    one.end()


def test_a_crowd_is_answered_or_told_to_come_back() -> None:
    one = Running(pages=60, most_waiting=100, running=16)
    barrier = threading.Barrier(200)

    def ask(number: int) -> tuple[int, Any]:
        barrier.wait(30)
        return one.ask("/v1/completions", {"prompt": f"number {number}", "max_tokens": 6, "temperature": 0})

    with ThreadPoolExecutor(200) as pool:
        found = list(pool.map(ask, range(200)))
    assert {status for status, _ in found} <= {200, 429} and sum(status == 200 for status, _ in found) >= 100
    right = {number: body["choices"][0]["text"] for number, (status, body) in enumerate(found) if status == 200}
    assert all(right[number] == expected(f"number {number}", 6) for number in list(right)[:: max(1, len(right) // 6)])
    one.wait_until_idle()
    one.close()


def test_pages_of_who_goes_away_are_free_within_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Running(pages=200)
    keeper, engine = one.keeper, one.keeper.engine
    asked, freed = {}, {}
    cancel, ended = keeper.cancel, engine.cancel

    def noted(generation: Completion) -> None:
        asked[generation.number] = keeper.counts().steps
        cancel(generation)

    def freeing(generation: Completion) -> None:
        ended(generation)
        assert not generation.scheduled.pages
        freed[generation.number] = keeper.counts().steps

    monkeypatch.setattr(keeper, "cancel", noted)
    monkeypatch.setattr(engine, "cancel", freeing)
    wires = []
    for number in range(12):
        body = json.dumps({"prompt": f"gone {number}", "max_tokens": 110, "temperature": 0, "stream": True}).encode()
        wires.append(socket.create_connection(("127.0.0.1", one.port), timeout=10))
        wires[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: " + str(len(body)).encode() + b"\r\n\r\n" + body)
    for wire in wires:
        wire.recv(10)
        wire.close()
    one.wait_until_idle()
    assert len(asked) > 6 and asked.keys() == freed.keys() and max(freed[number] - asked[number] for number in asked) <= 2
    one.close()


@pytest.mark.parametrize(
    "body", [b'{"prompt": "\xff\xfe"}', b'{"prompt": "\\ud800"}', b'{"prompt": ["ok", "\\udfff"]}', b'{"prompt": "a", "stop": "\\ud800"}']
)
def test_text_that_is_none_is_refused(body: bytes) -> None:
    one = Running()
    status, found = one.ask("/v1/completions", body)
    assert status == 400 and found["error"]["message"]
    status, found = one.ask("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 2}')
    assert status == 400 and one.ask("/health") == (200, {"status": "ok"})
    one.close()


def test_a_stop_string_that_never_comes_holds_nothing_back() -> None:
    one = Running()
    whole = expected("abc", 30)
    found = one.complete("abc", max_tokens=30, stop=["never said", whole[-2:] + "!"])
    assert found["choices"][0] == {**found["choices"][0], "text": whole, "finish_reason": "length"}
    status, text = one.ask("/v1/completions", {"prompt": "abc", "max_tokens": 30, "temperature": 0, "stream": True, "stop": [whole[-2:] + "!"]})
    pieces = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in text.split("\n\n") if line and "[DONE]" not in line]
    assert status == 200 and "".join(pieces) == whole
    one.close()


def test_memory_stays_a_port_is_taken_once_and_a_killed_server_leaves_nothing(process: Process, capsys: pytest.CaptureFixture[str]) -> None:
    """In one process: each start takes seconds."""
    with ThreadPoolExecutor(8) as pool:
        assert {status for status, _ in pool.map(process.ask, range(150))} == {200}
        before = process.resident
        assert {status for status, _ in pool.map(process.ask, range(150, 550))} == {200}
        assert process.resident - before < 4 * 2**20
    assert main([*COMMAND, "--port", str(process.port)]) == 2
    said = capsys.readouterr().err
    assert f"nothing can listen at 127.0.0.1:{process.port}" in said and "Traceback" not in said
    children = Path(f"/proc/{process.process.pid}/task/{process.process.pid}/children").read_text().split()
    wire = socket.create_connection(("127.0.0.1", process.port), timeout=10)
    wire.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n")
    process.process.kill()
    process.process.communicate(timeout=10)
    assert process.process.returncode == -signal.SIGKILL and not [child for child in children if Path(f"/proc/{child}").exists()]
    wire.close()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", process.port))


@pytest.mark.parametrize("process", ["forked"], indirect=True)
def test_sigterm_under_load_is_drained(process: Process) -> None:
    """Streams and whole answers, running and waiting: all get every token, and who comes later is refused."""
    with ThreadPoolExecutor(24) as pool:
        asked = [pool.submit(process.ask, number, 60, stream=bool(number % 2), ignore_eos=True) for number in range(24)]
        for _ in range(400):
            time.sleep(0.01)
            with socket.create_connection(("127.0.0.1", process.port), timeout=10) as wire:
                wire.sendall(b"GET /metrics HTTP/1.1\r\nConnection: close\r\n\r\n")
                text = b"".join(iter(lambda wire=wire: wire.recv(65536), b"")).decode()  # type: ignore[misc]
            if "foretell_requests 24\n" in text:
                break
        process.process.send_signal(signal.SIGTERM)
        found = [one.result(60) for one in asked]
    process.process.communicate(timeout=30)
    assert process.process.returncode == 0
    for number, (status, text) in enumerate(found):
        assert status == 200 and (text.rstrip().endswith(b"[DONE]") if number % 2 else json.loads(text)["usage"]["completion_tokens"] == 60)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", process.port), timeout=1)
