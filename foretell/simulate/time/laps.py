"""A stretch of tasks that a step repeats: a few rounds are laid on the timeline, the rest follow once rounds are alike.

    first micro-batch │ round 0 │ round 1 │ round 2 │ round 3 │ update        simulated
                                 └─ alike ─┘
    first micro-batch │ round 0 │ round 1 │ round 2 │ 2' │ 2" │ … │ round 3 │ update

Everything a task waits for is relative: if two rounds in a row are issued, start and finish the same time apart, so do
all that follow. Where they are not yet alike, every round is simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from foretell.quantities import Task

KEPT = 4
"""Rounds that are simulated: two to settle in, one to see that it has, and the last."""
ALIKE = 1e-9
"""Of a round, how far two rounds may differ: rounding."""


@dataclass(frozen=True)
class Laps:
    """Where the rounds are in a list of tasks that has `kept` of `count` rounds."""

    begin: int
    length: int
    kept: int
    count: int

    @property
    def extra(self) -> int:
        return self.count - self.kept

    @property
    def _last(self) -> int:
        """Where the last round begins."""
        return self.begin + (self.kept - 1) * self.length

    def alike(self, *moments: Sequence[float]) -> float | None:
        """Seconds of a round where the last two before the last one differ by the same time in everything; or None."""
        middle, last = self._last - self.length, self._last
        seconds = moments[0][middle] - moments[0][middle - self.length]
        room = ALIKE * seconds
        for line in moments:
            before, after = line[middle - self.length : middle], line[middle:last]
            if any(not -room <= b - a - seconds <= room for a, b in zip(before, after, strict=True)):
                return None
        return seconds

    def repeat(self, values: Sequence[float], seconds: float = 0.0) -> list[float]:
        """One value for each task of all rounds; each round `seconds` more than the one before."""
        last, extra = self._last, self.extra
        one = values[last - self.length : last]
        more = [[value + number * seconds for value in one] for number in range(1, extra + 1)] if seconds else [one] * extra
        rest = values[last:]
        return [*values[:last], *chain.from_iterable(more), *([value + extra * seconds for value in rest] if seconds else rest)]

    def moved(self, position: int, rounds: int) -> int:
        """What a task so many rounds later has instead of a position."""
        return position + rounds * self.length if position >= self.begin else position

    def positions(self, values: Sequence[int]) -> list[int]:
        """One position (or a negative code) for each task of all rounds."""
        last, extra = self._last, self.extra
        one = values[last - self.length : last]
        found = list(values[:last])
        for number in range(1, extra + 1):
            found += [self.moved(value, number) for value in one]
        return found + [self.moved(value, extra) for value in values[last:]]

    def unfold(self, tasks: Sequence[Task]) -> list[Task]:
        """The tasks of all rounds."""
        last, extra = self._last, self.extra
        one = tasks[last - self.length : last]
        found = list(tasks[:last])
        for number in range(1, extra + 1):
            found += [self._later(task, number) if task.after else task for task in one]
        return found + [self._later(task, extra) if task.after else task for task in tasks[last:]]

    def _later(self, task: Task, rounds: int) -> Task:
        return task._replace(after=tuple(self.moved(position, rounds) for position in task.after))
