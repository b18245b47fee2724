"""Fifty steps of a small model around the kernel: its losses are as near to those in fp64 as the reference's are."""

from __future__ import annotations

import math
from collections.abc import Sequence

from foretell.tune.verify.cases import Cases
from foretell.tune.verify.compare import EPSILON, Problem
from foretell.tune.verify.refusal import Skipped, refuse
from foretell.tune.verify.sides import ModuleSide
from foretell.tune.verify.types import HarnessOptions
from foretell.tune.verify.wire import RawTensor

TIMES = 4.0
"""As far off as eager's losses are, at most: AdamW's first steps go by the sign of a gradient, so that of one near zero rounding decides."""
ULPS = 100.0
"""Of the first loss, that are always allowed."""


def compared(side: ModuleSide, cases: Cases, asked: HarnessOptions) -> str:
    training = cases.training
    if training is None:
        raise Skipped("the reference cannot be trained")
    side.forget()
    side.settle(training.question)
    found = side.process.ask("train", training.content, training.blobs).header
    side.forget()
    mine = [float.fromhex(str(one)) for one in found["losses"]]
    dtype = next(one.dtype for one in training.question.inputs if isinstance(one, RawTensor) and one.is_float)
    refuse(problem(mine, training.eager, training.oracle, dtype))
    return f"{len(mine)} steps, loss {mine[0]:.6g} to {mine[-1]:.6g}; the reference {training.eager[0]:.6g} to {training.eager[-1]:.6g}"


def problem(mine: Sequence[float], eager: Sequence[float], oracle: Sequence[float], dtype: str) -> Problem | None:
    """Where losses part from the oracle's further than eager's do."""
    if len(mine) != len(eager):
        return Problem("protocol", f"{len(mine)} losses of {len(eager)} steps")
    gaps = [abs(a - b) if math.isfinite(a) else math.inf for a, b in zip(mine, oracle, strict=True)]
    allowed = max(TIMES * max(abs(a - b) for a, b in zip(eager, oracle, strict=True)), ULPS * EPSILON[dtype] * abs(oracle[0]))
    worst = max(range(len(gaps)), key=lambda step: gaps[step])
    if gaps[worst] > allowed:
        told = f"after {worst + 1} steps the loss is {mine[worst]:.6g}, the reference's {eager[worst]:.6g}"
        return Problem("parity", f"{told}; {allowed:.1e} is allowed")
    return None
