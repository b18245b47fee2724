"""`foretell compare RUN [RUN_B]`: what a run did against what its plan predicted, or against another run; and what a profile learns."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from foretell.cli import common
from foretell.errors import UserError

if TYPE_CHECKING:
    from foretell.report.comparison import Comparison
    from foretell.search.profiles.learn import Taught

UPDATE_HELP = "Correct your own profile of this machine by what the run measured, where it was calm enough; runs steps of the model."


def compare(
    runs: list[Path] = typer.Argument(..., metavar="RUN", show_default=False,
        help="A run folder, as `foretell run` or `foretell watch` wrote it; a second one to compare it with."),
    update_profile: bool = typer.Option(False, "--update-profile", help=UPDATE_HELP),
    device: str = typer.Option("auto", metavar="auto|cpu|cuda", help="With --update-profile: where the run was."),
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:  # fmt: skip
    """Print predicted beside measured of a run, or two runs side by side.

    Exit 0: all within its band, or two runs that differ by no more than each varies by itself; 1: not so.
    """
    if len(runs) == 2:
        return _two(runs[0], runs[1], json=json, updates=update_profile)
    if len(runs) > 2:
        raise UserError(f"{len(runs)} runs are given, and one or two are compared", "foretell compare RUN_A RUN_B")
    from foretell.report import comparison

    run = runs[0]
    found = comparison.of_folder(run)
    taught = _learned(run, found, device) if update_profile else None
    if json:
        common.emit_json({"comparison": found.to_json(), **({"profile": as_json(taught)} if taught else {})})
    else:
        show(found)
        tell_goodput(run)
        if taught is not None:
            common.emit("\n".join(["", *told(taught)]))
    return common.NO_OR_FAILED if found.ok is False else common.YES


def _two(a: Path, b: Path, *, json: bool, updates: bool) -> int:
    """What differs between two runs."""
    from foretell.report import two_runs

    if updates:
        raise UserError("--update-profile learns from one run, and two are given", "give the one to learn from")
    found = two_runs.of_folders(a, b)
    if json:
        common.emit_json({"runs": found.to_json()})
    else:
        common.emit(two_runs.render(found, common.width(), ascii_only=common.ascii_only(sys.stdout)))
    return common.YES if found.alike else common.NO_OR_FAILED


def _learned(run: Path, found: Comparison, device: str) -> Taught:
    """What was asked for: this runs steps of the model."""
    from foretell.trace.sandbox.user_code import allowed

    with allowed():
        return common.call(lambda: learned(run, found, device), f"learning from {run}")


def show(found: Comparison) -> None:
    from foretell.report import comparison

    common.emit(comparison.render(found, common.width(), ascii_only=common.ascii_only(sys.stdout)))


def tell_goodput(run: Path) -> None:
    """Of a run that was told how often it may fail."""
    from foretell.report.goodput import told_of
    from foretell.report.words import folded

    if told := told_of(run):
        common.emit("\n".join(folded([told], common.width())))


def written(run: Path) -> Comparison:
    """The comparison of a run folder, written beside its measurement; a folder that cannot be written is no error."""
    import contextlib
    import json

    from foretell.files import write_atomically
    from foretell.report import comparison, schema

    found = comparison.of_folder(run)
    with contextlib.suppress(OSError):
        write_atomically(run / comparison.FILE, json.dumps(schema.plain(found.to_json()), indent=2) + "\n")
    return found


def learned(run: Path, found: Comparison, device: str) -> Taught:
    """Correct the profile by a run, where its comparison allows."""
    from foretell.plan import file
    from foretell.runtime.observe import measurement
    from foretell.search.profiles.learn import Taught, update_profile

    measured = measurement.read(run)
    assert measured is not None, "it was compared"
    if not found.comparable:
        return Taught(why=found.notes[0], measured_seconds=measured["step_seconds"])
    if found.busy:
        return Taught(why=found.busy, measured_seconds=measured["step_seconds"])
    return update_profile(file.read(run / "plan.json"), measured, run.name, device)


def told(taught: Taught) -> list[str]:
    from foretell.report.words import seconds

    if taught.why:
        return [f"profile     left as it is: {taught.why}"]
    assert taught.before_seconds is not None and taught.after_seconds is not None
    return [
        f"profile     {taught.note}",
        f"            this step: predicted {seconds(taught.before_seconds)} before and {seconds(taught.after_seconds)} now, "
        f"measured {seconds(taught.measured_seconds)}",
        f"            written to {taught.profile}",
    ]


def as_json(taught: Taught) -> dict[str, Any]:
    return {
        "updated": not taught.why, "why_not": taught.why, "factors": dict(taught.factors),
        "before_seconds": taught.before_seconds, "after_seconds": taught.after_seconds,
        "measured_seconds": taught.measured_seconds, "file": str(taught.profile) if taught.profile else None,
        "note": taught.note,
    }  # fmt: skip
