"""Sessions that end early keep what they found; and the command with a generator, over HTTP, from the first question to the data set."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from foretell.api.kernels import search as kernels
from foretell.cli import main
from foretell.tune.generate import prompts
from foretell.tune.generate.budget import SessionBudget, TokenPrices
from foretell.tune.generate.endpoint import HttpEndpoint
from foretell.tune.generate.prompts import RoundState
from foretell.tune.generate.replay import replayed
from foretell.tune.generate.rounds import KernelSession, SessionAnswer, SessionOptions, head_of
from foretell.tune.generate.talk import BudgetSpent, ChatMessage, TextAnswer
from foretell.tune.generate.transcript import MeasuredKernel, RecordedGenerator, TranscriptWriter
from foretell.tune.generate.ways import Ways, ways_without
from foretell.tune.search.trial import TIMED, TrialResult
from tests.pure.scripted import TASK, block, loop, served, whole

PRICES = TokenPrices(per_million_in=50.0, per_million_out=50.0)
ALONE = Ways(strategy=False, judge=False, memory=False)


class Speeds:
    """An environment whose kernels are as fast as their texts are long."""

    def __init__(self, interrupted_after: int = 99) -> None:
        self.left = interrupted_after

    def measured(self, texts: Sequence[str]) -> list[MeasuredKernel]:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        speeds = [len(text) / 100 for text in texts]
        return [MeasuredKernel(result=TrialResult(status=TIMED, seconds=1 / one, speedup=one), reward=one) for one in speeds]


class Answers:
    """Texts one after the other."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)

    def complete(self, role: str, messages: Sequence[ChatMessage]) -> TextAnswer:
        text = self.texts.pop(0)
        return TextAnswer(text=text, tokens_in=100, tokens_out=100, money=0.01)


def session(folder: Path, generator: object, *, ways: Ways = ALONE, environment: Speeds | None = None, money: float | None = None,
            clock: float = 0.0, **more: object) -> SessionAnswer:  # fmt: skip
    options = SessionOptions(task=TASK, ops=("mul",), backend="tests", ways=ways, **{"rounds": 6, **more})  # type: ignore[arg-type]
    ticks = iter(range(10_000))
    budget = SessionBudget(1.0, money, PRICES, clock=lambda: clock * next(ticks))
    writer = TranscriptWriter(folder / "transcript.jsonl", head_of(options, None, budget))
    recorded = RecordedGenerator(generator, budget, writer)  # type: ignore[arg-type]
    found = KernelSession(options, recorded, environment or Speeds(), budget, None, writer).run()
    writer.close()
    again = replayed(folder / "transcript.jsonl")[0]
    assert (again.best, again.variants, again.tries) == (found.best, found.variants, found.tries)
    assert again.spent == pytest.approx(found.spent) and (again.ended == found.ended or found.interrupted)
    return found


def test_answers_that_are_no_kernels_end_a_session(tmp_path: Path) -> None:
    found = session(tmp_path, Answers(block(loop()), "no", block(loop()), "no", "```python\nx = (\n```", "no", block(whole())))
    assert found.fault == "MalformedAnswer" and "3 answers in a row" in found.ended and found.asked == 6
    assert found.best is not None and found.best.text == loop()


def test_an_endpoint_that_fails_later_loses_nothing(tmp_path: Path) -> None:
    """Over HTTP: the first answer, then a broken one, a redirect, and the end."""
    with served("ranked", [None, b"<html>", (403, "no more")]) as server:
        generator = HttpEndpoint(url=server.url, model="m", wait_seconds=0.01)
        found = session(tmp_path, generator)
    assert found.fault == "EndpointError" and "HTTP 403: no more" in found.ended and found.best is not None


def test_money_is_never_overspent(tmp_path: Path) -> None:
    """There is enough for the first question and five cents; prompts grow, and a later one is not asked."""
    first = SessionBudget(1.0, None, PRICES).highest(prompts.coder(RoundState(task=TASK, backend="tests")))
    found = session(tmp_path, Answers(*[block(loop())] * 6), money=first + 0.05)
    assert found.fault == "BudgetSpent" and "could cost" in found.ended and found.best is not None
    assert 0.01 <= found.spent <= 0.05
    with pytest.raises(BudgetSpent):
        SessionBudget(1.0, first - 1e-9, PRICES).check(prompts.coder(RoundState(task=TASK, backend="tests")))


def test_minutes_end_a_session(tmp_path: Path) -> None:
    found = session(tmp_path, Answers(*[block(loop())] * 6), clock=10.0)
    assert found.fault == "BudgetSpent" and "1 minutes are over" in found.ended and found.best is not None


def test_an_interrupted_session_keeps_its_best(tmp_path: Path) -> None:
    texts = [block(loop() + "# again\n" * count) for count in range(3)]
    found = session(tmp_path, Answers(*texts), environment=Speeds(interrupted_after=2))
    assert found.interrupted and found.best is not None and len(found.variants) == 2


def test_several_answers_of_a_round_are_measured_together(tmp_path: Path) -> None:
    longer = loop() + "# a longer one\n"
    found = session(tmp_path, Answers(block(loop()), "no", block(longer), block(loop())), answers=2, rounds=2)
    assert [one.text for one in found.variants] == [loop(), longer] and found.best is not None and found.best.text == longer
    assert found.asked == 4 and found.tries == 4  # the round it came with has two


def test_it_ends_when_it_is_fast_enough(tmp_path: Path) -> None:
    found = session(tmp_path, Answers(block(loop()), block(loop())), target=1.5)
    assert found.asked == 1 and "enough" in found.ended


def test_ways_are_left_out_by_name() -> None:
    assert ways_without(["judge,audit", " memory "]).left_out == ("judge", "memory", "audit") and ways_without([]) == Ways()


# ---------------------------------------------------------------- the command


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["tune", "search", *words])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_the_command_from_the_first_question_to_the_data_set(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real server, real kernels: a pass-through is refused, the next kernel wins; replayed, and made a data set of."""
    monkeypatch.setattr(kernels, "CPU_CACHE_BYTES", 1 << 12)
    monkeypatch.setenv("FORETELL_GENERATOR_KEY", "very-secret")
    (tmp_path / "task.py").write_text(TASK)
    out = tmp_path / "out"
    with served("gym") as server:
        words = ["--generator", server.url, "--model", "scripted", "--rounds", "2", "--no-compile", "--forward-only", "--without", "strategy,judge"]
        status, said, _ = run(capsys, str(tmp_path / "task.py"), *words, "--device", "cpu", "--out", str(out), "--price-in", "3", "--money", "1")
        assert server.requests[0]["headers"]["Authorization"] == "Bearer very-secret"
    assert status == 0 and "2 kernels asked for in 2 questions, 1 right" in said and "faster: " in said
    assert (out / "kernel.py").read_text() == whole()
    assert not any("very-secret" in path.read_text() for path in tmp_path.rglob("*.json*"))
    status, said, _ = run(capsys, "--replay", str(out / "transcript.jsonl"), "--json")
    told = json.loads(said)["session"]
    assert status == 0 and told["best"]["text"] == whole() and told["variants"][0]["result"]["check"] == "passthrough"
    status, said, _ = run(capsys, "--curate", str(out / "transcript.jsonl"), "--out", str(tmp_path / "set.jsonl"))
    (row,) = [json.loads(line) for line in (tmp_path / "set.jsonl").read_text().splitlines()]
    assert status == 0 and row["kernel"] == whole() and "row.square().mean()" in row["task"] and "1 of 2 kernels" in said


def test_an_endpoint_that_is_down_is_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, cache_dir: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    with served("gym") as server:
        url = server.url
    words = [str(tmp_path / "task.py"), "--device", "cpu", "--out", str(tmp_path / "out"), "--forward-only"]
    status, _, said = run(capsys, *words, "--generator", url, "--model", "scripted")
    assert status == 2 and "does not answer" in said and "Traceback" not in said and said.count("error:") == 1
