"""What a run by the clock leaves: answers with their times, gaps between tokens, pages over time, and limits that answers keep."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from foretell.errors import UserError

INSIDE = 0.95
"""Share of requests that must keep the limits where a server is said to keep them."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What every answer should keep (an SLO); None: anything."""

    ttft: float | None = None
    """Seconds to the first token."""
    tpot: float | None = None
    """Seconds a token after it."""

    def kept(self, answer: SimulatedAnswer) -> bool:
        return (self.ttft is None or answer.ttft <= self.ttft) and (self.tpot is None or answer.tpot <= self.tpot)


def limit_of(text: str | None) -> Limit:
    """Limits as a user writes them: ttft=500ms,tpot=40ms."""
    found: dict[str, float] = {}
    for part in filter(None, (one.strip() for one in (text or "").split(","))):
        match = re.fullmatch(r"(ttft|tpot)\s*=\s*(\d+(?:\.\d+)?)\s*(ms|s)", part)
        if match is None or match[1] in found or not float(match[2]):
            raise UserError(f"--slo {text}: '{part}' is no limit", "write ttft=500ms,tpot=40ms, or one of them")
        found[match[1]] = float(match[2]) * (1e-3 if match[3] == "ms" else 1.0)
    return Limit(**found)


@dataclass(slots=True)
class SimulatedAnswer:
    """One request: when it came, when its tokens did."""

    came: float
    prompt: int
    output: int
    first: float = 0.0
    last: float = 0.0
    preempted: int = 0

    @property
    def ttft(self) -> float:
        return self.first - self.came

    @property
    def tpot(self) -> float:
        return (self.last - self.first) / (self.output - 1) if self.output > 1 else 0.0


@dataclass
class Served:
    """All of a run."""

    answers: list[SimulatedAnswer] = field(default_factory=list)
    """That were finished, in that order."""
    refused: int = 0
    """Longer than all pages."""
    seconds: float = 0.0
    busy: float = 0.0
    steps: int = 0
    gaps: list[tuple[float, int]] = field(default_factory=list)
    """Between two tokens of one sequence: seconds, and how many of these."""
    pages_most: int = 0
    waiting_most: int = 0
    running_most: int = 0
    preemptions: int = 0
    timeline: list[tuple[float, int, int, int]] = field(default_factory=list)
    """Of each step: when it began, pages that are held, sequences running and waiting."""
    gave_up: bool = False
    """Requests came faster than they were answered; the rest was not simulated."""

    @property
    def output_rate(self) -> float:
        """Tokens generated a second."""
        return sum(one.output for one in self.answers) / self.seconds if self.seconds else 0.0

    @property
    def total_rate(self) -> float:
        return sum(one.output + one.prompt for one in self.answers) / self.seconds if self.seconds else 0.0

    def ttft(self, share: float) -> float:
        return quantile([one.ttft for one in self.answers], share)

    def tpot(self, share: float) -> float:
        return quantile([one.tpot for one in self.answers if one.output > 1], share)

    def gap(self, share: float) -> float:
        """Seconds between two tokens, as every token counts."""
        return weighted(self.gaps, share)

    def inside(self, limit: Limit) -> float:
        """Share of requests that keep a limit; those that were refused do not."""
        all_of_them = len(self.answers) + self.refused
        return sum(map(limit.kept, self.answers)) / all_of_them if all_of_them else 1.0


def quantile(values: Iterable[float], share: float) -> float:
    """Linear between neighbours."""
    row = sorted(values)
    if not row:
        return 0.0
    place = share * (len(row) - 1)
    low = int(place)
    high = min(low + 1, len(row) - 1)
    return row[low] + (row[high] - row[low]) * (place - low)


def weighted(values: Iterable[tuple[float, int]], share: float) -> float:
    """The value below which a share of all counts lies."""
    row = sorted(values)
    total, sums = 0, []
    for _, count in row:
        total += count
        sums.append(total)
    return row[min(bisect.bisect_left(sums, share * total), len(row) - 1)][0] if row else 0.0
