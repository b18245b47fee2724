"""How a run ends, and where it speaks meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from foretell.runtime.observe.measure import Measurement
from foretell.runtime.train import save

DONE, STOPPED = "done", "stopped"


class RunScreen(Protocol):
    """Where a run speaks; on rank 0 only."""

    def step(self, text: str, step: int) -> None:
        """The line of a step, over the one before where that is possible."""

    def say(self, text: str) -> None:
        """A line that stays."""


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """How a run ended."""

    status: str
    """done, or stopped by a signal."""
    signal: str
    step: int
    folder: Path
    measurement: Measurement | None
    saved: save.SavedCheckpoint | None
    compares: bool = True
    """What the plan predicts is of this kind of device."""
