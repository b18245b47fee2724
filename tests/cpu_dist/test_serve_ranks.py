"""A model on several ranks answers as one process does: tensor and pipeline splits, steps in flight, pages lost and shared."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path

import pytest
import torch

from foretell.errors import UserError
from foretell.runtime.process.pool import PoolWorld
from foretell.serve.engine import CANCELLED, LENGTH, ServingEngine, TokenEvent
from foretell.serve.ranks.controller import Meeting, RankedRunner, RankLayout, met
from foretell.serve.ranks.engine import RankedEngine
from foretell.serve.ranks.worker import serve_rank
from foretell.serve.sampling import Sampling
from foretell.serve.thread import EngineThread
from foretell.simulate.serving.scheduler import StepLimits
from tests.pure.test_serve_engine import QUICK, alone, built, prompts

Ranks = Callable[[int], PoolWorld]
LAYOUTS = {"tp2": (2, 1), "pp2": (1, 2), "tp2 pp2": (2, 2)}
SIZE, PAGES = 8, 24


def serve(rank: int, world: int, address: str, key: bytes, name: str, tp: int, pp: int) -> None:
    """A rank of the pool, as `foretell serve` starts them."""
    torch.set_num_threads(1)
    link = connection.Client(address, "AF_UNIX", authkey=key)
    link.send_bytes(b'{"rank": %d}' % rank)
    serve_rank(link, rank, RankLayout(tp=tp, pp=pp), lambda: built.__wrapped__(name), torch.device("cpu"), PAGES, SIZE)
    link.close()


@contextlib.contextmanager
def engine_on(ranks: Ranks, name: str, tp: int, pp: int, limits: StepLimits, *, dies: bool = False) -> Iterator[RankedEngine]:
    layout, meeting, wrong = RankLayout(tp=tp, pp=pp), Meeting(), []

    def run() -> None:
        try:
            ranks(layout.world).run(serve, meeting.address, meeting.key, name, tp, pp, timeout_s=300)
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        runner = RankedRunner(met(meeting, layout, lambda: bool(wrong), 60), layout)
        engine = RankedEngine(runner, pages=PAGES, size=SIZE, limits=limits)
        yield engine
        engine.close()
    finally:
        thread.join(30)
        meeting.close()
    assert bool(wrong) == dies, wrong


def check(ranks: Ranks, name: str, layout: str, count: int) -> None:
    pytest.importorskip("transformers")
    (tp, pp), asked = LAYOUTS[layout], prompts(count)
    with engine_on(ranks, name, tp, pp, StepLimits(running=5, tokens=32)) as engine:
        answers = engine.generate(asked, Sampling(most=20))
    assert engine.scheduler.preemptions and sum(one.scheduled.shared for one in answers), "pages were lost, and shared"
    assert engine.most_under_way == pp, "steps were under way together"
    model = built(name)
    assert [one.ids for one in answers] == [alone(model, prompt, 20) for prompt in asked]
    assert engine.scheduler.pages.held == 0 and {one.ended for one in answers} == {LENGTH} and not engine.scheduler.busy


FULL = pytest.mark.slow(reason="further families, and a hundred prompts of each")


@pytest.mark.parametrize(
    ("name", "layout", "count"),
    [
        ("llama", "tp2 pp2", 10), ("mixtral", "tp2 pp2", 10), *(pytest.param(*one, 10, marks=FULL) for one in (("gpt2", "tp2"), ("qwen3", "pp2"))),
        *(pytest.param(name, layout, 100, marks=FULL) for name in QUICK for layout in LAYOUTS),
    ],
)  # fmt: skip
def test_tokens_on_ranks_are_those_of_generate(ranks: Ranks, name: str, layout: str, count: int) -> None:
    check(ranks, name, layout, count)


@pytest.mark.parametrize(
    ("name", "layout", "told"),
    [
        ("llama", (4, 1), "--tp 4 does not divide 4 heads of queries and 2 of keys and values; --tp 1 or 2"),
        ("gpt2", (3, 1), "--tp 3 does not divide 4 heads; --tp 1 or 2"), ("gpt2", (1, 4), "--pp 4 for a model of 3 blocks; --pp 3 or less"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_one_line(ranks: Ranks, name: str, layout: tuple[int, int], told: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(UserError) as caught, engine_on(ranks, name, *layout, StepLimits(running=4, tokens=16)):
        pass
    assert str(caught.value) == told


def test_drawn_tokens_and_log_probabilities_come_from_the_ranks_too(ranks: Ranks) -> None:
    pytest.importorskip("transformers")
    asked = prompts(4, seed=4)
    how = [Sampling(most=10, temperature=1.5, top_k=20, top_p=0.9, seed=number, logprobs=2) for number in range(4)]
    with engine_on(ranks, "gpt2", 1, 2, StepLimits(running=4, tokens=64)) as engine:
        cancelled = engine.submit(asked[0], how[0])
        engine.step()
        engine.cancel(cancelled)
        answers = engine.generate(asked, how)
    alone_ = ServingEngine(built("gpt2"), pages=100, limits=StepLimits(running=4, tokens=64)).generate(asked, how)
    assert [one.ids for one in answers] == [one.ids for one in alone_] and cancelled.ended == CANCELLED
    for one, other in zip(answers, alone_, strict=True):
        for token, wanted in zip(one.tokens, other.tokens, strict=True):
            assert token.logprob == pytest.approx(wanted.logprob, abs=1e-4)
            assert [number for number, _ in token.likeliest] == [number for number, _ in wanted.likeliest]


def test_a_rank_that_dies_is_noticed_at_once(ranks: Ranks) -> None:
    pytest.importorskip("transformers")
    with engine_on(ranks, "gpt2", 1, 2, StepLimits(running=4, tokens=64), dies=True) as engine:
        keeper = EngineThread(engine)
        told: list[str] = []
        done = threading.Event()

        def listen(event: TokenEvent) -> None:
            told.append(event.ended)
            if len(told) == 3:
                os.kill(engine.ranked.processes[1], signal.SIGKILL)
            if event.ended:
                done.set()

        keeper.submit(tuple(prompts(1)[0]), Sampling(most=150), listen).result(60)
        assert done.wait(60) and told[-1].startswith("error: EngineLost: rank") and keeper.join(10)
        assert "rank" in keeper.lost and not keeper.taking and engine.scheduler.pages.held == 0


class Serving:
    """`foretell serve` with ranks, as typed."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-m", "foretell", "serve", "gpt2", "--port", "0", "--device", "cpu", "--json", "--pages", "64", *words]
        for name, value in {"layers": 2, "dim": 32, "heads": 4, "vocab_size": 300, "context": 512}.items():
            command += ["--set", f"{name}={value}"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        assert self.process.stdout is not None
        text = "".join(iter(self.process.stdout.readline, "}\n"))
        self.about = json.loads(text + "}")["serve"]

    def stream(self) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connected = http.client.HTTPConnection("127.0.0.1", self.about["port"], timeout=60)
        connected.request("POST", "/v1/completions", json.dumps({"prompt": "a", "max_tokens": 400, "stream": True, "ignore_eos": True}))
        answer = connected.getresponse()
        answer.read(1)
        return connected, answer

    def ranks_left(self) -> list[int]:
        return [pid for pid in self.about["rank_processes"] if Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text()]


@pytest.mark.slow(reason="a start of three processes; how a rank's death is noticed is tried above")
def test_a_rank_that_dies_ends_the_server_with_a_word_and_leaves_nothing() -> None:
    server = Serving("--tp", "2")
    try:
        assert server.about["tp"] == 2 and len(server.about["rank_processes"]) == 2 and server.about["kv_bytes_per_token"] == 2 * 2 * 32 * 4
        streams = [server.stream() for _ in range(3)]
        os.kill(server.about["rank_processes"][1], signal.SIGKILL)
        began = time.monotonic()
        for _, answer in streams:
            text = answer.read().decode()
            assert "the step failed" in text and text.rstrip().endswith("[DONE]")
        assert time.monotonic() - began < 10
        _, said = server.process.communicate(timeout=30)
        assert server.process.returncode == 1 and "the server ended: rank 1 (tp 1, pp 0) is gone: ended by signal 9" in said, said
        assert not server.ranks_left() and "Traceback" not in said
    finally:
        server.process.kill()


@pytest.mark.slow(reason="two more starts; how ranks end with their controller")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_their_controller(number: int) -> None:
    """Drained where there is time for it; all gone either way."""
    server = Serving("--pp", "2")
    try:
        _, answer = server.stream()
        server.process.send_signal(number)
        if number != signal.SIGKILL:
            assert answer.read().rstrip().endswith(b"[DONE]")
        assert server.process.wait(60) == (0 if number != signal.SIGKILL else -signal.SIGKILL)
        for _ in range(100):
            if not server.ranks_left():
                break
            time.sleep(0.1)
        assert not server.ranks_left()
    finally:
        server.process.kill()
