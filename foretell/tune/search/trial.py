"""Candidates of one task, tried: compiled for a device, verified, and timed beside the reference, which waits in its process.

Timing is relative: both take turns, so that a machine which slows down makes nobody look better.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from foretell.errors import ModelError
from foretell.tune.clock.baselines import Baseline, baselines_of
from foretell.tune.clock.measure import Timed, TimingOptions, calls_of, paired, speed
from foretell.tune.clock.statistics import SpeedVerdict
from foretell.tune.search.templates import TaskShape, cut, task_shape
from foretell.tune.verify import checks
from foretell.tune.verify.cases import Cases, prepare
from foretell.tune.verify.draw import GRADIENT, OWN, Drawer
from foretell.tune.verify.harness import examine, seed_of
from foretell.tune.verify.inside import triton_kernels
from foretell.tune.verify.process import KernelSetting, Lost, Raised
from foretell.tune.verify.sides import KernelCall, ModuleSide, Wanted
from foretell.tune.verify.source import CANDIDATE, Code
from foretell.tune.verify.types import HarnessOptions, Verdict
from foretell.tune.verify.wire import RawTensor

TIMED, REFUSED, PRUNED, FAILED, PASSED = "timed", "refused", "pruned", "failed", "passed"
QUICK_PAIRS = 8
MOST_REGISTERS = 255


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """What became of one candidate."""

    status: str
    seconds: float = 0.0
    """Of a call."""
    speedup: float = 0.0
    """Beside the reference as it is, in turns."""
    stage: str = ""
    check: str = ""
    reason: str = ""
    registers: int = 0
    spilled_bytes: int = 0

    @property
    def score(self) -> float | None:
        """Seconds as a share of the reference's; None where there are none."""
        return 1.0 / self.speedup if self.status == TIMED else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def written(text: str, name: str = "candidate") -> Code:
    """A candidate that is no file yet."""
    return Code(path=f"{name}.py", text=text, kind=CANDIDATE)


class Trials:
    """Of one task. What the candidates do to their processes ends with these."""

    def __init__(
        self, task: Code, setting: KernelSetting, asked: HarnessOptions, timing: TimingOptions, *, doing: Callable[[str], None] = lambda _: None
    ) -> None:
        self.task, self.setting, self.timing = task, setting, timing
        self.asked = replace(asked, seed=seed_of(asked))
        doing("running the reference")
        drawer = Drawer(task, setting, seed_of(asked))
        try:
            self.question = drawer.question("the task's own inputs", drawer.inputs()[1], drawer.redrawn(drawer.made))
            self.traced = drawer.eager.graph(self.question)
            self.outputs = [one for one in drawer.eager.call(self.question).outputs if one is not None]
            self.ops = drawer.eager.ops(self.question)
        except (Raised, Lost) as error:
            raise ModelError(f"the reference in {task.path} does not run: {error}", "run the file by itself first") from None
        finally:
            drawer.end()
        self.shape: TaskShape = task_shape(task, self.traced)
        self.gate = cut(task, self.shape)
        self._doing = doing
        self._cases: Cases | None = None
        self._reference: Timed | None = None

    @property
    def cases(self) -> Cases:
        """What a candidate is asked; drawn once."""
        if self._cases is None:
            self._doing("drawing cases")
            assert self.asked.seed is not None
            self._cases = prepare(self.gate, self.setting, seed=self.asked.seed, gradients=self.asked.gradients)
        return self._cases

    # --- one candidate --------------------------------------------------------------------------------------------------

    def compiled(self, code: Code) -> tuple[Mapping[str, Any], ...]:
        """Its kernels compiled for the target, forward and backward; empty without Triton, or where the harness says what is wrong."""
        if not triton_kernels.installed():
            return ()
        plain = replace(self.setting, environment={**self.setting.environment, "TRITON_INTERPRET": "0"})
        question = replace(self.question, wanted=_every(self.question), cotangents=self._cotangents()) if self.asked.gradients else self.question
        try:
            with ModuleSide(code, plain, watched=False) as side:
                return tuple(side.call(question, "kernels", how=triton_kernels.COMPILE, target=self.asked.target).launches)
        except (Raised, Lost):
            return ()

    def _cotangents(self) -> tuple[RawTensor, ...]:
        return tuple(one for one in self.outputs if one.is_float)

    def verified(self, code: Code, asked: HarnessOptions | None = None, *, whole: bool = True) -> Verdict:
        """By the harness, where the task was cut on fewer rows; `whole`: then on the task's own inputs too."""
        found = examine(code, self.cases, self.setting, asked or self.asked)
        return self._whole(code, found) if whole and found.accepted and self.gate is not self.task else found

    def _whole(self, code: Code, found: Verdict) -> Verdict:
        assert self.asked.seed is not None
        drawer = Drawer(self.task, self.setting, self.asked.seed)
        try:
            kinds = [(OWN, self.question)]
            kinds += [(GRADIENT, replace(self.question, wanted=_every(self.question)))] if self.asked.gradients else []
            cases = [case for kind, question in kinds if (case := drawer.answered(kind, question)) is not None]
        finally:
            drawer.end()
        try:
            with ModuleSide(code, self.setting, watched=False) as side:
                for case in cases:
                    wrong, _ = checks.answer_problem(case, case.question, side.call(case.question))
                    if wrong is not None:
                        return replace(found, accepted=False, stage="whole", check=wrong.check, reason=f"all rows: {wrong.text}")
        except (Raised, Lost) as error:
            return replace(found, accepted=False, stage="whole", check="raises", reason=f"all rows: {error}")
        return found

    def timed(self, code: Code, pairs: int = QUICK_PAIRS) -> TrialResult:
        """Beside the reference, in turns."""
        try:
            mine = Timed(code, self.setting, self.question, self.timing)
        except (Raised, Lost) as error:
            return TrialResult(status=FAILED, reason=str(error))
        try:
            reference = self._known()
            calls = calls_of(self.question, self.timing)
            mine.warm(calls)
            calls = calls_of(self.question, self.timing, mine.loop(calls))
            mine.warm(calls)
            theirs, own = paired(reference, mine, calls, pairs)
        except (Raised, Lost) as error:
            self._forget()
            return TrialResult(status=FAILED, reason=str(error))
        finally:
            mine.end()
        ratio = median(math.log(a) - math.log(b) for a, b in zip(theirs, own, strict=True))
        return TrialResult(status=TIMED, seconds=median(own), speedup=math.exp(ratio))

    def checked(self, code: Code, *, prune: bool = False, stages: Sequence[str] = ()) -> TrialResult:
        """Compiled and verified by some of the stages, by all if none are named; what passes is not timed yet."""
        launches = self.compiled(code) if prune else ()
        if (early := pruned(launches)) is not None:
            return early
        wanted = tuple(one for one in stages or self.asked.stages if one != "compile" or not launches)  # once is enough
        verdict = self.verified(code, replace(self.asked, stages=wanted), whole=False)
        if not verdict.accepted:
            return TrialResult(status=REFUSED, stage=verdict.stage, check=verdict.check, reason=verdict.reason)
        registers = max((int(one.get("registers", 0)) for one in (*launches, *verdict.compiled)), default=0)
        return TrialResult(status=PASSED, registers=registers)

    def tried(self, code: Code, *, prune: bool = False, stages: Sequence[str] = ()) -> TrialResult:
        """Compiled, verified and timed; the first that fails ends it."""
        found = self.checked(code, prune=prune, stages=stages)
        return replace(self.timed(code), registers=found.registers) if found.status == PASSED else found

    def each(self, codes: Sequence[Code], *, prune: bool = False, stages: Sequence[str] = (), workers: int = 1) -> Iterator[TrialResult]:
        """Of several, in their order. With several workers they are verified side by side, and timed when all of that is over."""
        if workers == 1:
            yield from (self.tried(code, prune=prune, stages=stages) for code in codes)
            return
        _ = self.cases
        with ThreadPoolExecutor(workers) as pool:
            early = list(pool.map(lambda code: self.checked(code, prune=prune, stages=stages), codes))
        for code, found in zip(codes, early, strict=True):
            yield replace(self.timed(code), registers=found.registers) if found.status == PASSED else found

    def judged(self, code: Code, others: tuple[Code, ...] = (), *, compile: bool = True, pairs: int | None = None) -> SpeedVerdict:
        """Beside the best of all baselines, measured again in clean processes."""
        self._forget()
        timing = self.timing if pairs is None else replace(self.timing, pairs=pairs)
        baselines: tuple[Baseline, ...] = baselines_of(self.task, others, compile=compile)
        size = sum(one.nbytes for one in self.outputs)
        return speed(code, baselines, {"the task's own inputs": (self.question, size)}, self.setting, timing, doing=self._doing)

    # --- the reference, waiting -----------------------------------------------------------------------------------------

    def _known(self) -> Timed:
        if self._reference is None:
            self._reference = Timed(self.task, self.setting, self.question, self.timing)
            self._reference.warm(calls_of(self.question, self.timing))
        return self._reference

    def _forget(self) -> None:
        if self._reference is not None:
            with contextlib.suppress(OSError):
                self._reference.end()
        self._reference = None

    def end(self) -> None:
        self._forget()

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _every(question: KernelCall) -> Wanted:
    """All gradients."""
    places = tuple(place for place, one in enumerate(question.inputs) if isinstance(one, RawTensor) and one.is_float)
    names = tuple(name for name, raw in question.state.tensors.items() if name in question.state.parameters and raw.is_float)
    return Wanted(places, names)


def pruned(launches: Sequence[Mapping[str, Any]]) -> TrialResult | None:
    """By what the compiler says: what does not compile, spills, or has no register left is not worth the time to measure it."""
    for one in launches:
        if "problem" in one:
            return TrialResult(status=PRUNED, reason=f"{one['kernel']} does not compile: {one['problem']}")
    registers, spilled = (max((int(one.get(name, 0)) for one in launches), default=0) for name in ("registers", "spilled_bytes"))
    if spilled or registers >= MOST_REGISTERS:
        return TrialResult(status=PRUNED, reason=f"{registers} registers, {spilled} bytes spilled", registers=registers, spilled_bytes=spilled)
    return None
