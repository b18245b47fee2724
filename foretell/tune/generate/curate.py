"""Transcripts as a data set: verified kernels with the words they came with, each idea once, without what a benchmark will ask.

    kept     measured, right, faster than a bound      ranked   by speedup, then by how few words it took
    one of   near-duplicates (shingles of tokens whose names are left out)      left out   tasks whose text is a benchmark's
"""

from __future__ import annotations

import hashlib
import io
import json
import keyword
import math
import re
import tokenize
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foretell.files import write_atomically
from foretell.tune.generate.talk import CODER, MalformedAnswer, code_in, reasoning_in
from foretell.tune.generate.transcript import digest_of, measured_of, transcript_rows

SAME = 0.8
"""Share of shingles from which two kernels are one."""
SHINGLE = 5
_KEYWORDS = frozenset((*keyword.kwlist, "torch", "tl", "triton", "nn", "self"))


@dataclass(frozen=True, kw_only=True)
class CuratedKernel:
    """One row of the data set."""

    task: str
    reasoning: str
    kernel: str
    speedup: float


@dataclass(frozen=True, kw_only=True)
class Curation:
    """A data set, and what was left out of it."""

    rows: tuple[CuratedKernel, ...]
    seen: int
    """Kernels in the transcripts."""
    wrong: int
    slow: int
    duplicates: int
    overlapping: int
    """Of tasks that a benchmark has."""
    words_and_right: float | None
    """Correlation of how many words an answer has with whether its kernel was right; None where either does not vary."""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "rows": len(self.rows)}


def curated(transcripts: Iterable[Path], *, least: float = 1.0, held_out: Sequence[str] = (), deduplicate: bool = True) -> Curation:
    """Of the rows of several sessions; `held_out` are texts of tasks that may not be trained on."""
    found: list[CuratedKernel] = []
    words: list[tuple[int, bool]] = []
    seen = wrong = slow = overlapping = 0
    closed = {_task_key(one) for one in held_out}
    for path in transcripts:
        head, rows = transcript_rows(path)
        task = str(_at(head, "options", "task"))
        reasons = _reasons(rows)
        for row in rows:
            if row.get("kind") != "measured":
                continue
            seen += 1
            text = str(row.get("text", ""))
            measured = _measured(row)
            words.append((len(reasons.get(digest_of(text), "").split()), measured is not None))
            if measured is None:
                wrong += 1
            elif measured < least:
                slow += 1
            elif _task_key(task) in closed:
                overlapping += 1
            else:
                found.append(CuratedKernel(task=task, reasoning=reasons.get(digest_of(text), ""), kernel=text, speedup=measured))
    found.sort(key=lambda one: (-one.speedup, len(one.reasoning.split()), one.kernel))
    rows_of = distinct(found) if deduplicate else found
    return Curation(rows=tuple(rows_of), seen=seen, wrong=wrong, slow=slow, duplicates=len(found) - len(rows_of), overlapping=overlapping,
                    words_and_right=_correlation(words))  # fmt: skip


def distinct(some: Sequence[CuratedKernel]) -> list[CuratedKernel]:
    """The first of each group of kernels for one task that are nearly the same."""
    kept: list[tuple[str, frozenset[int], CuratedKernel]] = []
    for one in some:
        mine, task = shingles(one.kernel), _task_key(one.task)
        if all(task != known or alike(mine, other) < SAME for known, other, _ in kept):
            kept.append((task, mine, one))
    return [one for _, _, one in kept]


def write(curation: Curation, path: Path) -> None:
    write_atomically(path, "".join(json.dumps(asdict(one)) + "\n" for one in curation.rows))


def shingles(text: str) -> frozenset[int]:
    """Runs of tokens, names replaced by the order in which they come, comments and layout left out."""
    tokens: list[str] = []
    names: dict[str, int] = {}
    try:
        for one in tokenize.generate_tokens(io.StringIO(text).readline):
            if one.type == tokenize.NAME and one.string not in _KEYWORDS:
                tokens.append(f"n{names.setdefault(one.string, len(names))}")
            elif one.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER):
                tokens.append(one.string)
    except (tokenize.TokenError, SyntaxError, IndentationError):
        tokens = re.findall(r"\w+|[^\w\s]", text)
    runs = [" ".join(tokens[place : place + SHINGLE]) for place in range(max(1, len(tokens) - SHINGLE + 1))]
    return frozenset(int.from_bytes(hashlib.blake2b(one.encode(), digest_size=8).digest(), "big") for one in runs)


def alike(left: frozenset[int], right: frozenset[int]) -> float:
    return len(left & right) / max(1, len(left | right))


def _measured(row: Mapping[str, Any]) -> float | None:
    """The speedup of a kernel that was right and scored."""
    try:
        found = measured_of(row["found"])
    except (KeyError, TypeError, ValueError):
        return None
    return found.result.speedup if found.reward > 0 else None


def _reasons(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Kernel → what was said with it."""
    found = {}
    for row in rows:
        if row.get("kind") == "asked" and row.get("role") == CODER and isinstance(row.get("answer"), dict):
            text = str(row["answer"].get("text", ""))
            try:
                found[digest_of(code_in(text))] = reasoning_in(text)
            except MalformedAnswer:
                continue
    return found


def _task_key(text: str) -> str:
    return digest_of(" ".join(text.split()))


def _at(data: Any, *names: str) -> Any:
    for name in names:
        data = data.get(name, {}) if isinstance(data, dict) else {}
    return data


def _correlation(pairs: Sequence[tuple[int, bool]]) -> float | None:
    count = len(pairs)
    if count < 2:
        return None
    xs, ys = [float(words) for words, _ in pairs], [float(right) for _, right in pairs]
    mx, my = sum(xs) / count, sum(ys) / count
    sx, sy = (math.sqrt(sum((one - mean) ** 2 for one in some)) for some, mean in ((xs, mx), (ys, my)))
    return None if not sx or not sy else sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / (sx * sy)
