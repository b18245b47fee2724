"""What a load got, as figures: of one run, and of several alike."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foretell.serve.bench.client import BUSY, BenchAnswer
from foretell.simulate.serving.records import Limit, quantile

SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, kw_only=True)
class BenchRun:
    """One load, sent once."""

    seed: int
    requests: int
    answered: int
    busy: int
    """Told to come back (429)."""
    failed: int
    reasons: tuple[str, ...]
    """Of those that failed, each once."""
    seconds: float
    """Over which rates are taken: of arrivals, or of answers where these took longer."""
    offered_per_second: float
    """That came; of a closed loop those that were answered."""
    answered_per_second: float
    good_per_second: float
    """Of answers that keep the limits."""
    inside: float
    """Share of all requests that keep them."""
    output_tokens: int
    pieces: int
    """In which they came."""
    output_tokens_per_second: float
    total_tokens_per_second: float
    """Prompts too, as many tokens as were asked for."""
    ttft_seconds: Mapping[str, float]
    tpot_seconds: Mapping[str, float]
    gap_seconds: Mapping[str, float]
    """Between two pieces."""
    most_at_once: int
    late_seconds: float
    """That requests left after their time, at most: the client's own lag."""


def run_of(answers: Sequence[BenchAnswer], limit: Limit, seed: int, arrivals: float) -> BenchRun:
    """`arrivals`: seconds in which requests came whether or not others were answered; 0 of a closed loop."""
    good = [one for one in answers if one.good]
    kept = [one for one in good if (limit.ttft is None or one.ttft <= limit.ttft) and (limit.tpot is None or one.tpot <= limit.tpot)]
    seconds = _span(good, arrivals)
    tokens = sum(one.tokens for one in good)
    busy = sum(one.status == BUSY for one in answers)
    return BenchRun(
        seed=seed, requests=len(answers), answered=len(good), busy=busy, failed=len(answers) - len(good) - busy,
        reasons=tuple(dict.fromkeys(one.failed for one in answers if one.failed and one.status != BUSY))[:5],
        seconds=seconds, offered_per_second=len(answers) / (arrivals or seconds),
        answered_per_second=len(good) / seconds, good_per_second=len(kept) / seconds,
        inside=len(kept) / max(1, len(answers)), output_tokens=tokens, pieces=sum(len(one.came) for one in good),
        output_tokens_per_second=tokens / seconds, total_tokens_per_second=(tokens + sum(one.prompt for one in good)) / seconds,
        ttft_seconds=_quantiles([one.ttft for one in good]), tpot_seconds=_quantiles([one.tpot for one in good if one.tokens > 1]),
        gap_seconds=_quantiles([gap for one in good for gap in one.gaps]), most_at_once=_most_at_once(answers),
        late_seconds=max((one.sent - one.due for one in answers), default=0.0),
    )  # fmt: skip


def _span(good: Sequence[BenchAnswer], arrivals: float) -> float:
    """An open loop that keeps up answers within the time of its arrivals, only later; one that does not takes longer."""
    if not good:
        return max(arrivals, 1e-9)
    ends = [one.ended for one in good]
    first = min(ends) if arrivals else min(one.sent for one in good)
    return max(arrivals, max(ends) - first, 1e-9)


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    return {name: quantile(values, share) for name, share in SHARES.items()}


def _most_at_once(answers: Sequence[BenchAnswer]) -> int:
    now = most = 0
    for _, change in sorted([(one.sent, 1) for one in answers] + [(one.ended, -1) for one in answers]):
        now += change
        most = max(most, now)
    return most


@dataclass(frozen=True, kw_only=True)
class BenchPoint:
    """One load and all that was measured of it."""

    load: str
    amount: float
    """Requests a second, users, or requests."""
    closed: bool
    """Users wait for their answers, or all come at once: nothing was offered faster than it was answered."""
    runs: tuple[BenchRun, ...]

    def middle(self, name: str, part: str = "") -> float:
        """The median of all runs."""
        return statistics.median(self._values(name, part))

    @property
    def keeps_up(self) -> float:
        """Answered of what was offered a second; the middle of all runs."""
        return statistics.median(run.answered_per_second / max(run.offered_per_second, 1e-9) for run in self.runs)

    def spread(self, name: str, part: str = "") -> tuple[float, float]:
        found = self._values(name, part)
        return min(found), max(found)

    def _values(self, name: str, part: str) -> list[float]:
        return [getattr(run, name)[part] if part else getattr(run, name) for run in self.runs]
