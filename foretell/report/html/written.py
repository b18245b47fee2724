"""A report on disk: where the page goes, what lies beside it, and the plan costed once more for both."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from foretell.errors import FileFormatError, UserError

if TYPE_CHECKING:
    from foretell.report.html.data import Subject
    from foretell.report.html.detail import Detail

TRACE, SNAPSHOT = ".trace.json", ".snapshot.pickle"
"""What the files beside the page end with, in place of its `.html`."""


def target_of(path: Path, out: Path | None) -> Path:
    """Where the page goes; checked before the work."""
    target = out or (path / "report.html" if path.is_dir() else path.with_suffix(".report.html"))
    if target.is_dir() or not target.name:
        raise UserError(f"--out {str(target)!r} is a folder", "name a file in it, such as report.html")
    if target.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--out {str(target)!r} does not end in .html", f"give {target.name}.html")
    if not target.absolute().parent.is_dir():
        raise UserError(f"there is no folder {str(target.parent)!r} for the report", "make it, or name another")
    return target


def detail_of(subject: Subject, may_run: bool, time_limit: float) -> tuple[Detail | None, str]:
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


def beside(detail: Detail | None, target: Path) -> list[tuple[Path, str]]:
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


def write(target: Path, text: str) -> None:
    from foretell.files import write_atomically

    try:
        write_atomically(target, text, parents=False)
    except OSError as error:
        raise UserError(f"the report cannot be written to {target}: {error.strerror or error}", "give another --out") from None
