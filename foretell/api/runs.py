"""What is done with a plan: `run` it, `verify` it, `compare` what was measured, `report` all of it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.api.call import asking
from foretell.api.plans import PlanAnswer
from foretell.errors import UserError
from foretell.notebook import Displayable
from foretell.options import RunOptions, VerifyOptions
from foretell.options.describe import flags_of
from foretell.options.run import SUPERVISED
from foretell.plan import file
from foretell.plan.types import Plan

if TYPE_CHECKING:
    from foretell.report.comparison import Comparison
    from foretell.report.two_runs import TwoRuns
    from foretell.runtime.check.twin import Twin
    from foretell.runtime.check.verify import Difference, PlanCheck


def _plan_of(given: Any) -> Plan:
    if isinstance(given, PlanAnswer):
        if given.plan is None:
            raise UserError(f"there is no plan: {given.why}", "give more or larger devices, or a shorter sequence")
        return given.plan
    if isinstance(given, Plan):
        return given
    if isinstance(given, str | Path):
        path = Path(given)
        return file.read(path / "plan.json" if path.is_dir() else path)
    raise UserError(f"a {type(given).__name__} is given for a plan", "give a plan, the answer of `foretell.plan`, or the path of a plan file")


# --- run -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, repr=False)
class RunAnswer(Displayable):
    """How a run ended, what was measured, and how that is beside what was predicted."""

    status: str
    """done, or stopped."""
    step: int
    folder: Path
    checkpoint: Path | None
    measurement: dict[str, Any] | None
    comparison: Comparison | None

    def to_json(self) -> dict[str, Any]:
        return {
            "status": self.status, "step": self.step, "folder": str(self.folder), "checkpoint": str(self.checkpoint) if self.checkpoint else None,
            "measurement": self.measurement, "comparison": self.comparison.to_json() if self.comparison else None,
        }  # fmt: skip

    def headline(self) -> str:
        return f"{self.status} after step {self.step}, in {self.folder}"

    def rows(self) -> Sequence[tuple[str, str]]:
        return self.comparison.rows() if self.comparison is not None else ()


@asking(RunOptions)
def run(plan: PlanAnswer | Plan | str | Path, options: RunOptions) -> RunAnswer:
    """Train as a plan says, on this machine, and measure it; as many processes as the plan wants are started.

    `plan` is a plan, what `foretell.plan` answered, or the path of a plan file. A run folder with `resume=True` goes on where it stopped.
    """
    from foretell.runtime.process import launch
    from foretell.runtime.train import folder

    given, out = plan, Path(options.out) if options.out else None
    if options.resume and out is None:
        if not (isinstance(given, str | Path) and Path(given).is_dir()):
            raise UserError("resume=True without a run to resume", "give its folder: foretell.run('runs/NAME', resume=True)")
        out = Path(given)
    wanted = _plan_of(given)
    out = out or folder.usual_path(wanted)
    asked = options.asked()
    folder.check(wanted, asked, resume=options.resume)
    if wanted.mesh.world > 1 or options.max_restarts > 0 or options.notice:
        launch.check_room(wanted, options.device)
        _in_processes(wanted, out, options)
        return _ended(out)
    from foretell.runtime.train.run import run as train

    class Quiet:
        def step(self, text: str, step: int) -> None: ...

        def say(self, text: str) -> None: ...

    outcome = train(wanted, asked, screen=Quiet(), out=out, resume=options.resume, device=options.device, command="foretell.run")
    return _ended(outcome.folder, outcome.status, outcome.step)


def _in_processes(plan: Plan, out: Path, options: RunOptions) -> None:
    from foretell.runtime.process.supervise.keep import Keeper, Supervision

    how = Supervision(restarts=max(0, options.max_restarts), standby=options.standby, notices=options.notice or ())
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "plan.json"
        file.write(plan, path)
        words = ["run", str(path), *flags_of(options, without=("out", *SUPERVISED)), "--out", str(out)]
        ended = Keeper(words, plan.mesh.world, out, how=how, say=lambda text: None).run()
    if ended.problem:
        raise UserError(ended.problem, ended.remedy or "see the run folder's log")


def _ended(folder: Path, status: str = "done", step: int | None = None) -> RunAnswer:
    """What a run folder holds once the run is over."""
    from foretell.checkpoint import store
    from foretell.runtime.observe import measurement
    from foretell.runtime.train.folder import CHECKPOINTS
    from foretell.runtime.train.log import LOG, read

    found = measurement.read(folder)
    kept = store.complete(folder / CHECKPOINTS)
    steps = [row["step"] for row in read(folder / LOG) if "step" in row] if step is None else []
    return RunAnswer(
        status=status, step=step if step is not None else max(steps, default=0), folder=folder,
        checkpoint=kept[0].path if kept else None, measurement=found,
        comparison=_compared(folder) if found else None,
    )  # fmt: skip


def _compared(folder: Path) -> Comparison:
    from foretell.report import comparison

    return comparison.of_folder(folder)


# --- verify ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, repr=False)
class Verification(Displayable):
    """Whether a plan computes what one process computes."""

    plan: str
    steps: int
    twin: Twin
    """The small model of the same classes and axes that was run."""
    cases: tuple[tuple[PlanCheck, Difference], ...]

    @property
    def good(self) -> bool:
        return all(one.good for _, one in self.cases)

    def to_json(self) -> dict[str, Any]:
        twin = self.twin
        return {
            "plan": self.plan,
            "good": self.good,
            "steps": self.steps,
            "twin": {
                "model": twin.source.model, "overrides": dict(twin.source.overrides), "parameters": twin.parameters,
                "ranks": twin.plan.mesh.world, "scaled": list(twin.notes),
            },
            "cases": [
                {"name": case.name, "ranks": case.plan.mesh.world, "precision": case.plan.precision, "good": one.good, **asdict(one)}
                for case, one in self.cases
            ],
        }  # fmt: skip

    def headline(self) -> str:
        return f"{self.plan} {'computes' if self.good else 'does NOT compute'} what one process computes"

    def rows(self) -> Sequence[tuple[str, str]]:
        return [(case.name, f"loss off by {one.loss:.0e} of {one.loss_bound:.0e}, gradients by {one.gradient:.0e} of {one.gradient_bound:.0e}")
                for case, one in self.cases]  # fmt: skip


@asking(VerifyOptions)
def verify(plan: PlanAnswer | Plan | str | Path, options: VerifyOptions) -> Verification:
    """Run a small twin of a plan on processes of this machine, beside one process that runs it plainly in fp32."""
    from foretell.plan.legal import check
    from foretell.runtime.check.verify import Verifier, cases_of

    wanted = _plan_of(plan)
    check(wanted)
    with Verifier(wanted, steps=options.steps, limit_s=options.limit) as verifier:
        twin = verifier.prepare()
        cases = tuple((case, verifier.run(case)) for case in cases_of(twin.plan))
    name = str(plan) if isinstance(plan, str | Path) else str(wanted.model["model"])
    return Verification(plan=name, steps=options.steps, twin=twin, cases=cases)


# --- compare, report -------------------------------------------------------------------------------------------------


def compare(run: str | Path | RunAnswer, other: str | Path | RunAnswer | None = None) -> Comparison | TwoRuns:
    """What a run did against what its plan predicted; or against another run."""
    from foretell.report import comparison, two_runs

    first, second = (one.folder if isinstance(one, RunAnswer) else one for one in (run, other))
    assert first is not None
    return comparison.of_folder(Path(first)) if second is None else two_runs.of_folders(Path(first), Path(second))


@dataclass(frozen=True, kw_only=True, repr=False)
class ReportFile(Displayable):
    """A page that was written, and what lies beside it."""

    path: Path
    beside: tuple[tuple[Path, str], ...]
    sections: tuple[str, ...]
    left_out: str

    def to_json(self) -> dict[str, Any]:
        return {
            "file": str(self.path), "beside": [str(path) for path, _ in self.beside], "left_out": self.left_out or None,
            "sections": list(self.sections),
        }  # fmt: skip

    def headline(self) -> str:
        return f"written to {self.path}"

    def rows(self) -> Sequence[tuple[str, str]]:
        return [(str(path), what) for path, what in self.beside]


def report(run: str | Path | RunAnswer, out: str | Path | None = None, *, trace: bool = False, time_limit: float = 600.0) -> ReportFile:
    """Write one HTML page of a run or a plan file: predicted and measured, memory, time, pipeline, other plans.

    `trace`: trace the model where no trace of it is stored; this runs the model's own file.
    """
    from foretell.report.html import data, page, sections, served, serving, written

    given = run.folder if isinstance(run, RunAnswer) else Path(run)
    if served.holds(given):
        told = serving.page(served.read(given), made=time.strftime("%Y-%m-%d %H:%M"))
        target = written.target_of(given, Path(out) if out is not None else None)
        written.write(target, page.render(told))
        return ReportFile(path=target, beside=(), sections=tuple(section.name for section in told.sections), left_out="")
    subject = data.read(given)
    target = written.target_of(subject.path, Path(out) if out is not None else None)
    detail, why_not = written.detail_of(subject, trace, time_limit)
    beside = written.beside(detail, target)
    made = time.strftime("%Y-%m-%d %H:%M")
    found = sections.page(subject, detail, why_not=why_not, files=[(path.name, what) for path, what in beside], made=made)
    written.write(target, page.render(found))
    return ReportFile(path=target, beside=tuple(beside), sections=tuple(section.name for section in found.sections), left_out=why_not)
