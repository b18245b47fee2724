"""Learning rates over a run: a warm-up, then constant, cosine, or level and down (WSD). Pure functions of the step."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from foretell.errors import UnknownName, UserError

KINDS = ("constant", "cosine", "wsd")
END_SHARES = {"constant": 1.0, "cosine": 0.1, "wsd": 0.0}
"""What is left of the peak after the last step."""
WSD_DECAY = 0.2
"""Share of the steps over which wsd falls, in a straight line."""
WARMUP_SHARE, WARMUP_MOST = 0.05, 2000


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate at every step of a run."""

    peak: float
    steps: int
    """Of the whole run, warm-up included."""
    kind: str = "cosine"
    warmup: int = 0
    """Steps of a straight rise; the last of them has the peak."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownName("schedule", self.kind, KINDS, f"known: {', '.join(KINDS)}")
        if not 0 < self.peak < math.inf:
            raise UserError(f"the learning rate must be above zero, got {self.peak}", "give --lr such as 3e-4")
        if self.steps < 1:
            raise UserError(f"a run has at least one step, got {self.steps}", "give --steps of 1 or more")
        if not 0 <= self.warmup <= self.steps:
            problem = f"a warm-up of {self.warmup} steps does not go into a run of {self.steps}"
            raise UserError(problem, f"give --warmup from 0 to {self.steps}")

    def at(self, step: int) -> float:
        """The rate of update number `step`, counted from 0; after the last it stays where it ended."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        end = END_SHARES[self.kind]
        if self.kind == "cosine":
            return self.peak * (end + (1 - end) * 0.5 * (1 + math.cos(math.pi * self._share(step, self.warmup))))
        if self.kind == "wsd":
            first = max(self.warmup, self.steps - round(WSD_DECAY * self.steps))
            return self.peak * (1 - (1 - end) * self._share(step, first))
        return self.peak

    def _share(self, step: int, first: int) -> float:
        """How much of the way from `first` to the end is done: 0 before, 1 at the last step and after it."""
        left = self.steps - 1 - first
        return min(1.0, max(0.0, (step - first) / left)) if left > 0 else float(step > first)

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: object) -> Schedule | None:
        """What `to_json` gave; None where it is something else."""
        try:
            return cls(**content)  # type: ignore[arg-type]
        except (TypeError, UserError):
            return None


def resumed(before: Schedule | None, now: Schedule, *, step: int, steps: int) -> list[str]:
    """What a resumed run says of its learning rate: whether it changes after `step`, and what becomes of it until `steps`."""
    lines = []
    if before is not None and before != now:
        length = f"{before.steps:,} → {now.steps:,} steps" if before.steps != now.steps else f"{now.steps:,} steps"
        lines.append(f"learning-rate schedule changed ({length}): step {step + 1} has {now.at(step):.3g}, it would have had {before.at(step):.3g}")
    if steps > max(now.steps, step):
        lines.append(
            f"the learning-rate schedule ends at step {now.steps:,}: later steps have {now.at(now.steps):.3g}; "
            f"--schedule-steps {steps} would stretch it"
        )
    if step < steps < now.steps:
        lines.append(f"the learning rate stays on the {now.steps:,}-step schedule: {now.at(steps - 1):.3g} at step {steps:,}, the last asked for")
    return lines


def usual_warmup(steps: int) -> int:
    """A twentieth of the run, at most 2,000 steps."""
    return min(WARMUP_MOST, int(WARMUP_SHARE * steps))
