"""`foretell zoo check`: whether what is predicted of the zoo's models holds on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from foretell.cli import common
from foretell.errors import UnknownName, UserError
from foretell.units import relative_error, signed_percent

DEVICES = ("cpu", "cuda")


def check(
    name: str | None = typer.Argument(None, metavar="NAME", help="A small model of `foretell zoo`, such as gpt-tiny.", show_default=False),
    all: bool = typer.Option(False, "--all", help="Every module that has a paper: trace, memory, time, plan, ranks, trap."),
    device: str = typer.Option("cpu", "--device", metavar="NAME", help="Where to run: cpu or cuda."),
    keep: Path | None = typer.Option(None, "--keep", metavar="FILE", show_default=False,
                                     help="Append each row as it is known; rows that are there are not made again."),
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:  # fmt: skip
    """Predict small models, really run them here, plan them for half the memory, run that too, and compare.

    Exit 0 where all rows pass or say why they cannot, 1 where one fails; seconds decide with --all alone.
    """
    import foretell.zoo as zoo

    if (name is None) == (not all):
        raise UserError("give either NAME or --all", "foretell zoo check gpt-tiny, or foretell zoo check --all")
    if device not in DEVICES:
        raise UserError(f"--device {device!r} is none of {', '.join(DEVICES)}", "leave it away for this CPU")
    if keep is not None and (keep.is_dir() or not keep.absolute().parent.is_dir()):
        raise UserError(f"--keep {keep} is no file that can be written", "name a file in a folder that is there")
    if name is not None and name not in zoo.names() and name not in {entry.module for entry in zoo.ENTRIES.values()}:
        raise UnknownName("model", name, zoo.names(), "see `foretell zoo`")
    if name is not None and device == "cpu" and keep is None:
        return tell(common.call(lambda: _check(name), f"checking {name}"), json=json)
    rows = common.call(lambda: _rows(name, device, keep), f"checking {name or 'the zoo'}")
    return tell_rows(rows, json=json)


def _check(name: str) -> Any:
    from foretell import api

    return api.check(name)


def _rows(name: str | None, device: str, keep: Path | None) -> list[Any]:
    from foretell.prove import zoo as checks

    entries = [checks.small(name)] if name is not None else checks.every()
    try:
        return checks.check(checks.asked_of(entries), device=device, keep=keep, progress=_say)
    except KeyboardInterrupt:
        if keep is not None:
            _say(f"stopped; finished rows are in {keep}, and the same command goes on after them")
        raise


def _say(text: str) -> None:
    import sys

    common.emit(text, sys.stderr)


# --- telling ---------------------------------------------------------------------------------------------------------


def tell_rows(rows: list[Any], *, json: bool) -> int:
    """Print the table; the exit status."""
    from foretell.prove import zoo_rows

    if json:
        content = {"rows": [row.to_json() for row in rows], "summary": zoo_rows.summary(rows)}
        common.emit_json({"assumptions": ["fp32, eager, adamw-fused, synthetic data, random weights"], "zoo": content})
    else:
        common.emit("\n".join(zoo_rows.table(rows)))
    return common.NO_OR_FAILED if any(row.status == zoo_rows.FAIL for row in rows) else common.YES


def tell(found: Any, *, json: bool) -> int:
    """Print an `api.Check`; the exit status."""
    status = common.YES if found.ok else common.NO_OR_FAILED
    predicted, measured = getattr(found, "predicted_seconds", None), getattr(found, "measured_seconds", None)
    if json:
        from foretell.report import schema

        content = {
            "name": found.name,
            "ok": found.ok,
            "predicted_bytes": found.predicted_bytes,
            "measured_bytes": found.measured_bytes,
            "relative_error": found.error,
            "predicted_seconds": predicted,
            "measured_seconds": measured,
            "relative_error_of_seconds": relative_error(predicted, measured),
            "lines": list(found.lines),
            "prediction": schema.answer(found.prediction) if found.prediction is not None else None,
            "rows": [row.to_json() for row in getattr(found, "rows", ())],
        }
        assumptions = content["prediction"]["assumptions"] if found.prediction is not None else []
        common.emit_json({"assumptions": assumptions, "check": content})
        return status
    from foretell.units import human_bytes

    if found.prediction is not None:
        common.emit_screen(found.prediction)
        common.emit("")
    told = (
        f"{'OK' if found.ok else 'FAILED'}  {found.name}: predicted {human_bytes(found.predicted_bytes)}, "
        f"measured {human_bytes(found.measured_bytes)}, error {found.error:+.1%}"
    )
    common.emit("\n".join([*found.lines, told, *_step_time(predicted, measured), *_columns(getattr(found, "rows", ()))]))
    return status


def _columns(rows: Sequence[Any]) -> list[str]:
    """What else was checked."""
    from foretell.prove import zoo_rows

    return ["", *zoo_rows.table(rows)] if rows else []


def _step_time(predicted: float | None, measured: float | None) -> list[str]:
    """The line about seconds, where both are known."""
    from foretell.report.words import seconds

    if not predicted or not measured:
        return []
    return [
        f"    step: predicted {seconds(predicted)}, measured {seconds(measured)}, error {signed_percent(predicted / measured - 1)}"
    ]
