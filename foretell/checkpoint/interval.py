"""How often to save: as rarely as the time lost to failures allows. No torch."""

from __future__ import annotations

import math

from foretell.units import parse_duration as parse_duration


def best_interval(cost_seconds: float, mtbf_seconds: float) -> float:
    """Seconds of training between two saves that lose the least time (Daly 2006, Young's with its next terms).

    A save costs `cost_seconds` of training; a failure, on average every `mtbf_seconds`, costs what was done since the
    last save. Where a save takes as long as machines live, nothing helps: once per life.
    """
    if cost_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    share = cost_seconds / (2 * mtbf_seconds)
    return math.sqrt(2 * cost_seconds * mtbf_seconds) * (1 + math.sqrt(share) / 3 + share / 9) - cost_seconds


def steps_between(cost_seconds: float, mtbf_seconds: float, step_seconds: float, total: int) -> int:
    """The interval in steps: at least one, at most the run."""
    if step_seconds <= 0:
        return total
    return max(1, min(total, round(best_interval(cost_seconds, mtbf_seconds) / step_seconds)))
