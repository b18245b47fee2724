"""How often to save: as rarely as the time lost to failures allows. No torch."""

from __future__ import annotations

from foretell.simulate.goodput import best_interval as best_interval
from foretell.units import parse_duration as parse_duration


def steps_between(cost_seconds: float, mtbf_seconds: float, step_seconds: float, total: int) -> int:
    """The interval in steps: at least one, at most the run."""
    if step_seconds <= 0:
        return total
    return max(1, min(total, round(best_interval(cost_seconds, mtbf_seconds) / step_seconds)))
