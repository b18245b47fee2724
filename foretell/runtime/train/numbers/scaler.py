"""Loss scaling for gradients in fp16, as torch.amp.GradScaler does it, on any number of ranks.

    loss × scale ─► backward ─► norm of all gradients ─► × clip ÷ scale ─► update      the scale grows after GOOD_STEPS
                                      └─ not finite ─────────────────────► no update   the scale is halved

fp16 has five bits of exponent: small gradients would vanish, and scaled ones may overflow. Every rank keeps its own copy of the
scale; all copies change alike, since the norm is summed over all ranks before anybody looks at it. Nothing waits for the host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from foretell.checkpoint.format import Damaged
from foretell.plan.types import FP16, Plan
from foretell.runtime.observe.measure import StepReading
from foretell.runtime.train.numbers.finite import Skips

FIRST, GROWTH, BACKOFF, GOOD_STEPS = 65536.0, 2.0, 0.5, 2000
"""As torch.amp.GradScaler has them."""
LEAST = 2.0**-10
"""Gradients that are not finite with a scale below this are no overflow: the run has failed."""


class LossScaler:
    """The scale and how many steps in a row went well."""

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), FIRST, device=device)
        self.good = torch.zeros((), dtype=torch.int32, device=device)

    def up(self, loss: Tensor) -> Tensor:
        """What to call backward on."""
        return loss * self.scale

    def down(self, value: Tensor) -> Tensor:
        """A gradient or a norm as it is without the scale."""
        return value * self.scale.reciprocal()

    def skip(self, skips: Skips, loss: Tensor, squares: Tensor) -> Tensor:
        """1 where the update must not be applied. An overflow is one step's; a loss that is not finite, or gradients that are
        not although the scale is small, are the run's."""
        run = loss + torch.where(self.scale < LEAST, squares, torch.zeros_like(squares))
        return skips.skip(run, this=loss + squares)

    def settle(self, skip: Tensor, tripped: Tensor) -> None:
        """After an update: adapt the scale to whether it was skipped; a run that has failed leaves it as it was."""
        kept = self.scale.clone(), self.good.clone()
        torch._amp_update_scale_(self.scale, self.good, skip, GROWTH, BACKOFF, GOOD_STEPS)
        for value, before in zip((self.scale, self.good), kept, strict=True):
            value.copy_(torch.where(tripped > 0, before, value))

    def state(self) -> dict[str, Any]:
        return {"scale": self.scale.item(), "good_steps": self.good.item()}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Take what `state` gave, or what `checked` passed; without any the scale begins at its first value."""
        self.scale.fill_(FIRST if state is None else state["scale"])
        self.good.fill_(0 if state is None else state["good_steps"])


def scaler_for(plan: Plan, device: torch.device) -> LossScaler | None:
    """None where gradients have a range as wide as fp32's."""
    return LossScaler(device) if plan.precision == FP16 else None


def checked(state: Any, where: object) -> Mapping[str, Any] | None:
    """A scaler's state in a checkpoint, which is damaged where that is not one; None where the run that saved it had none."""
    if state is None:
        return None
    scale, good = (state.get("scale", 0), state.get("good_steps", -1)) if isinstance(state, Mapping) else (0, -1)
    if type(scale) not in (int, float) or not 0 < scale < math.inf or type(good) is not int or not 0 <= good < 2**31:
        raise Damaged(f"{where} has a loss scale that is none: {state!r}", "use an older checkpoint")
    return {"scale": float(scale), "good_steps": good}


def overflowed(reading: StepReading) -> bool:
    """Whether a step was left out because its scaled gradients overflowed, as happens now and then: the run goes on."""
    if reading.loss_scale is None or reading.grad_norm is None or math.isfinite(reading.grad_norm):
        return False
    return math.isfinite(reading.loss) and reading.loss_scale >= LEAST


def overflow_words(count: int) -> str:
    return f"{count} {'step' if count == 1 else 'steps'} had no update: scaled fp16 gradients overflowed, and the scale was halved"
