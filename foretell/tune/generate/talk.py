"""What is asked of a generator and what it answers, and how it may fail."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from foretell.errors import UserError
from foretell.tune.verify.source import CANDIDATE, defined

CODER, JUDGE, STRATEGIST = "coder", "judge", "strategist"
_BLOCK = re.compile(r"```[ \t]*(?:python|py)?[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)
MOST_CODE = 1 << 18


@dataclass(frozen=True)
class ChatMessage:
    """One message of a prompt."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True)
class TextAnswer:
    """An answer, and what it took."""

    text: str
    tokens_in: int = 0
    tokens_out: int = 0
    seconds: float = 0.0
    money: float = 0.0


class TextGenerator(Protocol):
    """Whatever completes a prompt; raises `EndpointError`, `MalformedAnswer` or `BudgetSpent`."""

    def complete(self, role: str, messages: Sequence[ChatMessage]) -> TextAnswer: ...


class EndpointError(UserError):
    """A generator that cannot be reached, or does not answer."""


class MalformedAnswer(UserError):
    """An answer that is none."""


class BudgetSpent(UserError):
    """No minutes or no money left."""


def code_in(text: str) -> str:
    """The candidate of an answer: its last block of Python with the class; raises `MalformedAnswer`."""
    blocks = _BLOCK.findall(text) or ([text] if f"class {CANDIDATE}" in text else [])
    problem = "it has no block of Python"
    for block in reversed(blocks):
        if len(block) > MOST_CODE:
            problem = "its code is longer than any kernel"
            continue
        try:
            if CANDIDATE in defined(ast.parse(block)):
                return block.strip("\n") + "\n"
            problem = f"its code has no class {CANDIDATE}"
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            problem = f"its code is no Python: {' '.join(str(error).split())[:120]}"
    raise MalformedAnswer(f"an answer of the generator is no kernel: {problem}", "another model, or look at the transcript")


def reasoning_in(text: str) -> str:
    """What an answer says beside its code."""
    return " ".join(_BLOCK.sub(" ", text).split())
