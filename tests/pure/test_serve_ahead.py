"""The next step is launched before the tokens of the last are known, as on a GPU: the same tokens, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Sequence as Sequenced
from typing import Any

import numpy as np
import pytest
import torch

from foretell.serve import siblings
from foretell.serve.engine import CANCELLED, STOP, ServingEngine, StepLimits
from foretell.serve.graphs import StepLayout
from foretell.serve.runner import StepRunner
from foretell.serve.sampling import ChosenToken, Sampling, choose
from foretell.simulate.serving.scheduler import Row, Sequence, Step
from foretell.trace.serving.packed import How, Packed, layers_of
from tests.pure.test_serve_engine import alone, built, prompts, released

__all__ = ["released"]
pytestmark = pytest.mark.usefixtures("one_thread")


class Later:
    """A step whose tokens were computed, and are told once they are asked for."""

    def __init__(self, runner: LateRunner, tokens: list[ChosenToken]) -> None:
        self.runner, self.tokens = runner, tokens
        runner.open += 1

    def collect(self) -> list[ChosenToken]:
        self.runner.open -= 1
        return self.tokens


class LateRunner(StepRunner):
    """As a GPU's: the host gives a token that it has not seen as the place among those chosen before."""

    ahead = True
    open = unseen = 0
    latest: tuple[int, ...] = ()

    def launch(self, step: Step, tokens: Sequenced[Sequenced[int]], asked: Sequenced[tuple[Sampling, int]]) -> Later:
        assert self.open <= 1, "one step ahead, not two"
        self.unseen += sum(one < 0 for row in tokens for one in row)
        known = [[self.latest[-1 - one] if one < 0 else one for one in row] for row in tokens]
        logits = self.logits(step, known)
        found = choose(logits, asked) if asked else []
        if found:
            self.latest = tuple(one.id for one in found)
        return Later(self, found)


def engine_ahead(name: str = "llama", *, pages: int = 24, running: int = 5, tokens: int = 32, check: bool = False) -> ServingEngine:
    engine = ServingEngine(built(name), pages=pages, size=8, limits=StepLimits(running=running, tokens=tokens), check=check)
    engine.runner = LateRunner(built(name), pages, 8, check=check)
    return engine


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.slow(reason="without windows; drawn tokens below")), "gemma2"])
def test_tokens_are_those_of_generate(name: str) -> None:
    asked = prompts(10)
    engine = engine_ahead(name)
    answers = engine.generate(asked, Sampling(most=20))
    engine.close()
    assert isinstance(engine.runner, LateRunner) and engine.runner.unseen > 100
    assert engine.scheduler.preemptions and sum(one.scheduled.shared for one in answers), "pages were lost, and shared"
    assert [one.ids for one in answers] == [alone(built(name), prompt, 20) for prompt in asked]
    assert engine.scheduler.pages.held == 0


def test_drawn_tokens_are_those_of_a_step_at_a_time() -> None:
    asked = prompts(8, seed=4)
    how = [Sampling(most=15, temperature=1.5, top_k=20, seed=number, logprobs=2) for number in range(8)]
    known = ServingEngine(built("llama"), pages=24, size=8, limits=StepLimits(running=5, tokens=32)).generate(asked, how)
    assert [one.ids for one in engine_ahead().generate(asked, how)] == [one.ids for one in known]


def test_an_end_that_is_seen_a_step_late_is_no_token_more() -> None:
    """A stop token, and a client that goes away while its token is under way."""
    prompt = prompts(1)[0]
    whole = alone(built("llama"), prompt, 12)
    engine = engine_ahead(pages=100)
    stop = next(place for place in range(1, 12) if whole[place] not in whole[:place])
    (answer,) = engine.generate([prompt], Sampling(most=12, stop_tokens=(whole[stop],)))
    assert answer.ended == STOP and answer.ids == whole[:stop]
    one, other = (engine.submit(prompt, Sampling(most=12)) for _ in range(2))
    engine.step()
    engine.step()
    engine.cancel(one)
    while not engine.idle:
        engine.step()
    assert one.ended == CANCELLED and len(one.ids) < 3 and other.ids == whole and engine.scheduler.pages.held == 0


def test_pages_that_a_later_step_took_hold_no_token_of_an_ended_one() -> None:
    """Few pages, and stops everywhere: what was written late is never read."""
    asked = prompts(30, seed=9)
    wholes = [alone(built("llama"), prompt, 12) for prompt in asked]
    how = [Sampling(most=12, stop_tokens=(whole[place % 7 + 1],)) for place, whole in enumerate(wholes)]
    engine = engine_ahead(pages=16, running=4)
    for answer, whole, one in zip(engine.generate(asked, how), wholes, how, strict=True):
        assert answer.ids == whole[: whole.index(one.stop_tokens[0])]
    assert engine.scheduler.pages.held == 0


def test_a_step_is_written_as_kernels_read_it() -> None:
    """Two that generate, a piece of a prompt of 300 tokens in three tiles, and room that is nobody's."""
    rows = [
        Row(Sequence(0, 9, 5, length=11, pages=[4, 2]), 10, 1), Row(Sequence(1, 3, 5, length=3, pages=[7]), 2, 1),
        Row(Sequence(2, 400, 5, length=400, pages=list(range(10, 61))), 20, 300),
    ]  # fmt: skip
    layout = StepLayout(tokens=310, rows=4, kept=4, tiles=7, wide=60)
    numbers = np.full(layout.size, 99, np.int32)
    layout.fill(numbers, tuple(rows), [[-1], [5], list(range(300))], page=8, tall=128)
    tokens, places, slots, keep, lengths, tiles, table = layout.of(numbers)
    assert tokens[:2].tolist() == [-1, 5] and tokens[2:302].tolist() == list(range(300))
    assert places[:2].tolist() == [10, 2] and places[2:302].tolist() == list(range(20, 320))
    assert slots[:2].tolist() == [2 * 8 + 2, 7 * 8 + 2]
    assert slots[2:302].tolist() == [(10 + place // 8) * 8 + place % 8 for place in range(20, 320)] and set(slots[302:]) == {-1}
    assert keep.tolist() == [0, 1, 0, 0] and lengths.tolist() == [11, 3, 0, 0]
    assert tiles.tolist() == [[2, 2, 20, 128], [2, 130, 148, 128], [2, 258, 276, 44], *[[0, 0, 0, 0]] * 4]
    assert table[2, :51].tolist() == list(range(10, 61)) and len(numbers) == layout.size


def test_siblings_are_one_product_and_a_model_is_left_as_it_was() -> None:
    """Queries, keys and values; gate and up: in what Dynamo has traced, with one code for all layers."""
    model = built("qwen3")
    packed, tokens = Packed(model), torch.arange(7)
    known = {name: one.clone() for name, one in model.state_dict().items()}

    def attend(how: How, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return query * 0.5 + (key.sum() + value.sum()) * 0.01

    before = packed(tokens, tokens, tokens[3:], attend)
    moved = siblings.lay_together(model.model.layers, lambda: layers_of(packed, "cpu"))
    assert len(moved) == 5 * len(model.model.layers) and len({one.untyped_storage().data_ptr() for one in moved}) == 2 * len(model.model.layers)
    codes = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        codes.append(str(siblings.joined(graph).graph))
        return graph

    for layer in model.model.layers:
        layer.compile(dynamic=True, backend=backend, fullgraph=True)
    after = packed(tokens, tokens, tokens[3:], attend)
    for layer in model.model.layers:
        layer._compiled_call_impl = None
    torch._dynamo.reset()
    assert len(codes) == 1 and codes[0].count("foretell_siblings.linear") == 2
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    siblings.apart(moved)
    assert len({one.untyped_storage().data_ptr() for one in moved}) == len(moved)
    assert all(torch.equal(known[name], one) for name, one in model.state_dict().items())
