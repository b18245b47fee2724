"""Generators over HTTP and as commands: real requests to a server on this machine, and everything that goes wrong with one."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from foretell.errors import UserError
from foretell.tune.generate.budget import SessionBudget, TokenPrices
from foretell.tune.generate.command import CommandGenerator
from foretell.tune.generate.endpoint import HttpEndpoint
from foretell.tune.generate.talk import BudgetSpent, ChatMessage, EndpointError, MalformedAnswer, code_in, reasoning_in
from tests.pure.scripted import served, through

ASKED = [ChatMessage("system", "You write a faster kernel"), ChatMessage("user", "a module")]
PRICES = TokenPrices(per_million_in=3.0, per_million_out=15.0)


def endpoint(url: str, **more: object) -> HttpEndpoint:
    return HttpEndpoint(url=url, model="m", prices=PRICES, wait_seconds=0.01, **more)  # type: ignore[arg-type]


def test_an_answer_with_what_it_cost() -> None:
    with served("gym") as server:
        found = endpoint(server.url, key="secret", temperature=0.5).complete("coder", ASKED)
        (asked,) = server.requests
    assert code_in(found.text) == through()
    assert found.money == pytest.approx((found.tokens_in * 3 + found.tokens_out * 15) / 1e6) and found.tokens_out > 20
    assert asked["path"] == "/v1/chat/completions" and asked["headers"]["Authorization"] == "Bearer secret"
    assert asked["body"]["messages"][1] == {"role": "user", "content": "a module"} and asked["body"]["temperature"] == 0.5
    assert "secret" not in repr(endpoint(server.url, key="secret"))


def test_a_busy_endpoint_is_asked_again() -> None:
    with served("gym", [(429, "slow down", {"Retry-After": "0"}), (503, "busy")]) as server:
        assert endpoint(server.url).complete("coder", ASKED).text
        assert len(server.requests) == 3


@pytest.mark.parametrize(("fault", "told", "asked"), [
    ((401, "no key\nat all"), "HTTP 401: no key at all", 1), ((404, "no such model"), "HTTP 404", 1), ((500, "broken"), "HTTP 500: broken", 3),
    ((302, "elsewhere", {"Location": "http://127.0.0.1:1/"}), "HTTP 302", 1),
])  # fmt: skip
def test_a_refusal_is_a_line(fault: tuple[object, ...], told: str, asked: int) -> None:
    with served("gym", [fault] * 3) as server:
        with pytest.raises(EndpointError, match=told) as caught:
            endpoint(server.url).complete("coder", ASKED)
        assert len(server.requests) == asked and "\n" not in str(caught.value)


def test_an_endpoint_that_is_down() -> None:
    with served("gym") as server:
        url = server.url
    with pytest.raises(EndpointError, match=r"does not answer: .*refused"):
        endpoint(url).complete("coder", ASKED)


@pytest.mark.parametrize("content", [
    b"", b"<html>", b"[]", b"{}", b'{"choices": []}', b'{"choices": [{"message": {"content": null}}]}', b'{"choices": [{"message": {"content": 3}}]}',
    b"[" * 100_000, b"\xff\xfe",
])  # fmt: skip
def test_a_malformed_answer_is_a_line(content: bytes) -> None:
    with served("gym", [content]) as server, pytest.raises(MalformedAnswer) as caught:
        endpoint(server.url).complete("coder", ASKED)
    assert "\n" not in str(caught.value)


def test_strange_counts_of_tokens_are_counted_here() -> None:
    """Whatever it says, money is spent."""
    body = {"choices": [{"message": {"content": "x" * 100}}], "usage": {"prompt_tokens": -5, "completion_tokens": "many"}}
    with served("gym", [json.dumps(body).encode()]) as server:
        found = endpoint(server.url).complete("coder", ASKED)
    assert found.tokens_out == 100 and found.tokens_in > 50 and found.money > 0


def test_an_answer_that_never_ends_is_given_up() -> None:
    import socket
    import threading

    listening = socket.create_server(("127.0.0.1", 0))

    def trickle() -> None:
        for _ in range(3):
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
                try:
                    for _ in range(200):
                        connection.sendall(b" ")
                        time.sleep(0.02)
                except OSError:
                    pass

    threading.Thread(target=trickle, daemon=True).start()
    begun = time.monotonic()
    with listening, pytest.raises(EndpointError, match=r"in time|timed out"):
        endpoint(f"http://127.0.0.1:{listening.getsockname()[1]}/v1", seconds=0.2).complete("coder", ASKED)
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("url", [
    "http://example.org/v1", "http://127.0.0.1.example.org/v1", "ftp://localhost", "https://", "https://user:pass@host/v1", "https://host:99999/v1",
    "https://[::1/v1", "http://localhost.example.org", "https://host/v1#part", "https://host/v 1",
])  # fmt: skip
def test_an_address_that_no_key_is_sent_to(url: str) -> None:
    with pytest.raises(UserError):
        endpoint(url, key="secret")


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/v1", "http://[::1]:1/v1", "http://localhost/v1", "https://example.org/v1"])
def test_an_address_that_is(url: str) -> None:
    assert endpoint(url, key="secret").url == url


# ---------------------------------------------------------------- a command


def command(folder: Path, text: str, **more: object) -> CommandGenerator:
    path = folder / "model.py"
    path.write_text(text)
    return CommandGenerator(command=f"{sys.executable} {path}", prices=PRICES, **more)  # type: ignore[arg-type]


def test_a_command_answers_on_its_output(tmp_path: Path) -> None:
    text = "import json, sys\nasked = json.load(sys.stdin)\nprint(asked['role'], asked['messages'][1]['content'])\n"
    found = command(tmp_path, text).complete("judge", ASKED)
    assert found.text.strip() == "judge a module" and found.money > 0
    text = "import json\nprint(json.dumps({'text': 'hello', 'tokens_in': 7, 'tokens_out': 9}))"
    found = command(tmp_path, text).complete("coder", ASKED)
    assert (found.text, found.tokens_in, found.tokens_out) == ("hello", 7, 9)


@pytest.mark.parametrize(("text", "told"), [
    ("import sys; sys.exit('no licence')", "exit status 1: no licence"), ("import os, signal; os.kill(os.getpid(), 9)", "exit status -9"),
    ("import time; time.sleep(60)", "no answer after 0.5 s"), ("import sys; sys.stdout.buffer.write(b'\\xff\\xfe')", "no text in UTF-8"),
])  # fmt: skip
def test_a_command_that_fails_is_a_line(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises((EndpointError, MalformedAnswer), match=told):
        command(tmp_path, text, seconds=0.5 if "sleep" in text else 30.0).complete("coder", ASKED)


def test_what_a_command_started_is_gone(tmp_path: Path) -> None:
    text = f"import subprocess\nsubprocess.Popen(['sh', '-c', 'sleep 0.5; touch {tmp_path}/late'])\nprint('done')"
    assert command(tmp_path, text).complete("coder", ASKED).text.strip() == "done"
    time.sleep(0.8)
    assert not (tmp_path / "late").exists()


@pytest.mark.parametrize("words", ["/nowhere/at/all", "", "a 'b"])
def test_no_command_is_a_line(words: str) -> None:
    with pytest.raises(UserError):
        CommandGenerator(command=words).complete("coder", ASKED)


# ---------------------------------------------------------------- what is made of an answer, and the budget


def test_code_is_taken_out_of_an_answer() -> None:
    text = "First:\n```python\nx = 1\n```\nThen the kernel, as asked:\n```python\n" + through() + "```\nDone."
    assert code_in(text) == through() and reasoning_in(text) == "First: Then the kernel, as asked: Done."
    assert code_in(through()) == through()
    deep = "```python\n" + "(" * 5000 + "\nclass ModelNew: 0\n```"
    for bad in ("", "no", "```python\nclass ModelNew(:\n```", "```python\nclass Other: pass\n```", deep):
        with pytest.raises(MalformedAnswer, match="is no kernel"):
            code_in(bad)


def test_no_question_is_asked_that_could_cost_more_than_is_left() -> None:
    now = [0.0]
    budget = SessionBudget(1.0, 0.2, PRICES, clock=lambda: now[0])
    budget.check(ASKED)
    with pytest.raises(BudgetSpent, match="could cost"):
        budget.check([ChatMessage("user", "x" * 30_000)])
    now[0] = 61.0
    with pytest.raises(BudgetSpent, match="1 minutes are over"):
        budget.check(ASKED)
