"""How often to save: as rarely as the time lost to failures allows. No torch."""

from __future__ import annotations

import statistics

from foretell.simulate.goodput import best_interval as best_interval
from foretell.units import parse_duration as parse_duration


def steps_between(cost_seconds: float, mtbf_seconds: float, step_seconds: float, total: int) -> int:
    """The interval in steps: at least one, at most the run."""
    if step_seconds <= 0:
        return total
    return max(1, min(total, round(best_interval(cost_seconds, mtbf_seconds) / step_seconds)))


class SlowedSteps:
    """What a save costs besides the wait for it: steps beside which it is written share cores and memory with it."""

    LEAST, KEPT, SAVES = 3, 50, 9

    def __init__(self) -> None:
        self._plain: list[float] = []
        self._beside: list[float] = []
        self._slower: list[float] = []

    @property
    def seconds(self) -> float:
        """Of a save: the median of the last ones, since other programs slow steps too."""
        return max(0.0, statistics.median(self._slower)) if self._slower else 0.0

    def step(self, seconds: float, *, saving: bool) -> None:
        """A step is done; `saving`: a checkpoint is written beside it."""
        if saving:
            self._beside.append(seconds)
            return
        if self._beside and len(self._plain) >= self.LEAST:
            pace = statistics.median(self._plain)
            self._slower = [*self._slower[1 - self.SAVES :], sum(self._beside) - len(self._beside) * pace]
        self._beside.clear()
        self._plain = [*self._plain[1 - self.KEPT :], seconds]
