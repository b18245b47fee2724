"""A deep stack extended from shallow traces is the trace of the full depth; where it could not be, it is not extended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretell.trace.fold import deep, extend
from foretell.trace.load.model import Source, load
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.record.step import Workload
from foretell.trace.types import Trace

DEPTH = 16
MODELS: dict[str, dict[str, Any]] = {
    "gpt-tiny": {"layers": DEPTH, "dim": 64, "heads": 2},
    "llama-tiny": {"layers": DEPTH + 1, "dim": 64, "heads": 4, "kv_heads": 2, "ffn": 128},
    "bert-tiny": {"layers": DEPTH, "dim": 64, "heads": 2},
    "vit-tiny": {"depth": DEPTH + 3, "dim": 64, "heads": 2},
}
RECIPES: list[dict[str, Any]] = [
    {},
    {"precision": "fsdp-bf16"},
    {"recompute": "full"},
    {"accumulate": 2, "clip": 1.0},
    {"optimizer": "adamw"},
    {"mode": "infer"},
]


def everything(trace: Trace) -> list[str]:
    """All of a trace as text: unlike ==, it tells 1 from True and sees the order of a mapping."""
    lines = [f"{key} {program.name} {op}" for key, program in trace.programs.items() for op in program.ops]
    return [*lines, *map(str, trace.storages.items()), repr((trace.schedule, trace.resident, trace.meta))]


@pytest.fixture(autouse=True)
def from_this_depth_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep, "FEWEST", DEPTH)


def cases() -> list[Any]:
    """Inference of a GPT; a step of a smaller stack is below, and the rest is slow."""
    found = []
    slow = pytest.mark.slow(reason="another recipe or model; what is extended is the same")
    for model in MODELS:
        for recipe in RECIPES:
            marks = () if model == "gpt-tiny" and recipe == {"mode": "infer"} else slow
            found.append(pytest.param(model, recipe, id=f"{model}-{recipe}", marks=marks))
    return found


@pytest.mark.parametrize(("model", "recipe"), cases())
def test_an_extended_trace_is_the_full_one(model: str, recipe: dict[str, Any]) -> None:
    def build() -> Workload:
        return load(Source(model=model, overrides=MODELS[model]))

    assert everything(deep.extended(build, Recipe(**recipe))) == everything(capture(build, Recipe(**recipe)))


# --- models that must be traced in full ------------------------------------------------------------------------------


class Part(nn.Module):
    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, hidden), nn.Linear(hidden, 8)
        self.twice = False

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2 if self.twice else 1):
            x = x + self.down(self.up(x).relu())
        return x


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(DEPTH))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for place, part in enumerate(self.parts):
            x = self.between(place, part(x))
        return self.head(x).sum()

    def between(self, place: int, x: Tensor) -> Tensor:
        return x


class Tapped(Stack):
    def between(self, place: int, x: Tensor) -> Tensor:
        return x.sigmoid() if place in (11, 13) else x


class Ended(Stack):
    def between(self, place: int, x: Tensor) -> Tensor:
        return x.sigmoid() if place == DEPTH - 1 else x


class Counted(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for place in range(DEPTH):
            x = self.parts[place](x)
        return self.head(x).sum()


class Held(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.again = [list(self.parts)]

    def forward(self, x: Tensor) -> Tensor:
        for part in self.again[0]:
            x = part(x)
        return self.head(x).sum()


class Gathered(Stack):
    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for part in self.parts:
            x = part(x)
            seen.append(x)
        return self.head(torch.stack(seen).mean(0)).sum()


def wider() -> Stack:
    model = Stack()
    model.parts[12] = Part(32)
    return model


def other_attribute() -> Stack:
    model = Stack()
    model.parts[12].twice = True
    return model


def tied() -> Stack:
    model = Stack()
    model.parts[12].up.weight = model.parts[11].up.weight
    return model


def frozen() -> Stack:
    model = Stack()
    model.parts[12].up.weight.requires_grad_(False)
    return model


def two_stacks() -> Stack:
    model = Stack()
    model.more = nn.ModuleList(Part() for _ in range(DEPTH))
    return model


def workload(make: Callable[[], nn.Module]) -> Callable[[], Workload]:
    return lambda: Workload(make(), (torch.zeros(2, 8),))


UNLIKE = pytest.mark.slow(reason="layers that differ, and blocks that are called or kept in other ways, are there with others")
NEAR = (Ended, Held, Gathered, wider, other_attribute, two_stacks)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, marks=UNLIKE if make in NEAR else ())
        for make in (Tapped, Ended, Counted, Held, Gathered, wider, other_attribute, tied, frozen, two_stacks)
    ],
    ids=lambda make: make.__name__,
)
def test_a_stack_that_is_not_uniform_is_traced_in_full(make: Callable[[], nn.Module]) -> None:
    with pytest.raises((extend.Doubt, IndexError)):
        deep.extended(workload(make), Recipe())
    assert everything(deep.capture_deep(workload(make), Recipe())) == everything(capture(workload(make), Recipe()))


@pytest.mark.parametrize("make", [Stack], ids=lambda make: make.__name__)
def test_a_uniform_stack_of_ones_own_is_extended(make: Callable[[], nn.Module]) -> None:
    full = everything(capture(workload(make), Recipe()))
    assert everything(deep.extended(workload(make), Recipe())) == full


def test_hints_and_single_frozen_blocks_are_traced_in_full() -> None:
    with pytest.raises(extend.Doubt, match="hints"):
        deep.extended(workload(Stack), Recipe(), hints={"aten.nonzero.default": 0.5})
    with pytest.raises(extend.Doubt, match="frozen"):
        deep.extended(workload(Stack), Recipe(freeze=("parts.1",)))


def test_an_integer_that_is_not_affine_is_a_doubt() -> None:
    def stream(*numbers: int) -> list[extend.Token]:
        return [extend.Token(extend._NUMBER, "", (number,)) for number in numbers]

    fine = [stream(*range(0, 2 * depth, 2)) for depth in (7, 8, 9)]
    assert extend._extended_stream(fine, 13)[1] == list(range(0, 40, 2))
    bent = [*fine[:2], stream(0, 2, 4, 6, 9, 10, 12, 14, 16)]
    with pytest.raises(extend.Doubt, match="affine"):
        extend._extended_stream(bent, 13)
