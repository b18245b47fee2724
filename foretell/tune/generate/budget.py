"""Minutes and money of a session. A question is asked only where its highest price is still there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foretell.tune.generate.talk import BudgetSpent, ChatMessage, TextAnswer

ANSWER_TOKENS = 8192
"""That an answer may have at most."""
_PER = 1e6


@dataclass(frozen=True, kw_only=True)
class TokenPrices:
    """Of a million tokens, in whatever money the budget is."""

    per_million_in: float = 0.0
    per_million_out: float = 0.0

    def of(self, tokens_in: int, tokens_out: int) -> float:
        return (tokens_in * self.per_million_in + tokens_out * self.per_million_out) / _PER


@dataclass
class SessionBudget:
    """What is left."""

    minutes: float
    money: float | None = None
    """None: not limited."""
    prices: TokenPrices = field(default_factory=TokenPrices)
    clock: Callable[[], float] = time.monotonic
    spent: float = 0.0
    calls: int = 0

    def __post_init__(self) -> None:
        self._begun = self.clock()

    @property
    def elapsed(self) -> float:
        """Seconds."""
        return self.clock() - self._begun

    def check(self, messages: Sequence[ChatMessage]) -> None:
        """Raise `BudgetSpent` where time is over, or where a question could cost more than is left; a token has at least a byte."""
        if self.elapsed >= 60 * self.minutes:
            raise BudgetSpent(f"{self.minutes:g} minutes are over", "--minutes")
        if self.money is not None:
            most = self.highest(messages)
            if self.spent + most > self.money:
                raise BudgetSpent(f"{self.spent:.4f} of {self.money:g} are spent, and the next question could cost {most:.4f}", "--money")

    def highest(self, messages: Sequence[ChatMessage]) -> float:
        """That an answer could cost."""
        return self.prices.of(sum(len(one.content.encode()) for one in messages), ANSWER_TOKENS)

    def lose(self, messages: Sequence[ChatMessage]) -> None:
        """An answer that nobody could read was paid for all the same, and what it cost is not known."""
        self.spent += self.highest(messages)
        self.calls += 1

    def take(self, found: TextAnswer) -> None:
        self.spent += found.money
        self.calls += 1
