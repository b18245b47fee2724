"""Recorded workflows: what led to an output, and an optimizer that makes use of it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import pytest

from foretell.tune.generate.talk import ChatMessage, MalformedAnswer, TextAnswer
from foretell.tune.generate.workflow import (
    GeneratorOptimizer,
    GraphSearch,
    WorkflowRun,
    WorkflowValue,
    improved,
    recorded,
)

DRAFTS, STEPS, WARPS, CHUNKS = ("loop", "whole", "broken"), (1, 2, 3, 4), (1, 2, 4, 8), (16, 64, 256)
BEST = {"draft": "whole", "steps": 3, "warps": 4}


def tuning(run: WorkflowRun) -> WorkflowValue:
    """How a kernel is made: warps matter to one draft, the chunk to the other, and a broken one raises before either is looked at."""
    draft = run.choice("draft", DRAFTS)
    written = run.call(write, draft)
    steps = run.choice("steps", STEPS)
    if run.decide(draft) == "whole":
        return run.call(whole_seconds, written, steps, run.choice("warps", WARPS))
    return run.call(loop_seconds, written, steps, run.choice("chunk", CHUNKS))


def write(draft: str) -> str:
    if draft == "broken":
        raise ValueError("no kernel")
    return f"kernel of {draft}"


def whole_seconds(text: str, steps: int, warps: int) -> float:
    return 1.0 + 0.3 * abs(steps - 3) + 0.2 * abs(WARPS.index(warps) - 2)


def loop_seconds(text: str, steps: int, chunk: int) -> float:
    return 3.0 + 0.1 * steps + chunk / 256


def test_the_graph_says_what_led_to_the_output() -> None:
    found = recorded(tuning, {"draft": "whole", "warps": 8})
    assert found.led_to() == {"draft": "whole", "steps": 1, "warps": 8} and found.value == whole_seconds("", 1, 8)
    assert recorded(tuning, {}).led_to() == {"chunk": 16, "draft": "loop", "steps": 1}
    assert [one.name for one in found.nodes] == ["draft", "write", "steps", "warps", "whole_seconds"]


def test_an_error_goes_back_to_what_led_to_it_alone() -> None:
    found = recorded(tuning, {"draft": "broken"})
    assert found.problem == "ValueError: no kernel" and found.led_to() == {"draft": "broken"}


def test_a_run_is_the_same_again() -> None:
    """From its own graph, as JSON."""
    for draft, warps in itertools.product(DRAFTS, WARPS):
        found = recorded(tuning, {"draft": draft, "warps": warps, "unknown": 3})
        values = {one["name"]: one["value"] for one in json.loads(json.dumps(found.to_json())) if one["choices"]}
        assert recorded(tuning, values) == found


def runs_until_found(seed: int, by_graph: bool, most: int = 80) -> int:
    found = improved(tuning, float, GraphSearch(seed=seed, by_graph=by_graph), most)
    at = [place for place, (run, _) in enumerate(found.runs, 1) if run.led_to() == BEST]
    return at[0] if at else most


def test_the_planted_best_is_found_and_the_graph_saves_runs() -> None:
    """Over 20 seeds, of 144 combinations: always, and in fewer runs than where the graph is not looked at."""
    best = min(recorded(tuning, {**BEST, "steps": steps, "warps": warps}).value for steps in STEPS for warps in WARPS)
    found = improved(tuning, float, GraphSearch(), 80)
    assert found.score == best == 1.0 and found.best is not None and found.best.led_to() == BEST
    with_graph, without = ([runs_until_found(seed, by_graph) for seed in range(20)] for by_graph in (True, False))
    assert max(with_graph) < 80 and sum(with_graph) < 0.9 * sum(without), (with_graph, without)


def test_what_changes_nothing_is_not_run_again() -> None:
    found = improved(tuning, float, GraphSearch(), 200)
    led = [json.dumps(run.led_to()) for run, _ in found.runs]
    assert len(set(led)) == len(led) <= 1 + len(STEPS) * (len(WARPS) + len(CHUNKS))


class Told:
    """A model that reads the graph: it moves one value at a time towards a lower score."""

    def __init__(self, answers: Sequence[str]) -> None:
        self.answers, self.seen = list(answers), ""

    def complete(self, role: str, messages: Sequence[ChatMessage]) -> TextAnswer:
        self.seen = messages[-1].content
        return TextAnswer(text=self.answers.pop(0))


def test_a_generator_can_be_the_optimizer() -> None:
    model = Told(['Raise the steps: {"draft": "whole", "steps": 3}', json.dumps(BEST)])
    found = improved(tuning, float, GeneratorOptimizer(model), 3)
    assert [run.led_to() for run, _ in found.runs][-1] == BEST and found.score == 1.0
    shown = json.loads(model.seen)
    assert shown[-1]["score"] == whole_seconds("", 3, 1) and "warps" in shown[-1]["led_to"]
    for bad in ("none", "{", "[1]", "{]}"):
        with pytest.raises(MalformedAnswer):
            improved(tuning, float, GeneratorOptimizer(Told([bad])), 2)
