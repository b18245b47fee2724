"""The engine over ranks: as many steps under way as the pipeline has stages."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import nn

from foretell.serve.engine import ServingEngine, TokenEvent
from foretell.serve.ranks.controller import RankedRunner
from foretell.simulate.serving.pages import Pages
from foretell.simulate.serving.pipelined import PipelineScheduler
from foretell.simulate.serving.scheduler import StepLimits


class RankedEngine(ServingEngine):
    """A step enters the pipeline before the last one has left it."""

    def __init__(self, runner: RankedRunner, *, pages: int, size: int, limits: StepLimits, share: bool = True) -> None:
        super().__init__(nn.Module(), pages=pages, size=size, limits=limits, share=share, runner=runner)
        self.ranked = runner
        self.scheduler: PipelineScheduler = PipelineScheduler(Pages(pages, size), limits, runner.depth)
        self._flights: deque[Any] = deque()
        self.most_under_way = 0
        """Steps."""

    def step(self) -> list[TokenEvent]:
        """Launch what can be; then the tokens of the oldest step under way."""
        while len(self._flights) < self.ranked.depth and (flight := self._launched()) is not None:
            self._flights.append(flight)
        self.most_under_way = max(self.most_under_way, len(self._flights))
        if not self._flights:
            self.ranked.look()
            return []
        flight = self._flights.popleft()
        events = self._collected(flight)
        self._done(flight)
        return events

    def give_up(self) -> None:
        super().give_up()
        self._flights.clear()
        self.scheduler.busy.clear()
