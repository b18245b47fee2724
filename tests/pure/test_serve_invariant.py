"""The bits of an answer depend on nothing else that is served: tokens and log probabilities alone and among others are equal."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Sequenced
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell.cli import main
from foretell.errors import ModelError, UserError
from foretell.lower.serving import StepShape
from foretell.plan import file
from foretell.plan.types import Plan, ServeLayout
from foretell.serve import graphs
from foretell.serve.engine import Completion, ServingEngine, StepLimits
from foretell.serve.invariant import FixedRunner
from foretell.serve.runner import StepRunner, TokenRunner
from foretell.serve.sampling import Drawn, Sampling
from foretell.serve.start import Setup, started
from foretell.simulate.serving.invariant import FixedSizes, fixed_shapes, fixed_sizes, step_parts
from foretell.simulate.serving.load import load_of
from foretell.simulate.serving.pages import Pages
from foretell.simulate.serving.run import shape_of, simulated
from foretell.simulate.serving.scheduler import Row, Scheduler, Sequence, Step
from tests import paged
from tests.pure.test_serve_engine import built, prompts, released
from tests.pure.test_serve_plan import WORDS, costs

__all__ = ["released"]
pytestmark = pytest.mark.usefixtures("one_thread")
HOW = [Sampling(most=10, temperature=1.2 * (number % 2), top_k=20 * (number % 3), seed=number, logprobs=3) for number in range(9)]
FURTHER = pytest.mark.slow(reason="further models: windows, caps and experts; a Llama and GPT-2 show it")


def alone_and_among(name: str, limits: StepLimits, made: Callable[[int], StepRunner] | None = None) -> list[tuple[Completion, Completion]]:
    """Answers with few pages among others, and each with many pages alone."""
    asked = prompts(len(HOW))

    def engine(pages: int) -> ServingEngine:
        runner = None if made is None else made(pages)
        return ServingEngine(built(name), pages=pages, size=8, limits=limits, check=False, runner=runner)

    crowd, quiet = engine(17), engine(60)
    among = crowd.generate(asked, HOW)
    assert crowd.scheduler.preemptions and sum(one.scheduled.shared for one in among), "pages were lost, and shared"
    assert any(one.scheduled.preempted and one.scheduled.prompt % 8 for one in among)
    return [(one, quiet.generate([prompt], how)[0]) for one, prompt, how in zip(among, asked, HOW, strict=True)]


def equal(pairs: Sequenced[tuple[Completion, Completion]]) -> int:
    """How many are bit for bit."""
    return sum(one.tokens == other.tokens for one, other in pairs)


# ---------------------------------------------------------------------- on a CPU


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.float32), ("gpt2", torch.bfloat16), pytest.param("gemma2", torch.float32, marks=FURTHER),
        pytest.param("mixtral", torch.float32, marks=FURTHER), pytest.param("qwen3", torch.bfloat16, marks=FURTHER),
    ],
)  # fmt: skip
def test_answers_are_the_same_bits_alone_and_among_others(name: str, dtype: torch.dtype) -> None:
    """Prompts in pieces, shared and lost pages; windows, caps, experts; drawn tokens and their log probabilities."""
    model = built(name).to(dtype)
    try:
        pairs = alone_and_among(name, StepLimits(running=5, tokens=24, invariant=True))
    finally:
        model.float()
    assert equal(pairs) == len(HOW)
    assert all(token.logprob is not None and len(token.likeliest) == 3 for one, _ in pairs for token in one.tokens)


def test_without_it_they_are_not() -> None:
    """Products of one row and of several add up in other orders."""
    assert equal(alone_and_among("llama", StepLimits(running=5, tokens=24))) < len(HOW)


def test_an_engine_computes_each_token_by_itself_on_a_cpu() -> None:
    engine = ServingEngine(built("llama"), pages=8, size=8, limits=StepLimits(running=2, tokens=8, invariant=True))
    assert type(engine.runner) is TokenRunner and engine.scheduler.limits.invariant


# ---------------------------------------------------------------------- as a GPU computes it


class Event:
    """Nothing is under way on a CPU."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its runners with kernels in plain PyTorch, launched one by one, in parts of few rows."""
    monkeypatch.setitem(sys.modules, "foretell.kernels.paged_attention", paged)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for name, rows in (("GENERATED", 16), ("PROMPTED", 32), ("SEQUENCES", 4)):
        monkeypatch.setattr(f"foretell.simulate.serving.invariant.{name}", rows)
    with torch.library._scoped_library("foretell_pages", "IMPL") as here:
        here.impl("attend", lambda *given: graphs.rows_now().attend(*given), "CPU")
        yield


def fixed(pages: int, limits: StepLimits, name: str = "llama") -> FixedRunner:
    try:
        return FixedRunner(built(name), pages, 8, running=limits.running, tokens=limits.tokens, compiled=False, graphs=False)
    except ModelError as error:
        if "change with the rows beside them" in str(error):
            pytest.skip("products of this CPU change with the place of a row")
        raise


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", ["llama", pytest.param("gemma2", marks=FURTHER)])
def test_parts_of_fixed_shapes_give_the_same_bits(name: str) -> None:
    """The host one step ahead; what was generated before its pages were lost is computed as generated again."""
    limits = StepLimits(running=5, tokens=24, invariant=True)
    pairs = alone_and_among(name, limits, lambda pages: fixed(pages, limits, name))
    assert equal(pairs) == len(HOW)
    plain = ServingEngine(built(name), pages=60, size=8, limits=StepLimits(running=5, tokens=24))
    greedy = [place for place, how in enumerate(HOW) if not how.temperature]
    assert [plain.generate([pairs[place][0].prompt], HOW[place])[0].ids for place in greedy] == [pairs[place][0].ids for place in greedy]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_scheduler_that_computes_them_as_prompts_does_not() -> None:
    """The same parts and attention, but generated tokens come back as a piece of a prompt."""

    class Mixed(FixedRunner):
        def _compute(self, step: Step, tokens: Sequenced[Sequenced[int]]) -> int:
            first = next((place for place, row in enumerate(step) if row.count > 1), len(step))
            rows = []
            for place, (sequence, start, count) in enumerate(step):
                kind = Sequence(0, 0 if place < first else 10**6, 1, length=sequence.length, pages=sequence.pages)
                rows.append(Row(kind, start, count))
            return super()._compute(tuple(rows), tokens)

    limits = StepLimits(running=5, tokens=24)
    more = {"running": 5, "tokens": 24, "check": False, "compiled": False, "graphs": False}
    pairs = alone_and_among("llama", limits, lambda pages: Mixed(built("llama"), pages, 8, **more))
    assert equal(pairs) < len(HOW)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_device_whose_rows_depend_on_others_is_refused() -> None:
    """Found before anything is served, whatever it depends on: a neighbour, or the place among the rows."""

    class Neighbours(FixedRunner):
        def _forward(self, layout: Any, generating: int | None = None) -> Tensor:
            found = super()._forward(layout, generating)
            return found + 1e-6 * found.roll(1, 0)

    with pytest.raises(ModelError, match="change with the rows beside them"):
        Neighbours(built("llama"), 20, 8, running=4, tokens=16, compiled=False, graphs=False)
    with pytest.raises(UserError, match="has experts"):
        FixedRunner(built("mixtral"), 20, 8, running=4, tokens=16)


def test_a_row_is_drawn_alike_in_every_group() -> None:
    """Against all rows at once, in the words that are chosen; groups are filled and rows lengthened with what is never chosen."""
    torch.manual_seed(3)
    logits = torch.randn(11, 97) * 3
    asked = [(Sampling(temperature=0.9 * (row % 3), top_p=0.8, top_k=row % 4, seed=row, logprobs=4), row) for row in range(11)]
    known, groups = Drawn(logits, asked).tell(), [Drawn(logits, asked, group=group).tell() for group in (1, 4, 8)]
    for found in groups:
        assert [(one.id, [word for word, _ in one.likeliest]) for one in found] == [(one.id, [word for word, _ in one.likeliest]) for one in known]
        assert [one.logprob for one in found] == pytest.approx([one.logprob for one in known], abs=1e-6)
    among, backwards = groups[1], Drawn(logits.flip(0), asked[::-1], group=4).tell()[::-1]
    assert among == backwards, "whatever else is in its group"


# ---------------------------------------------------------------------- steps, and what they cost


@pytest.mark.parametrize("seed", range(5))
def test_no_piece_holds_tokens_of_both_kinds_and_every_request_is_finished(seed: int) -> None:
    draw = random.Random(seed)
    running = draw.randint(1, 8)
    pages = Pages(draw.randint(8, 24), draw.choice([1, 4, 7]))
    one = Scheduler(pages, StepLimits(running=running, tokens=running + draw.randint(0, 20), invariant=True))
    made: dict[int, Sequence] = {}
    written: dict[int, Any] = {}
    for number in range(40):
        prompt, most = draw.randint(1, 30), draw.randint(1, 20)
        sequence = Sequence(number, prompt, most)
        sequence.key = lambda place, group=number % 3, number=number: (group, place) if place < 2 else (number, place)
        if prompt + most <= one.longest:
            one.add(sequence)
            made[number] = sequence
    while step := one.step():
        kinds = [row.generated for row in step]
        assert kinds == sorted(kinds, reverse=True), "those that generate come first"
        assert sum(row.count for row in step if not row.generated or row.count > 1) <= one.limits.tokens
        for row in step:
            assert row.generated or row.start + row.count <= row.sequence.prompt
            for place in range(row.start, row.start + row.count):
                written[row.sequence.pages[place // pages.size] * pages.size + place % pages.size] = row.generated
        one.done(step)
        for row in step:
            held = row.sequence.pages
            for place in range(row.sequence.computed):
                slot = held[place // pages.size] * pages.size + place % pages.size
                assert written[slot] == (place >= row.sequence.prompt), "a shared page holds a prompt's tokens alone"
            if row.sequence.generated >= row.sequence.most:
                one.end(row.sequence)
    assert all(sequence.ended and sequence.generated == sequence.most for sequence in made.values()) and pages.held == 0


@pytest.mark.parametrize("seed", range(5))
def test_parts_hold_every_token_once_and_no_more_than_they_may(seed: int) -> None:
    draw = random.Random(seed)
    sizes = FixedSizes(draw.randint(1, 9), draw.randint(1, 20), draw.randint(1, 5))
    rows = [(number % 3 == 0, draw.randint(1, 30)) for number in range(draw.randint(0, 20))]
    parts = step_parts(rows, sizes)
    told = [(number, first + at) for part in parts for number, first, count in part.pieces for at in range(count)]
    ordered = [number for kind in (True, False) for number, (generated, _) in enumerate(rows) if generated == kind]
    assert told == [(number, at) for number in ordered for at in range(rows[number][1])]
    for part in parts:
        assert 0 < sum(count for _, _, count in part.pieces) <= (sizes.generated if part.generated else sizes.prompted)
        assert part.generated or len(part.pieces) <= sizes.sequences
        assert {rows[number][0] for number, _, _ in part.pieces} == {part.generated}


def test_a_step_costs_what_its_parts_are_as_large_as() -> None:
    sizes = fixed_sizes(1024)
    assert sizes == (128, 512, 32) and fixed_sizes(100).prompted == 128
    parts = fixed_shapes(StepShape(130, 13_000, ((16, 600),), 131), sizes)
    assert [(one.tokens, one.rows) for one in parts] == [(128, 128), (128, 128), (512, 32), (512, 32)]
    assert [one.shape for one in parts] == [
        StepShape(128, 12_800, (), 128), StepShape(2, 200, (), 2), StepShape(0, 0, ((16, 512),), 1), StepShape(0, 0, ((528, 88),), 1),
    ]  # fmt: skip
    assert [one.padded.tokens for one in parts] == [128, 128, 512, 512]
    assert parts[1].padded == StepShape(128, 326, (), 128) and parts[3].padded.chunks == ((528, 512),)


def test_the_clock_asks_for_the_steps_that_the_engine_computes() -> None:
    """Of a load in which pages are lost: generated tokens that are computed anew generate."""
    shapes: list[StepShape] = []

    def seconds(shape: StepShape) -> float:
        shapes.append(shape)
        return 0.01

    limits = StepLimits(running=4, tokens=16, invariant=True)
    found = simulated(load_of("all=6, in=20, out=30"), Scheduler(Pages(24, 4), limits), seconds, 1.0)
    assert found.preemptions and len(found.answers) == 6
    assert max(shape.generating for shape in shapes) > 4 and all(start < 20 for shape in shapes for start, _ in shape.chunks)
    row = Row(Sequence(0, 5, 9, length=9, pages=[0, 1]), 5, 4)
    assert shape_of((row,), invariant=True) == StepShape(4, 6 + 7 + 8 + 9, (), 1) and shape_of((row,)).generating == 0


def test_what_cannot_be_is_refused() -> None:
    setup = Setup(
        model="gpt2", overrides={}, weights=None, tokenizer=None, device="cpu", dtype="auto", pages=8, size=8, running=2, tokens=8, share=True,
        queue=4, seed=0, tp=2, invariant=True,
    )  # fmt: skip
    with pytest.raises(UserError, match="of one rank"):
        started(setup)
    with pytest.raises(UserError, match="of one device"):
        costs(tp=2, invariant=True)


def test_it_is_predicted_with_the_rows_that_it_computes() -> None:
    plain, fixed = costs(running=64, tokens=512), costs(running=64, tokens=512, invariant=True)
    one, many, prompt = StepShape(1, 900, (), 1), StepShape(64, 64 * 900, (), 64), StepShape(0, 0, ((0, 512),), 1)
    for shape in (one, many, prompt):
        assert 0.95 * plain.seconds(shape) <= fixed.seconds(shape) == pytest.approx(fixed.whole(shape).seconds, rel=0.08)
    both = StepShape(64, 64 * 900, ((0, 512),), 65)
    assert fixed.seconds(both) == pytest.approx(fixed.seconds(many) + fixed.seconds(prompt), rel=1e-9)
    beside = [found.seconds(one) - found.stages[0].attended(one) for found in (plain, fixed)]
    assert beside[1] == pytest.approx(plain.stages[0].besides(128, 128)[0]) and beside[1] > beside[0]
    largest = [found.largest(1000) for found in (plain, fixed)]
    assert largest[1].sampler_bytes * 2 == largest[0].sampler_bytes and largest[1].verdict == "fits"
    assert fixed.about_most_pages() == pytest.approx(fixed.most_pages(), rel=0.02)


def test_the_commands_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, "--on", "H100", "--invariant"]
    assert main(["serve", *words]) == 0
    said = capsys.readouterr().out
    assert "invariant" in said.splitlines()[0] and "parts of 128 rows generate, parts of 512 rows compute prompts" in said
    plan = Plan(model={"model": "gpt2"}, hardware="H100", serve=ServeLayout(invariant=True, pages=64))
    file.write(plan, tmp_path / "plan.json")
    assert file.read(tmp_path / "plan.json").serve == plan.serve
    assert main(["plan", "show", str(tmp_path / "plan.json")]) == 0 and ", invariant, " in capsys.readouterr().out
    for words, told in (
        (["serve", "gpt2", "--invariant", "--engine", "vllm", "--on", "H100"], "foretell's own engine"),
        (["serve", "gpt2", "--invariant", "--tp", "2", "--on", "2xH100"], "of one device"), (["plan", "gpt2", "--invariant"], "--serve is not given"),
        (["plan", "gpt2", "--serve", "--invariant", "--on", "2xH100", "--tp", "2", "--load", "rate=1, in=9, out=9"], "of one device"),
    ):  # fmt: skip
        assert main(words) == 2 and told in capsys.readouterr().err


def test_a_server_says_that_it_is_so() -> None:
    sizes = {"layers": 1, "dim": 16, "heads": 2, "vocab_size": 300, "context": 64}
    setup = Setup(
        model="gpt2", overrides=sizes, weights=None, tokenizer=None, device="cpu", dtype="auto", pages=8, size=8, running=2, tokens=8, share=True,
        queue=4, seed=0, invariant=True,
    )  # fmt: skip
    server = started(setup)
    try:
        assert type(server.engine.runner) is TokenRunner and server.about()["invariant"]
        assert "the bits of an answer depend on nothing else" in server.told("127.0.0.1", 1)
    finally:
        server.server.keeper.drain()
