"""A session again, from its transcript: the same options, memory and budget, and every answer and measurement as it was."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretell.decode import value_of
from foretell.errors import FileFormatError
from foretell.tune.generate.budget import SessionBudget, TokenPrices
from foretell.tune.generate.memory import MemoryItem, TunerMemory
from foretell.tune.generate.rounds import KernelSession, SessionAnswer, SessionOptions
from foretell.tune.generate.talk import ChatMessage, MalformedAnswer, TextAnswer
from foretell.tune.generate.transcript import TranscriptReplay


class _Budgeted:
    """A replay whose answers are paid for again."""

    def __init__(self, replay: TranscriptReplay, budget: SessionBudget) -> None:
        self.replay, self.budget = replay, budget

    def complete(self, role: str, messages: list[ChatMessage]) -> TextAnswer:
        try:
            found = self.replay.complete(role, messages)
        except MalformedAnswer:
            self.budget.lose(messages)
            raise
        self.budget.take(found)
        return found


def replayed(path: Path) -> tuple[SessionAnswer, SessionOptions]:
    """What the session found, and how it was asked for."""
    replay = TranscriptReplay(path)
    options, memory, budget = _head(replay.head, path, replay)
    found = KernelSession(options, _Budgeted(replay, budget), replay, budget, memory).run()  # type: ignore[arg-type]
    return found, options


def _head(head: Mapping[str, Any], path: Path, replay: TranscriptReplay) -> tuple[SessionOptions, TunerMemory | None, SessionBudget]:
    try:
        options: SessionOptions = value_of(SessionOptions, head["options"], "options")
        memory = None
        if head["memory"] is not None:
            memory = TunerMemory(options.backend)
            for row in head["memory"]:
                item: MemoryItem = value_of(MemoryItem, row, "memory")
                memory.items[item.key] = item
        prices: TokenPrices = value_of(TokenPrices, head["prices"], "prices")
        money = None if head["money"] is None else float(value_of(float, head["money"], "money"))
        budget = SessionBudget(float(value_of(float, head["minutes"], "minutes")), money, prices, clock=replay.clock)
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError(f"{path}, line 1: {error}", "another transcript") from None
    return options, memory, budget
