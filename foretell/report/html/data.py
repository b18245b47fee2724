"""What a report is made from: a run folder or a plan file, read whole and checked. No torch."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from foretell.errors import UserError
from foretell.plan import file as plans
from foretell.plan.types import Plan
from foretell.report import comparison
from foretell.report.comparison import Comparison
from foretell.report.html import front as html_front
from foretell.report.html.front import Front
from foretell.runtime.observe import measurement
from foretell.runtime.train import log
from foretell.runtime.train.folder import read_settings

_TOLD = ("predicted", "notes", "version")
"""Fields of a plan that change nothing in how it runs."""


@dataclass(frozen=True, kw_only=True)
class LogRow:
    """A step of a run, as its log has it; None where it was no number."""

    step: int
    loss: float | None
    seconds: float | None
    rate: float | None
    """Learning rate."""
    norm: float | None
    """Of the gradient."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A plan, and what is known of a run of it."""

    path: Path
    """As it was asked for."""
    plan: Plan
    plan_path: Path
    run: Path | None = None
    """The run folder; None for a plan alone."""
    comparison: Comparison | None = None
    """None for a plan alone, and for a run that has not ended."""
    measured: Mapping[str, Any] | None = None
    steps: tuple[LogRow, ...] = ()
    evaluations: tuple[LogRow, ...] = ()
    settings: Mapping[str, Any] | None = None
    front: Front | None = None
    command: str = ""
    """That began the run."""
    findings: tuple[str, ...] = ()
    """What was found about its ranks while it ran."""

    @property
    def finished(self) -> bool:
        return self.measured is not None


def read(path: str | Path) -> Subject:
    """A run folder or a plan file; whatever is wrong with it is one `UserError`."""
    given = Path(path)
    if not given.exists():
        raise UserError(f"there is no run folder or plan file {given}", "give the folder that `foretell run` wrote, or a plan file")
    if not given.is_dir():
        return Subject(path=given, plan=plans.read(given), plan_path=given, front=html_front.read(html_front.front_path(given)))
    if not (given / "plan.json").is_file():
        raise UserError(f"{given} is no run folder: it has no plan.json", "give the folder that `foretell run` wrote, or a plan file")
    return _of_run(given)


def _of_run(run: Path) -> Subject:
    plan_path = run / "plan.json"
    plan = plans.read(plan_path)
    rows = log.read(run / log.LOG)
    command = next((str(row["command"]) for row in reversed(rows) if row.get("event") == "start" and row.get("command")), "")
    measured, settings = measurement.read(run), read_settings(run)
    return Subject(
        path=run, plan=plan, plan_path=plan_path, run=run, measured=measured,
        comparison=comparison.of_folder(run) if measured is not None else None,
        steps=tuple(_row(row) for row in rows if row.get("event") == "step"),
        evaluations=tuple(_row(row) for row in rows if row.get("event") == "eval"),
        settings=settings.to_json() if settings is not None else None, front=_front(plan, plan_path, command), command=command,
        findings=tuple(str(row.get("text", ""))[:1000] for row in rows if row.get("event") == "finding"),
    )  # fmt: skip


def _row(row: Mapping[str, Any]) -> LogRow:
    return LogRow(
        step=int(row["step"]), loss=_number(row.get("loss")), seconds=_number(row.get("seconds")),
        rate=_number(row.get("lr")), norm=_number(row.get("grad_norm")),
    )  # fmt: skip


def _number(value: Any) -> float | None:
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else None


def _front(plan: Plan, path: Path, command: str) -> Front | None:
    """Beside the folder's own plan, else beside the plan that the run was started with, if it is still the same."""
    found = html_front.read(html_front.front_path(path))
    if found is not None or not command:
        return found
    try:
        words = shlex.split(command)
        named = Path(words[words.index("run") + 1])
        if not named.is_file():
            return None
        before = plans.read(named)
    except (ValueError, IndexError, UserError):
        return None
    alike = all(getattr(before, item.name) == getattr(plan, item.name) for item in fields(Plan) if item.name not in _TOLD)
    return html_front.read(html_front.front_path(named)) if alike and named.resolve() != path.resolve() else None
