"""The environment that kernels are scored in: side by side in processes that may crash, measured one after the other.

    0           refused, crashed, hung, or a pass-through: it runs the reference's own ops, however fast
    speedup     of what is right and does the work itself

`leave_one_out` is the estimator of a policy's gradient over several turns: each answer beside the mean of the others of its turn.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from foretell.tune.clock.measure import floor
from foretell.tune.generate.transcript import MeasuredKernel
from foretell.tune.search.trial import FAILED, REFUSED, TIMED, TrialResult, Trials, written
from foretell.tune.verify import checks
from foretell.tune.verify.harness import seed_of
from foretell.tune.verify.process import Lost, Raised
from foretell.tune.verify.sides import ModuleSide
from foretell.tune.verify.types import STAGES, HarnessOptions

AUDITED = 10.0
"""Speedup above which a kernel is verified and measured anew before it counts."""
VALUES_ALONE = ("compile", "smoke", "fuzz", "gradients")
"""What is left of the stages where no gym is wanted."""
LASTS = 0.2
"""Share of a speedup that must be left of it when it is measured again; the smaller of the two counts."""


class KernelGym:
    """Of one task."""

    def __init__(self, trials: Trials, *, workers: int = 2, honest: bool = True, audit: bool = True) -> None:
        self.trials, self.audit = trials, audit
        self._asked = replace(trials.asked, stages=STAGES if honest else VALUES_ALONE)
        self._workers = ThreadPoolExecutor(workers)
        self._clock = threading.Lock()
        _ = trials.cases  # drawn before anybody needs them

    def measured(self, texts: Sequence[str]) -> list[MeasuredKernel]:
        """In the order of the texts; whatever one does, the others are scored."""
        return list(self._workers.map(self._one, texts))

    def _one(self, text: str) -> MeasuredKernel:
        code = written(text)
        verdict = self.trials.verified(code, self._asked, whole=False)
        if not verdict.accepted:
            found = TrialResult(status=REFUSED, stage=verdict.stage, check=verdict.check, reason=verdict.reason)
            return MeasuredKernel(result=found, counters={})
        with self._clock:
            found = self.trials.timed(code)
            if self.audit and found.status == TIMED and found.speedup > AUDITED:
                found = self._audited(text, found)
        counters = self._counters(text, found, verdict.compiled)
        return MeasuredKernel(result=found, counters=counters, reward=found.speedup if found.status == TIMED else 0.0)

    def _audited(self, text: str, found: TrialResult) -> TrialResult:
        """All stages with seeds nobody has seen, and the time again in a process of its own."""
        code = written(text)
        verdict = self.trials.verified(code, replace(self._asked, stages=STAGES, seed=seed_of(HarnessOptions())))
        if not verdict.accepted:
            return TrialResult(status=REFUSED, stage="audit", check=verdict.check, reason=f"{found.speedup:.0f}×, looked at again: {verdict.reason}")
        again = self.trials.timed(code)
        if again.status == TIMED and again.speedup < LASTS * found.speedup:
            return TrialResult(status=REFUSED, stage="audit", check="pace", reason=f"{found.speedup:.0f}× at first, {again.speedup:.2f}× later")
        return found if again.status == TIMED and again.speedup > found.speedup else again

    def _counters(self, text: str, found: TrialResult, compiled: Sequence[Any]) -> dict[str, Any]:
        """What a judge looks at."""
        if found.status == FAILED:
            return {}
        question, timing = self.trials.question, self.trials.timing
        ops: list[str] = []
        longest: list[dict[str, Any]] = []
        with contextlib.suppress(Raised, Lost), ModuleSide(written(text), self.trials.setting, watched=False) as side:
            ops = side.ops(question)
            longest = side.profile(question)
        least = floor(question, sum(one.nbytes for one in self.trials.outputs), timing)
        counters: dict[str, Any] = {
            "ops": dict(sorted(Counter(name.removeprefix("aten.") for name in ops).items())),
            "microseconds": round(found.seconds * 1e6, 1), "reference_microseconds": round(found.seconds * found.speedup * 1e6, 1),
            "reference_ops": dict(sorted(Counter(name.removeprefix("aten.") for name in self.trials.ops).items())),
        }  # fmt: skip
        counters |= {"longest": longest} if longest else {}
        if least:
            counters["floor_microseconds"] = round(least * 1e6, 1)
        kernels = [{name: one[name] for name in ("kernel", "registers", "spilled_bytes", "shared_bytes") if name in one} for one in compiled]
        return {**counters, "kernels": kernels} if kernels else counters

    def passes_through(self, text: str) -> bool:
        """Whether it runs the reference's own ops."""
        with ModuleSide(written(text), self.trials.setting, watched=False) as side:
            return checks.passes_through(side.ops(self.trials.question), self.trials.ops) is not None

    def end(self) -> None:
        self._workers.shutdown(cancel_futures=True)


def leave_one_out(rewards: Sequence[Sequence[float]], discount: float = 1.0) -> list[list[float]]:
    """Advantages of answers, `rewards[answer][turn]`: what follows a turn, less the mean of what follows it for the other answers.

    The others are drawn independently, so that what is taken away is independent of the answer and the estimate stays unbiased.
    """
    if len(rewards) < 2 or len({len(row) for row in rewards}) != 1:
        raise ValueError("several answers of equally many turns")
    returns = []
    for row in rewards:
        following, later = [], 0.0
        for reward in reversed(row):
            later = reward + discount * later
            following.append(later)
        returns.append(following[::-1])
    sums = [sum(column) for column in zip(*returns, strict=True)]
    others = len(rewards) - 1
    return [[one - (total - one) / others for one, total in zip(row, sums, strict=True)] for row in returns]
