"""The stages, in order, until one refuses the kernel. Whatever the kernel does, this process goes on and says what it did."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from foretell.tune.verify import audit, checks, parity, scan
from foretell.tune.verify.cases import Cases, prepare
from foretell.tune.verify.compare import Problem
from foretell.tune.verify.draw import (
    FORMAT,
    FRESH,
    GRADIENT,
    MAGNITUDE,
    OWN,
    SENSITIVITY,
    SHAPE,
    STRIDE,
    SUBSET,
    WEIGHTS,
    TaskCase,
)
from foretell.tune.verify.inside import triton_kernels
from foretell.tune.verify.process import KernelSetting, Lost, Raised
from foretell.tune.verify.refusal import Refused, Skipped, refuse
from foretell.tune.verify.sides import Answer, ModuleSide, in_guards
from foretell.tune.verify.source import Code
from foretell.tune.verify.types import (
    FAILED,
    NOT_REACHED,
    PASSED,
    SKIPPED,
    STAGES,
    HarnessOptions,
    StageResult,
    Verdict,
)

NAMES = {WEIGHTS: "weights", SHAPE: "shapes", FORMAT: "formats", STRIDE: "strides", MAGNITUDE: "magnitudes", SENSITIVITY: "sensitivity",
         GRADIENT: "gradients", SUBSET: "subsets"}  # fmt: skip
"""Kind of case → the check that refuses a kernel whose values are wrong there, and right where nothing is varied."""
_BY_VALUE = ("values", "accuracy", "nonfinite", "cache")
_ASKED_AGAIN = 6
_LATER_SECONDS = 0.05
_RENAMED = ("values", "nonfinite", "kind", "gradients")
Doing = Callable[[str], None]


def seed_of(asked: HarnessOptions) -> int:
    return secrets.randbits(31) if asked.seed is None else asked.seed


def verify(candidate: Code, reference: Code, setting: KernelSetting, asked: HarnessOptions, *, doing: Doing = lambda _: None) -> Verdict:
    """Run the reference, then the candidate; raises `ModelError` where the reference is at fault."""
    doing("running the reference")
    cases = prepare(reference, setting, seed=seed_of(asked), gradients=asked.gradients)
    return examine(candidate, cases, setting, asked, doing=doing)


def examine(candidate: Code, cases: Cases, setting: KernelSetting, asked: HarnessOptions, *, doing: Doing = lambda _: None) -> Verdict:
    """The candidate against what is known of a task."""
    exam = _Examination(candidate, cases, setting, asked)
    results: list[StageResult] = []
    refused: StageResult | None = None
    try:
        for stage in STAGES:
            if refused is not None or stage not in asked.stages:
                text = "" if refused is not None else "not asked for"
                results.append(StageResult(stage=stage, status=NOT_REACHED if refused is not None else SKIPPED, text=text))
                continue
            doing(stage)
            found = _run(stage, exam)
            results.append(found)
            refused = found if found.status == FAILED else None
    finally:
        exam.end()
    return Verdict(
        accepted=refused is None, candidate=candidate.name, task=cases.task, stage=refused.stage if refused else "",
        check=refused.check if refused else "", reason=refused.text if refused else "", stages=tuple(results), calls=exam.calls,
        worst_error=exam.worst, determinism=exam.bits, declined=tuple(exam.declined), compiled=tuple(exam.compiled),
        notes=(*cases.notes, *exam.notes), isolation=exam.isolation, device=setting.device,
    )  # fmt: skip


def _run(stage: str, exam: _Examination) -> StageResult:
    try:
        return StageResult(stage=stage, status=PASSED, text=getattr(exam, stage)())
    except Skipped as skipped:
        return StageResult(stage=stage, status=SKIPPED, text=str(skipped))
    except Refused as refused:
        return StageResult(stage=stage, status=FAILED, text=refused.text, check=refused.check)
    except Lost as lost:
        return StageResult(stage=stage, status=FAILED, text=lost.text, check=lost.how)
    except Raised as raised:
        check = "crash" if raised.lost else "memory" if raised.out_of_memory else "raises"
        return StageResult(stage=stage, status=FAILED, text=str(raised), check=check)


@dataclass
class _Examination:
    """One candidate; a stage is a method."""

    candidate: Code
    cases: Cases
    setting: KernelSetting
    asked: HarnessOptions
    calls: int = 0
    worst: float = 0.0
    bits: str = ""
    """bitwise, seeded or rounding."""
    launches: int = 0
    isolation: tuple[str, ...] = ()
    declined: list[str] = field(default_factory=list)
    compiled: list[Mapping[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Of early calls, by the parent's clock."""
    seen: dict[str, str] = field(default_factory=dict)
    """Digest of outputs → the question that had them."""
    _side: ModuleSide | None = None

    @property
    def side(self) -> ModuleSide:
        if self._side is None:
            self._side = ModuleSide(self.candidate, self.setting, watched=True)
        return self._side

    def end(self) -> None:
        if self._side is not None:
            self.isolation = self._side.process.isolation()
            self.calls = self._side.calls
            self._side.end()
            self._side = None

    # --- asking -----------------------------------------------------------------------------------------------------------

    def ask(self, case: TaskCase, what: str = "call", **how: Any) -> tuple[Answer, Problem | None]:
        """One call with guards around the inputs, and what is wrong with its answer."""
        sent = in_guards(case.question)
        answer = self.side.call(sent, what, **how)
        wrong, ratio = checks.answer_problem(case, sent, answer)
        self.worst = max(self.worst, ratio) if wrong is None else self.worst
        key = checks.digest_of(answer)
        if wrong is not None and wrong.check in ("values", "accuracy") and self.seen.get(key, case.question.name) != case.question.name:
            wrong = Problem("cache", f"it answers with what it gave for {self.seen[key]}")
        if wrong is None:
            self.seen.setdefault(key, case.question.name)
        elif wrong.check in _BY_VALUE and self._changed_since(answer):
            wrong = Problem("deferred", "an output changed after it was returned")
        return answer, wrong

    def _changed_since(self, answer: Answer) -> bool:
        """Whether what was wrong is something else by now: somebody is still computing it."""
        time.sleep(_LATER_SECONDS)
        held = self.side.again()
        return bool(held) and any(a is not None and b is not None and a.data != b.data for a, b in zip(held[-1], answer.outputs, strict=False))

    def right(self, case: TaskCase) -> bool:
        """Refuse what is wrong; False where the candidate says that it does not do this. By what is varied the check is named."""
        try:
            _, wrong = self.ask(case)
        except Raised as raised:
            varied = case.kind in (SHAPE, FORMAT, STRIDE)
            if raised.kind == "NotImplementedError" and varied:
                self.declined.append(case.question.name)
                return False
            if raised.lost or case.kind not in NAMES:
                raise
            raise Refused(NAMES[case.kind], f"{case.question.name}: {raised}") from None
        if wrong is None:
            return True
        if wrong.check in ("values", "accuracy", "nonfinite") and self._other_when_asked_again(case):
            raise Refused("determinism", f"{case.question.name}: {wrong.text}; asked again it answers otherwise")
        renamed = wrong.check in _RENAMED or (wrong.check, case.kind) == ("cache", WEIGHTS)  # a new module has nothing kept
        raise Refused(NAMES.get(case.kind, wrong.check) if renamed else wrong.check, f"{case.question.name}: {wrong.text}")

    def _other_when_asked_again(self, case: TaskCase) -> bool:
        return len({checks.digest_of(self.ask(case)[0]) for _ in range(_ASKED_AGAIN)}) > 1

    def every(self, *kinds: str) -> int:
        return sum(self.right(case) for case in self.cases.of(*kinds) if not self._skipped(case))

    def _skipped(self, case: TaskCase) -> bool:
        """Triton's interpreter rounds bf16 otherwise than a GPU does."""
        interpreted = self.launches > 0 and not self.setting.on_gpu
        return interpreted and case.about.get("dtype") == "bfloat16"

    # --- stages -----------------------------------------------------------------------------------------------------------

    def scan(self) -> str:
        if not self.asked.scan:
            raise Skipped("not asked for")
        found = scan.findings(self.candidate.text)
        if found:
            more = f", and {len(found) - 1} more" if len(found) > 1 else ""
            raise Refused("scan", f"line {found[0].line} {found[0].text}{more}")
        return "nothing that no kernel needs"

    def compile(self) -> str:
        """Triton kernels for a device that is not here."""
        if not triton_kernels.installed():
            raise Skipped("Triton is not installed")
        if "triton" not in self.candidate.text:
            raise Skipped("no Triton kernel")
        plain = replace(self.setting, environment={**self.setting.environment, "TRITON_INTERPRET": "0"})
        (own,) = self.cases.of(OWN)
        with ModuleSide(self.candidate, plain, watched=False) as side:
            answer = side.call(own.question, "kernels", how=triton_kernels.COMPILE, target=self.asked.target)
        self.compiled = [dict(one) for one in answer.launches]
        failed = [one for one in answer.launches if "problem" in one]
        if failed:
            raise Refused("compile", f"{failed[0]['kernel']} does not compile for {self.asked.target}: {failed[0]['problem']}")
        if not self.compiled:
            raise Skipped("no kernel was launched")
        worst = max(self.compiled, key=lambda one: (one.get("spilled_bytes", 0), one.get("registers", 0)))
        return f"{len(self.compiled)} for {self.asked.target}; {worst['kernel']}: {worst.get('registers', '?')} registers, " \
               f"{worst.get('spilled_bytes', 0)} bytes spilled"  # fmt: skip

    def smoke(self) -> str:
        if self.cases.dull:
            raise Refused("task", f"the task says nothing of a kernel: {self.cases.dull}")
        (own,) = self.cases.of(OWN)
        noted = self._loaded()
        refuse(checks.conduct(noted, settled=False))
        if self.cases.random:
            return audit.draws_alike(self.side, self.cases)
        answer, wrong = self.ask(own)
        if wrong is None or wrong.check in ("values", "accuracy", "nonfinite"):
            poisoned, _ = self.ask(own, poison=True)
            refuse(checks.unwritten(answer, poisoned))
        refuse(checks.conduct(self.side.noted()["noted"], settled=False))
        self._strays()
        if wrong is not None and wrong.check in ("values", "accuracy", "nonfinite") and self._other_when_asked_again(own):
            raise Refused("determinism", f"{wrong.text}; asked again it answers otherwise")
        refuse(wrong)
        self.seconds = audit.timed(self.side, own)
        self.launches = len(self.side.call(own.question, "kernels", how=triton_kernels.COUNT).launches)
        for case in self.cases.of(WEIGHTS):
            self.side.make(case.question.arguments, case.question.dtype, secrets.randbits(31))
            self.right(case)
        self.every(FRESH)
        return f"{self.launches} Triton launches a call" if self.launches else "no Triton kernel"

    def _loaded(self) -> Mapping[str, Any]:
        try:
            noted: Mapping[str, Any] = self.side.noted()["noted"]
        except Raised as raised:
            raise Refused("raises", f"the file does not load: {raised}") from None
        return noted

    def _strays(self) -> None:
        """Processes and threads beside the worker's own, as the system has them."""
        tree = self.side.process.tree()
        if len(tree) > 1:
            raise Refused("processes", f"{len(tree) - 1} processes that it started are still there")
        threads = self.side.process.threads()
        if self.cases.threads and threads > self.cases.threads:
            raise Refused("threads", f"{threads} threads, and the reference has {self.cases.threads}")

    def fuzz(self) -> str:
        self._compared()
        sizes, formats, strides = (self.every(kind) for kind in (SHAPE, FORMAT, STRIDE))
        declined = f"; declines {', '.join(self.declined)}" if self.declined else ""
        return f"{sizes} sizes, {formats} formats, {strides} layouts{declined}"

    def gradients(self) -> str:
        if not self.asked.gradients:
            raise Skipped("not asked for")
        if self.cases.random:
            return audit.draws_and_gradients(self.side, self.cases)
        count = self.every(GRADIENT)
        if not count:
            raise Skipped("the reference has no gradient")
        return f"all together, and {self.every(SUBSET)} alone"

    def magnitudes(self) -> str:
        self._compared()
        return f"{self.every(MAGNITUDE)} of them"

    def determinism(self) -> str:
        self.bits = audit.determinism(self.ask, self.cases)
        return self.bits

    def sensitivity(self) -> str:
        self._compared()
        return f"{self.every(SENSITIVITY)} inputs changed alone"

    def _compared(self) -> None:
        if self.cases.random:
            raise Skipped("the reference draws, so no value can be compared")

    def audit(self) -> str:
        found = audit.audited(audit.Suspect(self.ask, self.side, self.cases, self.launches, self.seconds), self.asked)
        self._strays()
        refuse(checks.conduct(self.side.noted()["noted"], settled=False))
        return found

    def sanitizer(self) -> str:
        tool = shutil.which("compute-sanitizer")
        if tool is None or not self.setting.on_gpu:
            raise Skipped("compute-sanitizer is not installed" if self.setting.on_gpu else "of GPU kernels alone")
        (own,) = self.cases.of(OWN)
        words = (tool, "--tool", "memcheck", "--error-exitcode", "99", "--target-processes", "all")
        with ModuleSide(self.candidate, replace(self.setting, before=words), watched=False) as side:
            side.call(own.question)
            tail = side.process.tail()
        errors = [line for line in tail.splitlines() if "Invalid" in line or ("ERROR SUMMARY" in line and " 0 errors" not in line)]
        if errors:
            raise Refused("sanitizer", errors[0].strip("= "))
        return "memcheck has nothing to say"

    def parity(self) -> str:
        if not self.asked.gradients:
            raise Skipped("it needs gradients")
        self._compared()
        return parity.compared(self.side, self.cases, self.asked)
