"""Which tokens of which sequences the next step computes: continuous batching with chunked prefill.

    1. every running sequence that only lacks its newest token computes that one
    2. prompts under way go on, in chunks, within what is left of the step's tokens
    3. waiting sequences start in the order they came, where pages for all of their tokens are free

A running sequence that needs a page when none is free takes those of the youngest: that one waits again, first in line, and
is computed anew later. So the oldest always gets on, and a step never computes more tokens than planned for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from foretell.errors import UserError
from foretell.simulate.serving.pages import Pages


@dataclass(eq=False, slots=True)
class Sequence:
    """One request under way: its prompt, what is generated, what is computed of both."""

    number: int
    prompt: int
    """Tokens."""
    most: int
    """Tokens to generate at most."""
    key: Callable[[int], Hashable] | None = None
    """Of all tokens up to the end of its page at a place; None: it shares no pages."""
    length: int = 0
    """Tokens so far: of the prompt and generated."""
    computed: int = 0
    """Tokens whose keys and values are in pages."""
    pages: list[int] = field(default_factory=list)
    named: int = 0
    """Full pages that others can find."""
    shared: int = 0
    """Tokens of the prompt that were found computed."""
    preempted: int = 0
    """Times that its pages were taken."""
    ended: bool = False

    def __post_init__(self) -> None:
        self.length = self.length or self.prompt

    @property
    def generated(self) -> int:
        return self.length - self.prompt

    def generates(self, invariant: bool) -> bool:
        """It lacks its newest token alone; which is of an answer, where these are computed apart."""
        return self.length - self.computed == 1 and (not invariant or self.computed >= self.prompt)

    def piece(self, left: int, invariant: bool) -> Row:
        """What it computes next of what it lacks; of one kind of tokens alone, where these are computed apart."""
        end = self.prompt if invariant and self.computed < self.prompt else self.length
        return Row(self, self.computed, min(end - self.computed, left))


class Row(NamedTuple):
    """Tokens of one sequence in a step."""

    sequence: Sequence
    start: int
    """The first of them."""
    count: int  # type: ignore[assignment]  # and not how often something is in the row

    @property
    def samples(self) -> bool:
        """It gives the sequence's next token: nothing is left to compute before that."""
        return self.start + self.count == self.sequence.length

    @property
    def generated(self) -> bool:
        """Tokens of the answer, not of the prompt."""
        return self.start >= self.sequence.prompt


Step = tuple[Row, ...]


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """What one step may hold."""

    running: int
    """Sequences."""
    tokens: int
    """Of prompts and of sequences that generate, together."""
    prompts_first: bool = False
    """As engines do that have no chunks: where prompts can start, a step computes whole ones alone, and others wait."""
    reserves: bool = False
    """A sequence starts where pages for all of its answer are left too: none is ever preempted."""

    ahead: bool = False
    """A step is decided while the one before is computed: who comes meanwhile waits for the one after. A clock looks at it."""

    invariant: bool = False
    """A token of a prompt is always computed as one of a prompt, a generated one as generated, also where pages were lost: `tokens` are
    those of prompts beside the ones that generate, pieces end where a prompt does, and only pages of prompts are shared."""

    def __post_init__(self) -> None:
        if self.running < 1 or self.tokens < self.running:
            raise UserError(
                f"a step of {self.tokens} tokens for {self.running} running sequences",
                "at least one running sequence, and as many tokens a step as there are sequences",
            )


class Scheduler:
    """The requests of one engine; `step`, compute it, `done`, and again."""

    def __init__(self, pages: Pages, limits: StepLimits) -> None:
        self.pages, self.limits = pages, limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """The oldest first."""
        self.preemptions = 0
        self._reserved = 0
        """Pages that running sequences take until they are finished."""

    @property
    def longest(self) -> int:
        """Tokens of a request, prompt and answer, that can be served at all."""
        return self.pages.count * self.pages.size

    def add(self, sequence: Sequence) -> None:
        """Let a request wait; one that could never be finished is refused."""
        if sequence.prompt < 1 or sequence.most < 1:
            raise UserError(f"a request of {sequence.prompt} tokens for {sequence.most} more", "at least one of each")
        if sequence.prompt + sequence.most > self.longest:
            raise UserError(
                f"a request of {sequence.prompt} tokens for {sequence.most} more: all pages hold {self.longest} tokens",
                f"at most {self.longest - sequence.most} tokens of prompt, or ask for at most {max(0, self.longest - sequence.prompt)}",
            )
        self.waiting.append(sequence)

    # ------------------------------------------------------------------ a step

    def step(self) -> Step:
        """What is computed next; empty: there is nothing to do."""
        if self.limits.prompts_first and (prompts := self._prompts()):
            return prompts
        rows: list[Row] = []
        left, invariant = self.limits.tokens, self.limits.invariant
        for sequence in list(self.running):
            if sequence.generates(invariant) and sequence.pages and self._grown(sequence):
                rows.append(Row(sequence, sequence.computed, 1))
                left -= 0 if invariant else 1
        for sequence in self.running:
            if left and not sequence.generates(invariant):
                rows.append(sequence.piece(left, invariant))
                left -= rows[-1].count
        while self.waiting and left and len(self.running) < self.limits.running and self._starts(self.waiting[0]):
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            rows.append(sequence.piece(left, invariant))
            left -= rows[-1].count
        return tuple(sorted(rows, key=lambda row: not row.generated) if invariant else rows)

    def _prompts(self) -> Step:
        """Whole prompts in the order they came, as many as fit a step; the first goes however long it is."""
        rows: list[Row] = []
        left = self.limits.tokens
        while self.waiting and len(self.running) < self.limits.running and (not rows or self.waiting[0].length <= left):
            if not self._starts(self.waiting[0]):
                break
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            rows.append(Row(sequence, sequence.computed, sequence.length - sequence.computed))
            left -= rows[-1].count
        return tuple(rows)

    def done(self, step: Iterable[Row]) -> None:
        """A step was computed; sequences in it that sample have one more token, which the caller may find to be the last."""
        for sequence, start, count in step:
            if sequence.ended:  # cancelled meanwhile
                continue
            samples = start + count == sequence.length
            sequence.computed += count
            if sequence.key is not None:
                self._name(sequence)
            if samples:
                sequence.length += 1

    def end(self, sequence: Sequence) -> None:
        """A sequence is finished, or nobody wants it any more; its pages are free at once."""
        if sequence.ended:
            return
        sequence.ended = True
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
        self._release(sequence)

    # ------------------------------------------------------------------ pages

    def _starts(self, sequence: Sequence) -> bool:
        """Give a waiting sequence the pages for all its tokens and the next; False where there are too few."""
        keys = []
        if sequence.key is not None:  # the last token is always computed: the next comes of it
            keys = [sequence.key(place) for place in range(min(sequence.length - 1, self._sharable(sequence)) // self.pages.size)]
        found = self.pages.shared(keys)
        more = self.pages.needed(sequence.length) - len(found)
        whole = self.pages.needed(sequence.prompt + sequence.most)
        if more > self.pages.available or (self.limits.reserves and self._reserved + whole > self.pages.count):
            self.pages.give_back(found)
            return False
        sequence.pages = [*found, *self.pages.take(more)]
        self._reserved += whole
        sequence.computed = len(found) * self.pages.size
        sequence.named = len(found)
        if not sequence.preempted:
            sequence.shared = sequence.computed
        return True

    def _grown(self, sequence: Sequence) -> bool:
        """Room for one more token, at the cost of the youngest; False where it was itself that had to go."""
        while len(sequence.pages) * self.pages.size <= sequence.computed:
            if self.pages.available:
                sequence.pages += self.pages.take(1)
            elif self._preempt(self.running[-1]) is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> Sequence:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.computed = sequence.named = 0
        sequence.preempted += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)
        return sequence

    def _release(self, sequence: Sequence) -> None:
        if sequence.pages:
            self._reserved -= self.pages.needed(sequence.prompt + sequence.most)
        self.pages.give_back(sequence.pages)
        sequence.pages = []

    def _name(self, sequence: Sequence) -> None:
        assert sequence.key is not None
        while (sequence.named + 1) * self.pages.size <= min(sequence.computed, self._sharable(sequence)):
            self.pages.name(sequence.pages[sequence.named], sequence.key(sequence.named))
            sequence.named += 1

    def _sharable(self, sequence: Sequence) -> int:
        """Tokens whose pages others may find: a generated token's are not what they would be in a prompt, bit for bit."""
        return sequence.prompt if self.limits.invariant else sequence.length
