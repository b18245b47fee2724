"""What a generator is told. Pure: the same state, the same words, so that a transcript replays."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretell.tune.generate.talk import ChatMessage
from foretell.tune.generate.transcript import MeasuredKernel
from foretell.tune.search.trial import PRUNED, REFUSED, TIMED

MOST_SHOWN = 3
_RULES = """You write a faster kernel for a PyTorch module. Answer with one Python file in one ```python block.
The file has a class ModelNew(nn.Module) with the constructor, the parameters and the forward of Model.
It is run in a process of its own and verified: forward and gradients against fp64 with an error of at most twice eager's, on other sizes,
formats, strides and magnitudes, with inputs changed in place, and on calls nobody announces. Raise NotImplementedError for sizes or formats
that you do not do. It must not call the module it replaces, catch its own failures, keep results, open files or start threads.
It is timed beside the reference, forward and backward."""
_STRATEGIST = """You decide how a PyTorch module is made faster, one step at a time. Answer with one step in one line: what to change and how.
Each step is written, verified and timed by itself, and taken back where it is wrong or slower. Do not repeat a step that was taken back."""
_JUDGE = """You judge a kernel by its counters. Say in at most three lines what holds it back and the one change that would help most."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A kernel that was measured."""

    text: str
    measured: MeasuredKernel
    step: str = ""

    @property
    def speedup(self) -> float:
        return self.measured.result.speedup if self.measured.result.status == TIMED else 0.0


@dataclass(frozen=True, kw_only=True)
class RoundState:
    """What is known when a round begins."""

    task: str
    backend: str
    best: Variant | None = None
    last: Variant | None = None
    problem: str = ""
    """Why the last answer was no kernel."""
    variants: tuple[Variant, ...] = ()
    """To be shown, the best first."""
    remembered: tuple[str, ...] = ()
    step: str = ""
    kept: tuple[str, ...] = ()
    taken_back: tuple[str, ...] = ()
    advice: str = ""


def coder(state: RoundState) -> list[ChatMessage]:
    parts = [f"It runs on {state.backend}.", _block("The module", state.task)]
    parts += [_block("What worked for other modules here", one) for one in state.remembered]
    if state.variants:
        shown = "\n\n".join(f"# {_word(one)}\n{one.text}" for one in state.variants[:MOST_SHOWN])
        parts.append(_block("Earlier kernels, the fastest first; combine what made the fast ones fast", shown))
    elif state.best is not None:
        parts.append(_block(f"The best kernel so far: {_word(state.best)}", state.best.text))
    if state.problem:
        parts.append(f"Your last answer was no kernel: {state.problem}")
    elif state.last is not None and (state.best is None or state.last.text != state.best.text):
        parts.append(f"Your last kernel: {_word(state.last)}")
    if state.advice:
        parts.append(f"A judge says: {state.advice}")
    if state.step:
        parts.append(f"Make this one change and no other: {state.step}")
    return [ChatMessage("system", _RULES), ChatMessage("user", "\n\n".join(parts))]


def strategist(state: RoundState) -> list[ChatMessage]:
    parts = [f"It runs on {state.backend}.", _block("The module", state.task)]
    if state.best is not None:
        parts.append(_block(f"The best kernel so far: {_word(state.best)}", state.best.text))
    if state.kept:
        parts.append("Steps that helped: " + "; ".join(state.kept))
    if state.taken_back:
        parts.append("Steps that were taken back: " + "; ".join(state.taken_back))
    if state.advice:
        parts.append(f"A judge says: {state.advice}")
    return [ChatMessage("system", _STRATEGIST), ChatMessage("user", "\n\n".join(parts))]


def judge(state: RoundState, variant: Variant) -> list[ChatMessage]:
    parts = [f"It runs on {state.backend}.", _block("The module", state.task), _block(f"The kernel: {_word(variant)}", variant.text)]
    parts.append("Counters: " + counters_text(variant.measured.counters))
    return [ChatMessage("system", _JUDGE), ChatMessage("user", "\n\n".join(parts))]


def counters_text(counters: Mapping[str, Any]) -> str:
    return json.dumps(dict(counters), sort_keys=True)


def _word(variant: Variant) -> str:
    """What became of it."""
    found = variant.measured.result
    if found.status == TIMED:
        zero = ", and scores 0: it runs the reference's own ops" if not variant.measured.reward else ""
        return f"{found.speedup:.3f} times the reference's speed{zero}"
    if found.status in (REFUSED, PRUNED):
        where = f"{found.stage}, {found.check}: " if found.stage else ""
        return f"refused by {where}{found.reason}" if where else f"not tried: {found.reason}"
    return f"it failed: {found.reason}"


def _block(title: str, text: str) -> str:
    return f"{title}:\n```python\n{text.strip()}\n```"


def first_line(text: str) -> str:
    """A step, whatever stands around it."""
    lines = [line.strip(" -*#`") for line in text.splitlines()]
    return next((line for line in lines if line), "")[:300]


def shown_variants(variants: Sequence[Variant]) -> tuple[Variant, ...]:
    """Those that were right, the fastest first, each text once."""
    found: dict[str, Variant] = {}
    for one in variants:
        if one.measured.reward > 0 and (one.text not in found or found[one.text].speedup < one.speedup):
            found[one.text] = one
    return tuple(sorted(found.values(), key=lambda one: -one.speedup))[:MOST_SHOWN]
