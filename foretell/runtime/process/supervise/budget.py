"""How often a run is started again, and after what pause."""

from __future__ import annotations

FIRST_SECONDS = 1.0
MOST_SECONDS = 60.0


class RestartBudget:
    """So many restarts in a row without getting further; a run that has got further has all of them again.

    The first of a row comes at once: most faults do not come again. Later ones wait, twice as long each time.
    """

    def __init__(self, most: int, *, first_s: float = FIRST_SECONDS, most_s: float = MOST_SECONDS) -> None:
        self.most, self.first_s, self.most_s = most, first_s, most_s
        self.row = 0
        """Restarts in a row."""
        self.total = 0
        self._furthest = float("-inf")

    def spend(self, reached: float) -> float | None:
        """The pause before another start, given how far the run has come; None where none is left."""
        if reached > self._furthest:
            self._furthest, self.row = reached, 0
        if self.row >= self.most:
            return None
        self.row += 1
        self.total += 1
        return 0.0 if self.row == 1 else min(self.most_s, self.first_s * 2.0 ** (self.row - 2))
