"""A session: rounds of a step, its code, its measurement and a judgement, until minutes, money or rounds are over.

Nothing here runs a kernel or reads a clock: a generator, an environment and a budget do, or a transcript in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from foretell.tune.generate import prompts
from foretell.tune.generate.budget import SessionBudget
from foretell.tune.generate.memory import DRAFT, REFINE, MemoryItem, TunerMemory
from foretell.tune.generate.prompts import RoundState, Variant
from foretell.tune.generate.talk import (
    CODER,
    JUDGE,
    STRATEGIST,
    BudgetSpent,
    EndpointError,
    MalformedAnswer,
    TextGenerator,
    code_in,
)
from foretell.tune.generate.transcript import MeasuredKernel, TranscriptWriter, digest_of
from foretell.tune.generate.ways import Ways
from foretell.tune.search.trial import TIMED

MOST_MALFORMED = 3
"""Answers in a row that are no kernel, after which a session ends."""
BETTER = 1.02
"""By how much a step must be faster to be kept."""


class KernelEnvironment(Protocol):
    """What measures: a gym, or a replay."""

    def measured(self, texts: Sequence[str]) -> list[MeasuredKernel]: ...


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """How a session goes."""

    task: str
    """Text of the task."""
    ops: tuple[str, ...]
    backend: str
    ways: Ways = field(default_factory=Ways)
    rounds: int = 50
    answers: int = 1
    """Kernels that are asked for in a round, measured side by side."""
    target: float = 0.0
    """Speedup at which it ends early; 0: never."""


@dataclass(frozen=True, kw_only=True)
class SessionAnswer:
    """What came of it."""

    best: Variant | None
    variants: tuple[Variant, ...]
    """All that were measured, in order."""
    tries: int
    """Kernels asked for until the best was found; all of them where none was."""
    asked: int
    kept: tuple[str, ...]
    taken_back: tuple[str, ...]
    ended: str
    """Why, in a line."""
    fault: str = ""
    """Class of the error that ended it, if one did."""
    spent: float = 0.0
    calls: int = 0
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def right(self) -> int:
        return sum(one.measured.reward > 0 for one in self.variants)

    def to_json(self) -> dict[str, Any]:
        told = {name: getattr(self, name) for name in ("tries", "asked", "ended", "fault", "spent", "calls", "seconds", "interrupted", "right")}
        rows = [{"step": one.step, **one.measured.to_json()} for one in self.variants]
        best = {"text": self.best.text, "step": self.best.step, **self.best.measured.to_json()} if self.best is not None else None
        return {**told, "best": best, "variants": rows, "kept": list(self.kept), "taken_back": list(self.taken_back)}


class KernelSession:
    """One of them."""

    def __init__(
        self, options: SessionOptions, generator: TextGenerator, environment: KernelEnvironment, budget: SessionBudget,
        memory: TunerMemory | None = None, writer: TranscriptWriter | None = None, doing: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.options, self.ways = options, options.ways
        self.generator, self.environment, self.budget = generator, environment, budget
        self.memory, self.writer, self.doing = memory, writer, doing
        self.state = RoundState(task=options.task, backend=options.backend)
        self.variants: list[Variant] = []
        self.asked = self.tries = self.malformed = 0

    def run(self) -> SessionAnswer:
        ended, fault, interrupted = f"{self.options.rounds} rounds are over", "", False
        try:
            for number in range(self.options.rounds):
                self.doing(self._word(number))
                self._round()
                best = self.state.best
                if self.options.target and best is not None and best.speedup >= self.options.target:
                    ended = f"{best.speedup:.2f}× was enough"
                    break
        except (EndpointError, MalformedAnswer, BudgetSpent) as error:
            ended, fault = str(error.problem), type(error).__name__
        except KeyboardInterrupt:
            ended, interrupted = "interrupted", True
        if self.memory is not None:
            self.memory.save()
        state = self.state
        return SessionAnswer(
            best=state.best, variants=tuple(self.variants), tries=self.tries if state.best is not None else self.asked, asked=self.asked,
            kept=state.kept, taken_back=state.taken_back, ended=ended, fault=fault, spent=self.budget.spent, calls=self.budget.calls,
            seconds=self.budget.elapsed, interrupted=interrupted,
        )  # fmt: skip

    def _word(self, number: int) -> str:
        best = self.state.best
        found = f", best {best.speedup:.2f}× eager" if best is not None else ""
        money = f", {self.budget.spent:.4f} spent" if self.budget.spent else ""
        return f"round {number + 1}: {self.asked} kernels{found}{money}"

    # --- one round ----------------------------------------------------------------------------------------------------

    def _round(self) -> None:
        state = self.state
        step = ""
        if self.ways.strategy:
            step = prompts.first_line(self.generator.complete(STRATEGIST, prompts.strategist(state)).text)
        shown = self._recalled()
        state = replace(
            state, step=step, remembered=tuple(one.text for one in shown),
            variants=prompts.shown_variants(self.variants) if self.ways.ranked else (),
        )  # fmt: skip
        texts, problem = self._coded(state)
        if not texts:
            self.state = replace(self.state, problem=problem, last=None)
            return
        found = self._measured(texts, step)
        best = max(found, key=lambda one: (one.measured.reward, one.speedup))
        self._take(best, step, shown)
        if self.ways.judge:
            advice = self.generator.complete(JUDGE, prompts.judge(self.state, best)).text
            self.state = replace(self.state, advice=" ".join(advice.split())[:1000])

    def _coded(self, state: RoundState) -> tuple[list[str], str]:
        """Kernels of this round; an answer that is none is told the next time, a few in a row end the session."""
        texts, problem = [], ""
        asked = prompts.coder(state)
        for _ in range(self.options.answers):
            self.asked += 1
            try:
                texts.append(code_in(self.generator.complete(CODER, asked).text))
                self.malformed = 0
            except MalformedAnswer as error:
                self.malformed += 1
                problem = error.problem
                if self.malformed >= MOST_MALFORMED:
                    raise MalformedAnswer(f"{self.malformed} answers in a row are no kernel: {problem}", error.remedy) from None
        return texts, problem

    def _measured(self, texts: Sequence[str], step: str) -> list[Variant]:
        """Each text once in a session: one that comes again is what it was."""
        known = {one.text: one for one in self.variants}
        new = [text for text in dict.fromkeys(texts) if text not in known]
        for text, one in zip(new, self.environment.measured(new) if new else [], strict=True):
            if self.writer is not None:
                self.writer.add({"kind": "measured", "sha256": digest_of(text), "text": text, "step": step, "found": one.to_json()})
            known[text] = Variant(text=text, measured=one, step=step)
            self.variants.append(known[text])
        return [known[text] for text in texts]

    def _take(self, one: Variant, step: str, shown: Sequence[MemoryItem]) -> None:
        """Keep what is right and faster; with a strategy everything else is taken back."""
        state, best = self.state, self.state.best
        better = one.measured.reward > 0 and one.measured.result.status == TIMED and (best is None or one.speedup > BETTER * best.speedup)
        if self.memory is not None and self.ways.memory:
            self.memory.learned(shown, one.measured.reward)
            if better:
                self.memory.keep(DRAFT if best is None else REFINE, self.options.ops, one.text, one.speedup, step)
        if better:
            self.tries = self.asked
            self.state = replace(state, best=one, last=one, problem="", kept=(*state.kept, step) if step else state.kept)
        else:
            self.state = replace(state, last=one, problem="", taken_back=(*state.taken_back, step) if step else state.taken_back)

    def _recalled(self) -> list[MemoryItem]:
        if self.memory is None or not self.ways.memory:
            return []
        return self.memory.recalled(DRAFT if self.state.best is None else REFINE, self.options.ops)


def head_of(options: SessionOptions, memory: TunerMemory | None, budget: SessionBudget) -> dict[str, Any]:
    """Of a transcript: all that a replay needs to go the same way."""
    items = [asdict(one) for one in memory.items.values()] if memory is not None else None
    return {
        "options": {**asdict(options), "ops": list(options.ops)}, "memory": items,
        "minutes": budget.minutes, "money": budget.money, "prices": asdict(budget.prices),
    }  # fmt: skip
