"""What was asked, answered and measured, a row each as it comes; and the same again from the file, to the last decision.

A replay asks no generator and runs no kernel: a prompt other than the recorded one is an error, so a replay that ends is the session
that was recorded. Minutes and money are the recorded ones too.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from foretell.decode import json_of, value_of
from foretell.errors import FileFormatError, UserError
from foretell.tune.generate.budget import SessionBudget
from foretell.tune.generate.talk import (
    BudgetSpent,
    ChatMessage,
    EndpointError,
    MalformedAnswer,
    TextAnswer,
    TextGenerator,
)
from foretell.tune.search.trial import FAILED, PRUNED, REFUSED, TIMED, TrialResult

VERSION = 1
MOST_BYTES = 256 << 20
_FAULTS = {"EndpointError": EndpointError, "MalformedAnswer": MalformedAnswer, "BudgetSpent": BudgetSpent}
_REMEDY = "another transcript, or search without --replay"


@dataclass(frozen=True, kw_only=True)
class MeasuredKernel:
    """What the environment says of a candidate."""

    result: TrialResult
    counters: Mapping[str, Any] = field(default_factory=dict)
    """What a judge looks at: ops, kernels, registers, seconds beside the floor."""
    reward: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {"result": self.result.to_json(), "counters": dict(self.counters), "reward": self.reward}


class TranscriptWriter:
    """Rows into a file of the user's alone."""

    def __init__(self, path: Path | None, head: Mapping[str, Any]) -> None:
        self.path, self.rows = path, 0
        self._handle = -1
        if path is not None:
            try:
                self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise UserError(f"{path} cannot be written: {error.strerror or error}", "--out with another folder") from None
        self.add({"foretell-transcript": VERSION, **head})

    def add(self, row: Mapping[str, Any]) -> None:
        self.rows += 1
        if self._handle >= 0:
            os.write(self._handle, json.dumps(row).encode() + b"\n")

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1


@dataclass
class RecordedGenerator:
    """A generator whose answers and failures are written down, within a budget."""

    inner: TextGenerator
    budget: SessionBudget
    writer: TranscriptWriter

    def complete(self, role: str, messages: Sequence[ChatMessage]) -> TextAnswer:
        row: dict[str, Any] = {"kind": "asked", "role": role, "prompt": [asdict(one) for one in messages], "at": round(self.budget.elapsed, 3)}
        try:
            self.budget.check(messages)
            found = self.inner.complete(role, messages)
        except (EndpointError, MalformedAnswer, BudgetSpent) as error:
            if isinstance(error, MalformedAnswer):
                self.budget.lose(messages)
            self.writer.add({**row, "fault": type(error).__name__, "problem": error.problem, "remedy": error.remedy})
            raise
        self.budget.take(found)
        self.writer.add({**row, "answer": asdict(found)})
        return found


class TranscriptReplay:
    """A transcript as generator, environment and clock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head, self._rows = _read(path)
        self._place = 0
        self._at = 0.0

    def clock(self) -> float:
        return self._at

    @property
    def done(self) -> bool:
        return self._place >= len(self._rows)

    def complete(self, role: str, messages: Sequence[ChatMessage]) -> TextAnswer:
        row = self._next("asked")
        try:
            self._at = float(value_of(float, row["at"], "at"))
            if row["role"] != role or row["prompt"] != [asdict(one) for one in messages]:
                raise self._other("another question is asked than was recorded")
            if "fault" in row:
                kind = _FAULTS[str(row["fault"])]
                raise kind(str(row["problem"]), str(row["remedy"]))
            found: TextAnswer = value_of(TextAnswer, row["answer"], "answer")
        except (KeyError, TypeError, ValueError) as error:
            raise self._other(f"a row that cannot be read: {error}") from None
        return found

    def measured(self, texts: Sequence[str]) -> list[MeasuredKernel]:
        return [self._measured(text) for text in texts]

    def _measured(self, text: str) -> MeasuredKernel:
        row = self._next("measured")
        try:
            if row["sha256"] != digest_of(text):
                raise self._other("another kernel is measured than was recorded")
            return measured_of(row["found"])
        except (KeyError, TypeError, ValueError) as error:
            raise self._other(f"a row that cannot be read: {error}") from None

    def _next(self, kind: str) -> Mapping[str, Any]:
        if self.done:
            raise BudgetSpent("the transcript ends here", "a search without --replay goes on")
        row = self._rows[self._place]
        self._place += 1
        if row.get("kind") != kind:
            raise self._other(f"something is {kind} where it has {str(row.get('kind'))[:20]!r}")
        return row

    def _other(self, problem: str) -> FileFormatError:
        return FileFormatError(f"{self.path}, line {self._place + 1}: {problem}", _REMEDY)


def measured_of(data: Any) -> MeasuredKernel:
    """Raises ValueError and its like where it is none."""
    found: TrialResult = value_of(TrialResult, data["result"], "result")
    reward = float(value_of(float, data["reward"], "reward"))
    if found.status not in (TIMED, REFUSED, PRUNED, FAILED) or not all(math.isfinite(one) for one in (found.seconds, found.speedup, reward)):
        raise ValueError("a result that is none")
    counters = data["counters"]
    if not isinstance(counters, dict):
        raise ValueError("counters that are none")
    return MeasuredKernel(result=found, counters=counters, reward=reward)


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def transcript_rows(path: Path) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
    """Head and rows, for those that look at a session afterwards."""
    return _read(path)


def _read(path: Path) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
    try:
        if path.exists() and (not path.is_file() or path.stat().st_size > MOST_BYTES):
            raise FileFormatError(f"{path} is no transcript", _REMEDY)
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{path} cannot be read: {' '.join(str(error).split())}", _REMEDY) from None
    rows: list[Mapping[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            row = json_of(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            if number == len(lines) > 1:
                break  # cut off as it was written
            raise FileFormatError(f"{path}, line {number}, is no row of a transcript", _REMEDY)
        rows.append(row)
    if not rows or rows[0].get("foretell-transcript") != VERSION:
        raise FileFormatError(f"{path} is no transcript of this version", _REMEDY)
    return rows[0], rows[1:]
