"""The scheduler of a pipeline of ranks: several steps are under way, and a sequence is in one of them at most."""

from __future__ import annotations

from collections.abc import Iterable

from foretell.simulate.serving.pages import Pages
from foretell.simulate.serving.scheduler import Row, Scheduler, Sequence, Step, StepLimits


class PipelineScheduler(Scheduler):
    """`step` and `done` may be apart by as many steps as there are stages.

    Sequences in a step that is under way are left alone: they get no token more, and their pages are not taken. Where only they
    hold pages, the one that needs some waits. Ranks compute steps in their order, so pages of a cancelled one can be given to
    another at once.
    """

    def __init__(self, pages: Pages, limits: StepLimits, depth: int) -> None:
        super().__init__(pages, limits)
        self.depth = depth
        self.busy: set[Sequence] = set()
        """In steps under way."""

    def step(self) -> Step:
        """As that of one process, on sequences that are not busy, and on no more than one stage's share of those that generate."""
        rows: list[Row] = []
        left, most = self.limits.tokens, max(1, -(-len(self.running) // self.depth))
        for sequence in list(self.running):
            if len(rows) == most:
                break
            ready = sequence not in self.busy and sequence.pages and sequence.length - sequence.computed == 1
            if ready and self._grown(sequence):
                rows.append(Row(sequence, sequence.computed, 1))
                left -= 1
        for sequence in self.running:
            lacking = sequence.length - sequence.computed
            if lacking > 1 and left and sequence not in self.busy:
                rows.append(Row(sequence, sequence.computed, min(lacking, left)))
                left -= rows[-1].count
        while self.waiting and left and len(self.running) < self.limits.running and self._starts(self.waiting[0]):
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            rows.append(Row(sequence, sequence.computed, min(sequence.length - sequence.computed, left)))
            left -= rows[-1].count
        self.busy.update(row.sequence for row in rows)
        return tuple(rows)

    def done(self, step: Iterable[Row]) -> None:
        rows = tuple(step)
        self.busy.difference_update(row.sequence for row in rows)
        super().done(rows)

    def _grown(self, sequence: Sequence) -> bool:
        while len(sequence.pages) * self.pages.size <= sequence.computed:
            if self.pages.available:
                sequence.pages += self.pages.take(1)
                continue
            youngest = next(one for one in reversed(self.running) if one not in self.busy)
            if youngest is sequence and self.busy:
                return False  # others will be free soon, younger ones among them or not
            if self._preempt(youngest) is sequence:
                return False
        return True
