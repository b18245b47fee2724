"""The load generator against a server whose delays are known, and against foretell's own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from foretell.cli import main
from foretell.errors import UserError
from foretell.serve.bench.client import BenchAnswer, endpoint_of
from foretell.serve.bench.figures import run_of
from foretell.serve.bench.sweep import BenchAsked, measured
from foretell.simulate.serving.load import load_of
from foretell.simulate.serving.records import Limit

FIRST, GAP = 0.12, 0.02
"""Seconds to the first token of the fake, and between two."""


class Fake:
    """A server that waits as it is told to; `places` requests at a time are answered, others wait their turn."""

    def __init__(self, places: int = 1000, *, busy_from: int = 10**9, several: int = 1, cut: bool = False, strict: bool = False) -> None:
        self.places, self.busy_from, self.several, self.cut, self.strict = places, busy_from, several, cut, strict
        self.asked: list[dict[str, Any]] = []
        """The first is the client's warm-up."""
        self.sent: list[list[float]] = []
        """Of each answer: when it was asked for, and when each piece was sent. On a busy machine it waits for longer than it is told to."""
        there = threading.Event()
        self.port = 0

        async def run() -> None:
            self.turn, self.stop, self.loop = asyncio.Semaphore(places), asyncio.Event(), asyncio.get_running_loop()
            server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            there.set()
            await self.stop.wait()

        self.thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
        self.thread.start()
        assert there.wait(10)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join(10)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        began = time.monotonic()
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET /v1/models"):
                content = json.dumps({"data": [{"id": "fake"}]}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content))
            else:
                length = int(next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")).split(b":")[1])
                body = json.loads(await reader.readexactly(length))
                self.asked.append(body)
                if self.strict and "ignore_eos" in body:
                    writer.write(b'HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n{"error": {"message": "ignore_eos?"}}')
                elif len(self.asked) > self.busy_from + 1:
                    writer.write(b'HTTP/1.1 429 Too Many Requests\r\nConnection: close\r\n\r\n{"error": {"message": "later"}}')
                else:
                    async with self.turn:
                        self.sent.append([began])
                        await self._stream(writer, body["max_tokens"], self.sent[-1])
            await writer.drain()
        writer.close()

    async def _stream(self, writer: asyncio.StreamWriter, count: int, sent: list[float]) -> None:
        """With line ends of the other kind, and without chunks: to the end of the connection."""
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n\r\n")
        await asyncio.sleep(FIRST)
        for place in range(0, count, self.several):
            if place:
                await asyncio.sleep(GAP)
            piece = json.dumps({"choices": [{"text": "x" * self.several, "index": 0, "finish_reason": None}]}).encode()
            writer.write(b"data: " + piece[:10])
            await writer.drain()  # a piece may come in two
            writer.write(piece[10:] + b"\r\n\r\n")
            await writer.drain()
            sent.append(time.monotonic())
            if self.cut and place >= count // 2:
                return
        usage = json.dumps({"choices": [], "usage": {"completion_tokens": count}}).encode()
        writer.write(b"data: " + usage + b"\r\n\r\ndata: [DONE]\r\n\r\n")


@contextlib.contextmanager
def fake(**how: Any) -> Iterator[Fake]:
    one = Fake(**how)
    yield one
    one.close()


def asked(port: int, load: str, **more: Any) -> BenchAsked:
    return BenchAsked(endpoint=endpoint_of(f"http://127.0.0.1:{port}/v1"), load=load_of(load), **more)


def test_measured_times_are_the_server_s() -> None:
    with fake() as server:
        found = measured(asked(server.port, "rate=20, in=30, out=6", seconds=2.0, limit=Limit(ttft=FIRST * 2, tpot=GAP * 2)))
    (point,) = found.points
    (run,) = point.runs
    assert found.model == "fake" and run.failed == run.busy == 0 and run.requests == run.answered == len(server.asked) - 1
    firsts = [one[1] - one[0] for one in server.sent[1:]]
    gaps = [later - before for one in server.sent[1:] for before, later in pairwise(one[1:])]
    each = [(one[-1] - one[1]) / (len(one) - 2) for one in server.sent[1:]]
    assert min(firsts) > 0.99 * FIRST and statistics.median(gaps) > 0.9 * GAP
    assert run.ttft_seconds["p50"] == pytest.approx(statistics.median(firsts), abs=0.012)
    assert run.ttft_seconds["p95"] == pytest.approx(statistics.quantiles(firsts, n=20)[-1], abs=0.04)
    assert run.tpot_seconds["p50"] == pytest.approx(statistics.median(each), abs=0.003)
    assert run.gap_seconds["p50"] == pytest.approx(statistics.median(gaps), abs=0.003)
    assert run.output_tokens == run.pieces == 6 * run.requests and run.inside > 0.9 and found.saturated == run.requests / 2.0 and not found.why
    assert run.total_tokens_per_second == pytest.approx(6 * run.output_tokens_per_second)
    assert all(len(body["prompt"]) == 30 and body["max_tokens"] == 6 and body["stream"] for body in server.asked[1:])
    assert found.ceiling.tokens_per_second > 6 * found.ceiling.requests_per_second * 0.99 > 100


def test_the_same_seed_is_the_same_load() -> None:
    with fake() as server:
        for load in ("rate=30, in=5..9, out=1..3, seed=4", "rate=30, in=5..9, out=1..3, seed=4", "rate=30, in=5..9, out=1..3, seed=5"):
            measured(asked(server.port, load, seconds=0.5))
            server.asked.append({})
    runs, mine = [], []
    for one in server.asked:
        mine += [one] if one else []
        if not one:
            runs.append(sorted(mine, key=str))
            mine = []
    assert runs[0] == runs[1] != runs[2] and len(runs[0]) > 5


@pytest.mark.parametrize("kind", ["rate", pytest.param("users", marks=pytest.mark.slow(reason="the same search, a closed loop"))])
def test_saturation_is_found_where_it_is(kind: str) -> None:
    """Two places of 0.12 s + 2 · 0.02 s each: 12.5 answers a second, two users."""
    with fake(places=2) as server:
        found = measured(asked(server.port, f"{kind}={5 if kind == 'rate' else 1}, in=4, out=3", seconds=1.0, search=True))
    assert found.why and found.saturated is not None
    if kind == "rate":
        assert 9 <= found.saturated <= 14.5, found
        assert max(point.middle("answered_per_second") for point in found.points) == pytest.approx(12.5, rel=0.15)
    else:
        assert found.saturated == 2 and "goodput" in found.why


def test_limits_that_are_broken_are_saturation_too() -> None:
    with fake() as server:
        found = measured(asked(server.port, "rate=10, in=4, out=2", amounts=(5.0, 10.0), seconds=0.6, limit=Limit(ttft=FIRST / 2)))
    assert found.saturated is None and "0% keep" in found.why and found.points[0].middle("good_per_second") == 0.0


def test_what_is_refused_lost_or_lumped_is_told_apart() -> None:
    with fake(strict=True) as server:
        (point,) = measured(asked(server.port, "all=2, in=4, out=3")).points
        assert point.runs[0].answered == 2 and [("ignore_eos" in body) for body in server.asked] == [True, False, False, False]
    with fake(busy_from=4) as server:
        (point,) = measured(asked(server.port, "all=10, in=4, out=2")).points
    assert (point.runs[0].answered, point.runs[0].busy, point.runs[0].failed) == (4, 6, 0)
    with fake(cut=True) as server:
        (point,) = measured(asked(server.port, "all=3, in=4, out=8")).points
    assert point.runs[0].failed == 3 and "lost before the end" in point.runs[0].reasons[0]
    with fake(several=4) as server:
        (point,) = measured(asked(server.port, "all=2, in=4, out=16")).points
    run = point.runs[0]
    assert run.output_tokens == 32 and run.pieces == 8 and run.tpot_seconds["p50"] == pytest.approx(3 * GAP / 15, abs=0.002)


def test_rates_are_over_the_time_that_was_needed() -> None:
    def answer(sent: float, ended: float) -> BenchAnswer:
        return BenchAnswer(due=sent, prompt=10, wanted=2, sent=sent, came=[ended - 0.5, ended], ended=ended, status=200)

    kept_up = run_of([answer(place / 2, place / 2 + 3) for place in range(20)], Limit(), 0, 10.0)
    assert kept_up.answered_per_second == 2.0 == kept_up.offered_per_second and kept_up.most_at_once == 6
    slow = run_of([answer(place / 2, place + 1) for place in range(20)], Limit(ttft=2.0), 0, 10.0)
    assert slow.answered_per_second == pytest.approx(20 / 19) and slow.inside == 0.2 and slow.good_per_second == pytest.approx(4 / 19)
    assert run_of([], Limit(), 0, 5.0).answered_per_second == 0.0


def test_the_command_prints_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    with fake() as server:
        words = ["serve", "bench", f"127.0.0.1:{server.port}", "--load", "rate=4, in=8, out=3", "--seconds", "0.5"]
        assert main([*words, "--rates", "4,8", "--repeats", "2", "--slo", "ttft=1s"]) == 0
        text = capsys.readouterr().out
        assert "requests/s" in text and "first token" in text and "100%" in text and "not saturated at 7" in text
        assert main([*words, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["bench"]
        assert found["points"][0]["runs"][0]["ttft_seconds"]["p50"] == pytest.approx(FIRST, abs=0.04)
        assert main(words) == 0 and "to the first token p50" in capsys.readouterr().out
    with fake(cut=True) as server:
        assert main(["serve", "bench", f"127.0.0.1:{server.port}", "--load", "all=1,in=1,out=4", "--model", "x"]) == 1
        assert "! the connection was lost" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["ftp://x"], "no address"), (["http://127.0.0.1:1/v1"], "nothing answers"), (["127.0.0.1:1", "--rates", "1,x"], "no list of rates"),
        (["127.0.0.1:1", "--rates", "1", "--users", "1"], "one of them"), (["127.0.0.1:1", "--seconds", "0"], "--seconds 0"),
        (["127.0.0.1:1", "--load", "rate=1"], "in and out"), (["127.0.0.1:99999"], "no address"), (["127.0.0.1:1", "--slo", "x=1s"], "no limit"),
    ],
)  # fmt: skip
def test_bad_words_of_a_measurement_are_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "bench", *words]) == 2
    said = capsys.readouterr().err
    assert told in said and "Traceback" not in said, said


def test_no_server_of_this_kind_is_said() -> None:
    with fake() as server, pytest.raises(UserError, match="does not list models"):
        measured(BenchAsked(endpoint=endpoint_of(f"http://127.0.0.1:{server.port}/v2"), load=load_of("all=1,in=1,out=1"), timeout=1.0))


def test_prompts_begin_alike_where_a_load_has_a_prefix() -> None:
    with fake() as server:
        measured(asked(server.port, "all=3, in=10, out=2, prefix=6"))
        prompts = [body["prompt"] for body in server.asked if len(body["prompt"]) == 10]
    assert len(prompts) == 3 and len({tuple(one[:6]) for one in prompts}) == 1 and len({tuple(one[6:]) for one in prompts}) == 3
