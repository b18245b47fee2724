"""The engine: requests in, tokens out, one step after another, by the scheduler that also foretells it."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from foretell.errors import UserError
from foretell.serve.runner import Launched, StepRunner, TokenRunner
from foretell.serve.sampling import ChosenToken, Sampling
from foretell.simulate.serving.pages import Pages
from foretell.simulate.serving.scheduler import Scheduler, Step, StepLimits
from foretell.simulate.serving.scheduler import Sequence as Scheduled

LENGTH, STOP, CANCELLED = "length", "stop", "cancelled"
"""Why an answer ended."""


@dataclass(eq=False)
class Completion:
    """One request and its answer so far."""

    number: int
    prompt: tuple[int, ...]
    how: Sampling
    scheduled: Scheduled
    tokens: list[ChosenToken] = field(default_factory=list)
    """Of the answer."""
    ended: str = ""

    @property
    def ids(self) -> list[int]:
        return [one.id for one in self.tokens]


class TokenEvent(NamedTuple):
    """A token of a request, or its end (then there may be none)."""

    generation: Completion
    token: ChosenToken | None
    ended: str


class _Flight(NamedTuple):
    """A step that was launched."""

    step: Step
    sampling: list[Completion]
    """Who gets a token of it."""
    launched: Launched


class ServingEngine:
    """A model on one device, its pages, and who is served."""

    def __init__(
        self, model: nn.Module, *, pages: int, size: int = 16, limits: StepLimits, share: bool = True, check: bool = True,
        compiled: bool = True, graphs: bool = True, kv: str = "bf16", runner: Any = None,
    ) -> None:  # fmt: skip
        self.runner = runner or _runner(model, pages, size, limits, check, compiled, graphs, kv)
        self.scheduler = Scheduler(Pages(pages, size), limits)
        self.share = share
        self.longest = min(self.scheduler.longest, self.runner.context)
        """Tokens of a request, prompt and answer, at most."""
        self._numbers = itertools.count()
        self._under_way: dict[Scheduled, Completion] = {}
        self._under_way_step: _Flight | None = None
        self.watch: Callable[[Step], None] = lambda step: None
        """Told of every step that is launched."""

    @property
    def idle(self) -> bool:
        return not self._under_way

    def submit(self, prompt: Sequence[int], how: Sampling, salt: str = "") -> Completion:
        """A request; refused where it could never be finished. Prompts of one salt share pages of what they begin with."""
        if any(not 0 <= one < self.runner.words for one in prompt):
            raise UserError(f"a prompt has token {max(prompt, key=abs)}, and the model has {self.runner.words}", "tokens of its own vocabulary")
        if len(prompt) + how.most > self.longest:
            room = f"at most {self.longest - how.most} tokens of prompt" if how.most < self.longest else f"fewer than {self.longest} tokens of answer"
            raise UserError(f"{len(prompt)} tokens of prompt and {how.most} of answer, and there is room for {self.longest}", room)
        number = next(self._numbers)
        scheduled = Scheduled(number, len(prompt), how.most)
        made = Completion(number, tuple(prompt), how, scheduled)
        if self.share:
            scheduled.key = self._keys(made, salt)
        self.scheduler.add(scheduled)
        self._under_way[scheduled] = made
        return made

    def cancel(self, generation: Completion) -> None:
        """Nobody wants the rest; its pages are free from the next step on."""
        if self._under_way.pop(generation.scheduled, None) is not None:
            generation.ended = CANCELLED
            self.scheduler.end(generation.scheduled)

    def step(self) -> list[TokenEvent]:
        """Compute the next step; the tokens it gave. On a GPU it is launched, and the tokens are those of the one before."""
        under_way, before = self._launched(), self._under_way_step
        if self.runner.ahead:
            self._under_way_step = under_way
        else:
            before = under_way
        events = [] if before is None else self._collected(before)
        if under_way is not None:
            self._done(under_way)
        return events

    def _launched(self) -> _Flight | None:
        step = self.scheduler.step()
        if not step:
            return None
        self.watch(step)
        made = [self._under_way[row.sequence] for row in step]
        sampling = [one for one, row in zip(made, step, strict=True) if row.samples]
        asked = [(one.how, one.scheduled.generated) for one in sampling]
        newest = {} if self._under_way_step is None else {one: -1 - place for place, one in enumerate(self._under_way_step.sampling)}
        rows = [_row(one, row.start, row.count, newest.get(one)) for one, row in zip(made, step, strict=True)]
        return _Flight(step, sampling, self.runner.launch(step, rows, asked))

    def _collected(self, flight: _Flight) -> list[TokenEvent]:
        """Tokens that have come; those of sequences that had ended before are nobody's."""
        pairs = zip(flight.sampling, flight.launched.collect(), strict=True)
        return [self._taken(one, token) for one, token in pairs if not one.ended]

    def _done(self, flight: _Flight) -> None:
        """The scheduler goes on: a sequence whose last token is under way takes part no more."""
        self.scheduler.done(flight.step)
        for one in flight.sampling:
            if one.scheduled.generated >= one.how.most:
                self.scheduler.end(one.scheduled)

    def give_up(self) -> None:
        """A step has failed: what was launched is not waited for."""
        self._under_way_step = None

    def generate(self, prompts: Sequence[Sequence[int]], how: Sampling | Sequence[Sampling]) -> list[Completion]:
        """Answers to all of some prompts."""
        each = [how] * len(prompts) if isinstance(how, Sampling) else list(how)
        made = [self.submit(prompt, one) for prompt, one in zip(prompts, each, strict=True)]
        while not self.idle:
            self.step()
        return made

    def close(self) -> None:
        """The model is as it was."""
        self.runner.close()

    def _taken(self, one: Completion, token: ChosenToken) -> TokenEvent:
        if token.id in one.how.stop_tokens:
            one.ended = STOP
        else:
            one.tokens.append(token)
            if len(one.tokens) >= one.how.most:
                one.ended = LENGTH
        if one.ended:
            self._under_way.pop(one.scheduled)
            self.scheduler.end(one.scheduled)
        return TokenEvent(one, None if one.ended == STOP else token, one.ended)

    def _keys(self, one: Completion, salt: str) -> Callable[[int], bytes]:
        """Of each full page: a digest of all tokens up to its end."""
        size = self.scheduler.pages.size
        known: list[bytes] = []

        def key(place: int) -> bytes:
            while len(known) <= place:
                before = known[-1] if known else salt.encode()
                page = _row(one, len(known) * size, size)
                known.append(hashlib.sha256(before + b"," + b",".join(str(token).encode() for token in page)).digest())
            return known[place]

        return key


def _runner(
    model: nn.Module, pages: int, size: int, limits: StepLimits, check: bool, compiled: bool, graphs: bool, kv: str
) -> StepRunner:  # fmt: skip
    if next(model.parameters()).device.type != "cuda":
        return (TokenRunner if limits.invariant else StepRunner)(model, pages, size, check=check, kv=kv)
    if kv != "bf16":
        raise UserError(f"keys and values in {kv} on a GPU: foretell has no kernel for them", "16 bits, or a CPU")
    from foretell.serve.graphs import GraphRunner
    from foretell.serve.invariant import FixedRunner

    kind = FixedRunner if limits.invariant else GraphRunner
    return kind(model, pages, size, running=limits.running, tokens=limits.tokens, check=check, compiled=compiled, graphs=graphs)


def _row(one: Completion, start: int, count: int, newest: int | None = None) -> list[int]:
    """Tokens of prompt and answer; `newest` stands for one that nobody has seen yet."""
    end, prompt = start + count, len(one.prompt)
    if end <= prompt:
        return list(one.prompt[start:end])
    found = [*one.prompt[start:], *(token.id for token in one.tokens[max(0, start - prompt) : end - prompt])]
    if len(found) < count and newest is not None:
        found.append(newest)
    return found
