"""A workflow that is recorded as it runs, so that an optimizer sees which of its choices led to what came out.

    def workflow(run):                                 run.choice      a trainable value; its choices, or free text
        warps = run.choice("warps", (1, 2, 4))         run.call        a function of values: a node, with those it read
        return run.call(seconds, warps)                feedback        goes back from the output to the choices it follows from

A choice that did not lead to the output, as in a branch that was not taken, is not changed for it, and what was run with the same
values of those that did is not run again. A node that raises sends its error to the choices that led to it, and to no other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from foretell.decode import json_of
from foretell.tune.generate.talk import ChatMessage, MalformedAnswer, TextGenerator
from foretell.tune.search.evolve import Evolution
from foretell.tune.search.space import Axis, Choice, Config, ConfigSpace

OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class WorkflowNode:
    """A value of a run: a choice or a call."""

    name: str
    inputs: tuple[int, ...]
    value: Any
    choices: tuple[Choice, ...] = ()
    """Of a choice; empty for a call."""
    problem: str = ""

    @property
    def trainable(self) -> bool:
        return bool(self.choices)


@dataclass(frozen=True)
class WorkflowValue:
    """What a workflow hands around: a value and the node that it is of."""

    place: int
    value: Any


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A graph: nodes in the order in which they came."""

    nodes: tuple[WorkflowNode, ...]
    output: int
    """Place of the output, or of the node that raised."""
    problem: str = ""

    @property
    def value(self) -> Any:
        return self.nodes[self.output].value

    def led_to(self, place: int | None = None) -> dict[str, Any]:
        """Choices that a node follows from, with their values."""
        left, found = [self.output if place is None else place], {}
        seen: set[int] = set()
        while left:
            at = left.pop()
            if at not in seen:
                seen.add(at)
                node = self.nodes[at]
                left += node.inputs
                if node.trainable:
                    found[node.name] = node.value
        return dict(sorted(found.items()))

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {"name": one.name, "inputs": list(one.inputs), "value": one.value if isinstance(one.value, int | float | str | bool) else repr(one.value),
             "choices": list(one.choices), "problem": one.problem}
            for one in self.nodes
        ]  # fmt: skip


class _Raised(Exception):
    def __init__(self, place: int) -> None:
        self.place = place


@dataclass
class WorkflowRun:
    """What a workflow is given."""

    values: Mapping[str, Any]
    nodes: list[WorkflowNode] = field(default_factory=list)
    under: list[int] = field(default_factory=list)
    """Choices that decide which branch is taken: all that follows depends on them."""

    def choice(self, name: str, choices: Sequence[Choice]) -> WorkflowValue:
        value = self.values.get(name, choices[0])
        return self._node(WorkflowNode(name, tuple(self.under), value if value in choices else choices[0], tuple(choices)))

    def call(self, function: Callable[..., Any], *given: Any, name: str = "") -> WorkflowValue:
        """The function of the values; what is no value of this run is a constant."""
        inputs = tuple(one.place for one in given if isinstance(one, WorkflowValue)) + tuple(self.under)
        called = name or getattr(function, "__name__", "call")
        try:
            value = function(*(one.value if isinstance(one, WorkflowValue) else one for one in given))
        except Exception as error:
            found = self._node(WorkflowNode(called, inputs, None, problem=f"{type(error).__name__}: {error}"))
            raise _Raised(found.place) from None
        return self._node(WorkflowNode(called, inputs, value))

    def decide(self, one: WorkflowValue) -> Any:
        """The value, to branch on."""
        self.under.append(one.place)
        return one.value

    def _node(self, node: WorkflowNode) -> WorkflowValue:
        self.nodes.append(node)
        return WorkflowValue(len(self.nodes) - 1, node.value)


Workflow = Callable[[WorkflowRun], WorkflowValue]


def recorded(workflow: Workflow, values: Mapping[str, Any]) -> RecordedRun:
    """One run."""
    run = WorkflowRun(dict(values))
    try:
        out = workflow(run)
    except _Raised as raised:
        return RecordedRun(nodes=tuple(run.nodes), output=raised.place, problem=run.nodes[raised.place].problem)
    return RecordedRun(nodes=tuple(run.nodes), output=out.place)


@dataclass(frozen=True, kw_only=True)
class WorkflowFeedback:
    """What an optimizer is told of a run."""

    led_to: Mapping[str, Any]
    score: float | None
    """Lower is better; None: it raised."""
    text: str = ""


class WorkflowOptimizer(Protocol):
    """Proposes values; told of every run."""

    def propose(self) -> Mapping[str, Any] | None:
        """None: it has nothing more to try."""

    def told(self, run: RecordedRun, feedback: WorkflowFeedback) -> None: ...


class GraphSearch:
    """The built-in optimizer: evolution over the choices that led to what came out; values that change nothing of that are not run."""

    def __init__(self, *, seed: int = 0, by_graph: bool = True) -> None:
        self.seed, self.by_graph = seed, by_graph
        self._evolution: Evolution | None = None
        self._waiting: list[Config] = []
        self._runs: list[tuple[Mapping[str, Any], float | None]] = []
        self._axes: dict[str, tuple[Choice, ...]] = {}

    def propose(self) -> Mapping[str, Any] | None:
        if self._evolution is None:
            return {}
        while True:
            if not self._waiting:
                self._waiting = self._evolution.ask()
            if not self._waiting:
                return None
            config = self._waiting.pop(0)
            known = self._known(config)
            if known is None:
                return config
            self._evolution.tell(config, known[0])

    def told(self, run: RecordedRun, feedback: WorkflowFeedback) -> None:
        self._runs.append((dict(feedback.led_to), feedback.score))
        new = {one.name: one.choices for one in run.nodes if one.trainable and one.name not in self._axes}
        if new:
            self._axes |= new
            space = ConfigSpace(tuple(Axis(name, choices, choices[0]) for name, choices in self._axes.items()))
            before = self._evolution
            self._evolution, self._waiting = Evolution(space, seed=self.seed), []
            for score, config in before.ranked if before is not None else []:
                self._evolution.tell({**space.first, **config}, score)
        if self._evolution is not None:
            values = {one.name: one.value for one in run.nodes if one.trainable}
            self._evolution.tell({**self._evolution.space.first, **values}, feedback.score)

    def _known(self, config: Config) -> tuple[float | None] | None:
        """What came of another run whose output followed from the same values."""
        if not self.by_graph:
            return None
        return next(((score,) for led, score in self._runs if all(config.get(name) == value for name, value in led.items())), None)


class GeneratorOptimizer:
    """A language model as the optimizer: it sees the last graphs with their scores, and answers with values as JSON."""

    def __init__(self, generator: TextGenerator, *, shown: int = 3) -> None:
        self.generator, self.shown = generator, shown
        self._history: list[tuple[RecordedRun, WorkflowFeedback]] = []

    def propose(self) -> Mapping[str, Any] | None:
        if not self._history:
            return {}
        rows = [{"graph": run.to_json(), "score": feedback.score, "said": feedback.text, "led_to": dict(feedback.led_to)}
                for run, feedback in self._history[-self.shown :]]  # fmt: skip
        asked = [ChatMessage("system", "Choose values that make the score of this workflow lower. Answer with one JSON object: name to value."),
                 ChatMessage("user", json.dumps(rows))]  # fmt: skip
        text = self.generator.complete(OPTIMIZER, asked).text
        try:
            found = json_of(text[text.index("{") : text.rindex("}") + 1])
        except ValueError:
            raise MalformedAnswer("the optimizer's answer has no JSON object", "another model") from None
        if not isinstance(found, dict):
            raise MalformedAnswer("the optimizer's answer is no JSON object", "another model")
        return found

    def told(self, run: RecordedRun, feedback: WorkflowFeedback) -> None:
        self._history.append((run, feedback))


@dataclass(frozen=True, kw_only=True)
class ImprovedWorkflow:
    """The best run, and all of them."""

    best: RecordedRun | None
    score: float
    runs: tuple[tuple[RecordedRun, WorkflowFeedback], ...]


def improved(workflow: Workflow, scored: Callable[[Any], float], optimizer: WorkflowOptimizer, runs: int) -> ImprovedWorkflow:
    """As many runs at most; `scored` is of what the workflow gives, lower is better."""
    found: list[tuple[RecordedRun, WorkflowFeedback]] = []
    best, least = None, math.inf
    for _ in range(runs):
        values = optimizer.propose()
        if values is None:
            break
        run = recorded(workflow, values)
        score = None if run.problem else float(scored(run.value))
        feedback = WorkflowFeedback(led_to=run.led_to(), score=score, text=run.problem or f"score {score:g}")
        optimizer.told(run, feedback)
        found.append((run, feedback))
        if score is not None and score < least:
            best, least = run, score
    return ImprovedWorkflow(best=best, score=least, runs=tuple(found))
