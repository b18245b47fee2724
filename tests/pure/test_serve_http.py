"""The server over real sockets: what clients get, together and alone, and what becomes of those that go away."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from foretell import zoo
from foretell.cli import main
from foretell.serve.engine import ServingEngine, StepLimits
from foretell.serve.http import HttpServer
from foretell.serve.sampling import Sampling
from foretell.serve.text import AnswerText, ByteWords
from foretell.serve.thread import EngineThread

SIZES = {"layers": 2, "dim": 32, "heads": 4, "vocab_size": 300, "context": 128}


def model() -> Any:
    torch.manual_seed(5)
    found = zoo.load(zoo.get("gpt2")).build(**{**zoo.get("gpt2").config, **SIZES}).eval()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.mul_(10 if parameter.dim() > 1 else 1)
    return found


class Running:
    """A server in a thread of its own."""

    def __init__(self, pages: int = 60, most_waiting: int = 1000, running: int = 16) -> None:
        engine = ServingEngine(model(), pages=pages, size=8, limits=StepLimits(running=running, tokens=64))
        self.keeper = EngineThread(engine, most_waiting=most_waiting)
        self.server, self.port, there = HttpServer(self.keeper, ByteWords(), "tiny"), 0, threading.Event()

        def ready(port: int) -> None:
            self.port = port
            self.loop = asyncio.get_running_loop()
            there.set()

        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve("127.0.0.1", 0, ready)), daemon=True)
        self.thread.start()
        assert there.wait(30)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.server.stop)
        self.thread.join(30)
        assert not self.thread.is_alive() and not self.keeper.alive

    def ask(self, path: str, body: Any = None, method: str = "") -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        raw = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        connection.request(method or ("POST" if body is not None else "GET"), path, raw)
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        return answer.status, json.loads(text) if answer.getheader("Content-Type") == "application/json" else text.decode()

    def complete(self, prompt: Any, **more: Any) -> Any:
        status, found = self.ask("/v1/completions", {"prompt": prompt, "temperature": 0, **more})
        assert status == 200, found
        return found

    def wait_until_idle(self) -> None:
        for _ in range(400):
            counts = self.keeper.counts()
            if not counts.pages_held + counts.waiting + counts.running:
                return
            time.sleep(0.02)
        pytest.fail(f"pages are still held: {self.keeper.counts()}")


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    one = Running()
    yield one
    one.close()
    torch.set_num_threads(threads)


def expected(prompt: str, most: int) -> str:
    engine = ServingEngine(model(), pages=60, size=8, limits=StepLimits(running=4, tokens=64))
    (answer,) = engine.generate([list(prompt.encode())], Sampling(most=most))
    decoder = ByteWords().decoder()
    return "".join(decoder.add(one) for one in answer.ids) + decoder.end()


def test_a_completion_is_what_the_engine_gives(running: Running) -> None:
    found = running.complete("Once upon a time", max_tokens=20)
    assert found["choices"][0]["text"] == expected("Once upon a time", 20) and found["choices"][0]["finish_reason"] == "length"
    assert found["usage"]["prompt_tokens"] == 16 and found["usage"]["completion_tokens"] == 20 and found["object"] == "text_completion"
    again = running.complete("Once upon a time", max_tokens=20)
    assert again["choices"] == found["choices"] and again["usage"]["prompt_tokens_details"]["cached_tokens"] == 8
    both = running.complete([list(b"Once upon a time"), list(b"other")], max_tokens=5, n=2)
    assert [one["index"] for one in both["choices"]] == [0, 1, 2, 3] and both["choices"][0]["text"] == both["choices"][1]["text"]


def test_a_stream_adds_up_to_the_answer(running: Running) -> None:
    status, text = running.ask("/v1/completions", {"prompt": "Stream", "max_tokens": 15, "temperature": 0, "stream": True, "n": 2,
                                                   "stream_options": {"include_usage": True}})  # fmt: skip
    pieces = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert status == 200 and pieces[-1] == "[DONE]"
    told = [json.loads(one) for one in pieces[:-1]]
    for index in (0, 1):
        mine = [one["choices"][0] for one in told if one["choices"] and one["choices"][0]["index"] == index]
        assert "".join(one["text"] for one in mine) == expected("Stream", 15) and mine[-1]["finish_reason"] == "length"
    assert told[-1]["usage"]["completion_tokens"] == 30
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "stream": True, "temperature": 0}
    status, text = running.ask("/v1/chat/completions", body)
    deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"]["content"] for line in text.split("\n\n")[:-2]]
    assert "".join(deltas) == expected("user: hi\nassistant: ", 6)


def test_stops_seeds_and_log_probabilities(running: Running) -> None:
    whole = expected("abc", 30)
    stop = whole[10:12]
    found = running.complete("abc", max_tokens=30, stop=[stop])
    assert found["choices"][0]["text"] == whole[: whole.index(stop)] and found["choices"][0]["finish_reason"] == "stop"
    drawn = [running.complete("abc", max_tokens=12, temperature=1.2, seed=seed)["choices"][0]["text"] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    logs = running.complete("abc", max_tokens=3, logprobs=2)["choices"][0]["logprobs"]
    assert len(logs["tokens"]) == 3 and all(one <= 0 for one in logs["token_logprobs"]) and len(logs["top_logprobs"][0]) <= 2
    status, chat = running.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "max_tokens": 2,
                                                        "logprobs": True, "top_logprobs": 3})  # fmt: skip
    assert status == 200 and len(chat["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 3
    running.wait_until_idle()


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        ("/v1/completions", b"{", 400, "no JSON"), ("/v1/completions", b"[1]", 400, "no JSON object"),
        ("/v1/completions", b"\xff\xfe", 400, "no JSON"),
        ("/v1/completions", {}, 400, "'prompt' is None"), ("/v1/completions", {"prompt": ""}, 400, "empty"),
        ("/v1/completions", {"prompt": [400]}, 400, "the model has 300"),
        ("/v1/completions", {"model": "gpt-5", "prompt": "a"}, 404, "there is no model 'gpt-5' here; try: 'tiny'"),
        ("/v1/completions", {"prompt": "a", "max_tokens": -3}, 400, "'max_tokens' is -3"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "'max_tokens' is 0"),
        ("/v1/completions", {"prompt": "a" * 120, "max_tokens": 20}, 400, "at most 108 tokens of prompt"),
        ("/v1/completions", {"prompt": "a", "temperature": -1}, 400, "'temperature'"),
        ("/v1/completions", {"prompt": "a", "n": 99}, 400, "'n' is 99"),
        ("/v1/completions", {"prompt": "a", "echo": True}, 400, "'echo' is not supported"),
        ("/v1/completions", {"prompt": "a", "stop": [1]}, 400, "'stop'"),
        ("/v1/completions", {"prompt": "a", "stream": 3}, 400, "'stream'"), ("/v1/chat/completions", {"messages": []}, 400, "'messages'"),
        ("/v1/chat/completions", {"messages": [{"role": "king", "content": "x"}]}, 400, "a message is"), ("/v2", None, 404, "there is no /v2"),
        ("/v1/completions", None, 405, "takes POST"), ("/health", {"a": 1}, 405, "takes GET"),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_says_so(running: Running, path: str, body: Any, status: int, told: str) -> None:
    found = running.ask(path, body)
    assert found[0] == status and told in found[1]["error"]["message"], found


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"), (b"GET /health SPDY/3\r\n\r\n", b"400"), (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", b"431"),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n", b"413"), (b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", b"431"), (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"400"),
    ],
)  # fmt: skip
def test_what_is_no_request_is_refused(running: Running, sent: bytes, status: bytes) -> None:
    with socket.create_connection(("127.0.0.1", running.port), timeout=10) as wire:
        wire.sendall(sent)
        assert wire.recv(100).startswith(b"HTTP/1.1 " + status)
    assert running.ask("/health") == (200, {"status": "ok"})


def test_many_at_once_get_what_each_gets_alone(running: Running) -> None:
    """More than run at a time, of which some lose their pages; and nothing is left."""
    texts = [f"prompt number {number}: {'x' * (number % 40)}" for number in range(120)]
    with ThreadPoolExecutor(40) as pool:
        found = list(pool.map(lambda text: running.complete(text, max_tokens=12)["choices"][0]["text"], texts))
    for place in range(0, 120, 17):
        assert found[place] == expected(texts[place], 12)
    running.wait_until_idle()


def test_who_goes_away_leaves_no_pages(running: Running) -> None:
    before = running.keeper.counts()
    for stream in (True, False):
        body = json.dumps({"prompt": "gone", "max_tokens": 110, "temperature": 0, "stream": stream}).encode()
        with socket.create_connection(("127.0.0.1", running.port), timeout=10) as wire:
            wire.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: " + str(len(body)).encode() + b"\r\n\r\n" + body)
            if stream:
                wire.recv(10)
            else:
                while running.keeper.counts().requests == before.requests + 1:
                    time.sleep(0.001)
    running.wait_until_idle()
    after = running.keeper.counts()
    assert after.requests == before.requests + 2 and after.cancelled >= before.cancelled + 1 and after.running == 0


def test_a_step_that_fails_is_told_and_others_go_on(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another process takes the device's memory."""
    engine, run = running.keeper.engine, running.keeper.engine.runner.launch
    left = [1]

    def once(*given: Any) -> Any:
        if left and left.pop():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(*given)

    monkeypatch.setattr(engine.runner, "launch", once)
    status, found = running.ask("/v1/completions", {"prompt": "a", "max_tokens": 4})
    assert status == 500 and "OutOfMemoryError: CUDA out of memory" in found["error"]["message"]
    assert running.complete("Once upon a time", max_tokens=20)["choices"][0]["text"] == expected("Once upon a time", 20)
    running.wait_until_idle()


def test_more_than_may_wait_are_told_to_come_back() -> None:
    torch.set_num_threads(1)
    one = Running(running=1, most_waiting=2)
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda _: one.ask("/v1/completions", {"prompt": "a", "max_tokens": 60}), range(12)))
    assert {status for status, _ in found} == {200, 429}
    assert all("wait already" in body["error"]["message"] for status, body in found if status == 429)
    status, text = one.ask("/metrics")
    assert status == 200 and f"foretell_requests {sum(status == 200 for status, _ in found)}\n" in text
    one.close()


def test_stop_strings_are_found_across_pieces() -> None:
    answer = AnswerText(ByteWords().decoder(), ["END", "zz"])
    told = [answer.add(one) for one in b"an E aEN zEND more"]
    assert "".join(told) == "an E aEN z" and answer.stopped and answer.end() == ""
    other = AnswerText(ByteWords().decoder(), ["END"])
    assert "".join(other.add(one) for one in "käse EN".encode()) + other.end() == "käse EN"
    broken = ByteWords().decoder()
    assert broken.add(0xC3) == "" and broken.end() == "\ufffd"


def test_the_command_serves_and_drains_on_sigterm() -> None:
    """As typed; what is under way when SIGTERM comes is answered, and nothing is left behind."""
    command = [sys.executable, "-m", "foretell", "serve", "gpt2", "--port", "0", "--device", "cpu", "--json"]
    for name, value in SIZES.items():
        command += ["--set", f"{name}={value}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        assert process.stdout is not None
        lines = list(iter(process.stdout.readline, "}\n"))
        about = json.loads("".join(lines) + "}")["serve"]
        assert about["kv_bytes_per_token"] == 2 * 2 * 32 * 4 and about["longest_request"] == 128 and "random numbers" in about["notes"][0]
        connection = http.client.HTTPConnection("127.0.0.1", about["port"], timeout=60)
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "a", "max_tokens": 100, "stream": True}))
        answer = connection.getresponse()
        answer.read(1)
        process.send_signal(signal.SIGTERM)
        assert answer.read().rstrip().endswith(b"[DONE]")
        assert process.wait(30) == 0
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["no-such-model"], "no-such-model"), (["gpt2", "--pages", "0"], "--pages 0"), (["gpt2", "--tp", "0"], "--tp 0"),
        (["gpt2", "--port", "70000"], "port 70000"),
        (["gpt2", "--dtype", "int3"], "--dtype int3"), (["gpt2", "--device", "tpu"], "--device tpu"), (["resnet50"], "positions"),
        (["gpt2", "--set", "layers=1", "--tokenizer", "/no/such"], "has no tokenizer"),
        (["gpt2", "--set", "layers=1", "--set", "vocab_size=64"], "has 64 words"),
    ],
)  # fmt: skip
def test_bad_words_are_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *words]) == 2
    said = capsys.readouterr().err
    assert told in said and "Traceback" not in said, said
