"""Which steps are bad, by their numbers, and how many there may be: a loss or a gradient that is no number, or far above the median.

Every rank reads the same numbers after the same step, so all of them judge alike without a word between them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from foretell.runtime.observe.measure import StepReading
from foretell.runtime.train.numbers.finite import Skips
from foretell.runtime.train.numbers.guard import LOSS, NORM

WINDOW_STEPS = 100
"""So many steps back bad ones are counted, and medians are taken over so many good ones."""
LEAST_STEPS = 10
"""Without so many good steps there is no median."""
_KEPT = 3
"""The host may be two steps ahead of what it has read."""


class BadSteps:
    """What a run does not put up with, and what it has put up with."""

    def __init__(self, allowed: int = 0, spike: float | None = None) -> None:
        """So many bad steps of any `WINDOW_STEPS` are passed over; with `spike` a loss or norm so many times the median is one."""
        self.allowed, self.spike = allowed, spike
        self.passed: list[int] = []
        """Bad steps of the window."""
        self.back_from = -WINDOW_STEPS
        """The step from which the run was last taken back to a checkpoint."""
        self._good: dict[str, deque[float]] = {name: deque(maxlen=WINDOW_STEPS) for name in (LOSS, NORM)}
        self._limits: dict[int, tuple[float, float]] = {}
        self._losses: dict[int, Tensor | None] = {}

    @property
    def asked(self) -> bool:
        return self.allowed > 0 or self.spike is not None

    def watch(self, skips: Skips, device: torch.device) -> None:
        """Before the first step."""
        skips.watches = self.asked
        if self.spike is not None:
            skips.limits = torch.full((2,), math.inf, device=device)

    def expect(self, step: int, loss: Tensor | None, skips: Skips) -> None:
        """Before the update of a step: what its numbers may be, on the device; this rank's own loss is kept."""
        if not self.asked:
            return
        self._losses[step] = loss.detach().clone() if loss is not None else None
        self._losses.pop(step - _KEPT, None)
        if skips.limits is None:
            return
        self._limits[step] = limits = self._limit(LOSS), self._limit(NORM)
        self._limits.pop(step - _KEPT, None)
        for place, limit in enumerate(limits):
            skips.limits[place].fill_(limit)

    def _limit(self, name: str) -> float:
        """In fp32, as a device compares with it; a median that is not above zero has none."""
        good = self._good[name]
        median = sorted(good)[len(good) // 2] if len(good) >= LEAST_STEPS else 0.0
        if self.spike is None or median <= 0:
            return math.inf
        return float(torch.tensor(self.spike * median, dtype=torch.float32))

    def judged(self, reading: StepReading) -> str:
        """Which number of a step is bad; empty where none is. Good ones are remembered."""
        norm = reading.grad_norm if reading.grad_norm is not None else 0.0
        limits = self._limits.get(reading.step, (math.inf, math.inf))
        for name, value, limit in zip((LOSS, NORM), (reading.loss, norm), limits, strict=True):
            if not math.isfinite(value) or value > limit:
                return name
        if self.spike is not None:
            self._good[LOSS].append(reading.loss)
            self._good[NORM].append(norm)
        return ""

    def what(self, bad: StepReading) -> str:
        """Which number of a step that was judged is bad."""
        if not math.isfinite(bad.loss) or bad.loss > self._limits.get(bad.step, (math.inf,))[0]:
            return LOSS
        return NORM

    def limit(self, bad: StepReading) -> float | None:
        """What a finite number of a bad step should not have been above."""
        found = self._limits.get(bad.step, (math.inf, math.inf))[self.what(bad) == NORM]
        return found if math.isfinite(found) else None

    def own_loss(self, step: int) -> float | None:
        """This rank's loss of one of the last steps, where it computes one."""
        loss = self._losses.get(step)
        return float(loss) if loss is not None else None

    def note(self, step: int) -> bool:
        """A step is passed over; whether there were more of late than there may be."""
        self.passed = [one for one in self.passed if one > step - WINDOW_STEPS] + [step]
        return len(self.passed) > self.allowed

    def may_go_back(self, step: int) -> bool:
        """Whether the run has come far enough since it was taken back last."""
        return step > self.back_from + WINDOW_STEPS

    def went_back(self, step: int) -> None:
        self.back_from, self.passed = step, []

    def state(self) -> dict[str, Any] | None:
        """For a checkpoint; None where nobody asked."""
        if not self.asked:
            return None
        good = {name: list(values) for name, values in self._good.items() if values}
        return {"passed": self.passed, "back_from": self.back_from, "good": good}

    def load(self, state: Any) -> None:
        """Take up what `state` gave, as far as it is that; one that is none begins anew."""
        said = state if isinstance(state, Mapping) else {}
        self.passed = [one for one in _list(said.get("passed")) if type(one) is int]
        back = said.get("back_from")
        self.back_from = back if type(back) is int else -WINDOW_STEPS
        good = said.get("good")
        for name, values in self._good.items():
            values.clear()
            values.extend(one for one in _list(good.get(name) if isinstance(good, Mapping) else None) if type(one) is float and math.isfinite(one))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
