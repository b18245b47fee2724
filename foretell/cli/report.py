"""`foretell report RUN|PLAN`: one HTML page with everything that is known of a run or a plan."""

from __future__ import annotations

import contextlib
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from foretell.cli import common
from foretell.cli.fit.fit import TIME_LIMIT
from foretell.errors import FileFormatError, UserError

if TYPE_CHECKING:
    from foretell.report.html.data import Subject
    from foretell.report.html.detail import Detail

TRACE, SNAPSHOT = ".trace.json", ".snapshot.pickle"
"""What the files beside the page end with, in place of its `.html`."""


def report(
    path: Path = typer.Argument(..., metavar="RUN|PLAN", show_default=False, help="A run folder, or a plan file."),
    out: Path | None = typer.Option(None, metavar="FILE", show_default=False,
        help="The page; default: report.html in the run folder, PLAN.report.html beside a plan."),
    trace: bool = typer.Option(False, "--trace", help="Trace the model where no trace of it is stored; this runs the model's own file."),
    time_limit: float = TIME_LIMIT,
    open_: bool = typer.Option(False, "--open", help="Show it in the browser."),
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:  # fmt: skip
    """Write one HTML file that opens anywhere, offline: predicted and measured, memory, time, pipeline, other plans.

    Beside it: the predicted step as a Chrome trace and its memory as a PyTorch snapshot. No code of yours is run unless
    --trace asks for it.
    """
    from foretell.report.html import data as html_data
    from foretell.report.html import page as html
    from foretell.report.html import sections as html_sections

    subject = html_data.read(path)
    target = _target(subject.path, out)
    detail, why_not = common.call(lambda: _detail(subject, trace, time_limit), f"costing the plan of {path}")
    beside = _beside(detail, target)
    made = time.strftime("%Y-%m-%d %H:%M")
    page = html_sections.page(subject, detail, why_not=why_not, files=[(file.name, what) for file, what in beside], made=made)
    _write(target, html.render(page))
    if json:
        content = {"file": str(target), "beside": [str(file) for file, _ in beside], "left_out": why_not or None}
        common.emit_json({"report": {**content, "sections": [section.name for section in page.sections]}})
    else:
        lines = [f"Written to {target}"]
        lines += [f"       and {file}  {what}" for file, what in beside]
        lines += [f"Left out   memory over the step, blocks and pipeline: {why_not}"] if why_not else []
        common.emit("\n".join(lines))
    if open_:
        import webbrowser

        webbrowser.open(target.absolute().as_uri())
    return common.YES


def _target(path: Path, out: Path | None) -> Path:
    """Where the page goes; checked before the work."""
    target = out or (path / "report.html" if path.is_dir() else path.with_suffix(".report.html"))
    if target.is_dir() or not target.name:
        raise UserError(f"--out {str(target)!r} is a folder", "name a file in it, such as report.html")
    if target.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--out {str(target)!r} does not end in .html", f"give {target.name}.html")
    if not target.absolute().parent.is_dir():
        raise UserError(f"there is no folder {str(target.parent)!r} for the report", "make it, or name another")
    return target


def _detail(subject: Subject, may_run: bool, time_limit: float) -> tuple[Detail | None, str]:
    """The plan costed once more, or why that is not possible: a report goes without it."""
    from foretell.trace.sandbox.user_code import CodeNeeded, allowed

    try:
        from foretell.report.html import detail as html_detail

        with allowed() if may_run else contextlib.nullcontext():
            return html_detail.of_plan(subject.plan, subject.run, time_limit=time_limit), ""
    except CodeNeeded as needed:
        made = f"`foretell report {shlex.quote(str(subject.path))} --trace` makes it"
        return None, f"no trace of {subject.plan.model['model']} as the plan runs it is stored; {made}, and runs code of {needed.files[0]}"
    except FileFormatError:
        raise
    except UserError as error:
        return None, str(error)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return None, "torch is not installed, and the model was never traced here"


def _beside(detail: Detail | None, target: Path) -> list[tuple[Path, str]]:
    """Write what is known of the step for other viewers."""
    if detail is None:
        return []
    from foretell.report import chrome
    from foretell.report.html import memory as html_memory

    found = []
    if detail.timeline is not None:
        file = target.with_suffix(TRACE)
        chrome.write(detail.timeline, file)
        found.append((file, "the predicted step, for Perfetto or chrome://tracing"))
    if detail.curve.events:
        file = target.with_suffix(SNAPSHOT)
        html_memory.write_snapshot(detail.curve, file)
        found.append((file, "its memory, for PyTorch's memory viewer"))
    return found


def _write(target: Path, text: str) -> None:
    from foretell.files import write_atomically

    try:
        write_atomically(target, text, parents=False)
    except OSError as error:
        raise UserError(f"the report cannot be written to {target}: {error.strerror or error}", "give another --out") from None
