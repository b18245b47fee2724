"""A server's step: traced once for odd counts, and of any size by rule, as a trace of that size has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from foretell import zoo
from foretell.errors import ModelError, UserError
from foretell.lower.serving import ROWS, TOKENS, resized
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.record.step import Workload
from foretell.trace.serving.programs import ATTEND, served
from foretell.trace.types import Trace
from tests.pure.test_serve_engine import COMMON, MORE, QUICK

SMALL = {"gpt2": {"layers": 2, "dim": 64, "heads": 4, "vocab_size": 300, "context": 64},
         "llama3-1b": {"layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "ffn": 96, "vocab_size": 300}}  # fmt: skip


def building(name: str, tokens: int, rows: int) -> Callable[[], Workload]:
    def build() -> Workload:
        if name in SMALL:
            entry = zoo.get(name)
            return served(Workload(zoo.load(entry).build(**{**entry.config, **SMALL[name]}), {}), tokens, rows)
        transformers = pytest.importorskip("transformers")
        kind = name.removeprefix("hf:")
        config = transformers.AutoConfig.for_model(kind, **{**COMMON, **{**QUICK, **MORE}[kind]})
        return served(Workload(transformers.AutoModelForCausalLM.from_config(config), {}), tokens, rows)

    return build


def traced(name: str, tokens: int, rows: int) -> Trace:
    return capture(building(name, tokens, rows), Recipe(mode="infer", precision="bf16"))


def told(trace: Trace) -> list[Any]:
    """All that a price or a replay reads, storages by the order in which they come."""
    order: dict[int, int] = {}

    def place(number: int) -> int:
        return order.setdefault(number, len(order))

    found: list[Any] = [trace.schedule, [(place(number), trace.storages[number][:2]) for number in trace.resident]]
    for op in trace.ops():
        refs = [[(place(ref.storage), ref.spec) for ref in side] for side in (op.inputs, op.outputs)]
        made = [(place(number), trace.storages[number].nbytes) for number in op.allocates]
        found.append((op.name, refs, op.flops, made, [place(number) for number in op.frees], op.attrs, op.module))
    return found


@pytest.mark.parametrize("name", ["gpt2", "llama3-1b", "hf:llama", "hf:gemma2", "hf:opt"])
def test_a_step_of_any_size_is_as_traced(name: str) -> None:
    odd = traced(name, TOKENS, ROWS)
    assert sum(op.name == ATTEND for op in odd.ops()) in (2, 3), "one attention for each layer"
    for tokens, rows in ((37, 12), (256, 3), (8, 8)):
        direct, by_rule = told(traced(name, tokens, rows)), told(resized(odd, tokens, rows))
        assert len(direct) == len(by_rule)
        for one, other in zip(direct, by_rule, strict=True):
            assert one == other


def test_what_cannot_be_told_apart_is_refused() -> None:
    with pytest.raises(UserError, match="samples 9"):
        served(Workload(None, {}), 8, 9)  # type: ignore[arg-type]
    entry = zoo.get("gpt2")

    def build() -> Workload:
        return served(Workload(zoo.load(entry).build(**{**entry.config, **SMALL["gpt2"], "vocab_size": 509}), {}), TOKENS, ROWS)

    with pytest.raises(ModelError, match="has a size that one of"):
        resized(capture(build, Recipe(mode="infer", precision="bf16")), 8, 8)
