"""`foretell zoo`: which models are known by name, and whether predictions of them hold here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from foretell.cli import common
from foretell.errors import UnknownName

if TYPE_CHECKING:
    from foretell.zoo import Entry


def listing(
    context: typer.Context,
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:
    """List the models known by name: what they are and the sizes they are taken at by default."""
    if context.invoked_subcommand is not None:
        return common.YES
    from foretell import zoo

    entries = [zoo.get(name) for name in zoo.names()]
    if json:
        return common.emit_json({"models": [_as_json(entry) for entry in entries]})
    common.emit("\n".join(_table(entries)))
    return common.YES


def check(
    name: str = typer.Argument(metavar="NAME", help="A small model of `foretell zoo`, such as gpt-tiny."),
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:
    """Predict a small model, really run it on this CPU, and compare. Exit 0 they agree, 1 they do not."""
    from foretell import zoo

    if name not in zoo.names():
        raise UnknownName("model", name, zoo.names(), "see `foretell zoo`")
    return tell(common.call(lambda: _check(name), f"checking {name}"), json=json)


def _check(name: str) -> Any:
    from foretell import api

    return api.check(name)


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
            "relative_error_of_seconds": predicted / measured - 1 if predicted and measured else None,
            "lines": list(found.lines),
            "prediction": schema.answer(found.prediction) if found.prediction is not None else None,
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
    common.emit("\n".join([*found.lines, told, *_step_time(predicted, measured)]))
    return status


def _step_time(predicted: float | None, measured: float | None) -> list[str]:
    """The line about seconds, where both are known."""
    from foretell.report.words import seconds

    if not predicted or not measured:
        return []
    return [
        f"    step: predicted {seconds(predicted)}, measured {seconds(measured)}, error {predicted / measured - 1:+.1%}"
    ]


def _as_json(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name, "domain": entry.domain, "summary": entry.summary, "seq": entry.seq, "image": entry.image,
        "small": entry.small, "settings": dict(entry.config),
    }  # fmt: skip


def _sizes(entry: Entry) -> str:
    seq = f"{entry.seq} tokens" if entry.seq else ""
    side = f"{entry.image}x{entry.image}" if entry.image else ""
    return ", ".join(filter(None, (seq, side))) or "-"


def _table(entries: list[Entry]) -> list[str]:
    rows = [("name", "domain", "default size", "what it is")]
    rows += [(entry.name, entry.domain, _sizes(entry), entry.summary) for entry in entries]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join([*(cell.ljust(wide) for cell, wide in zip(row, widths, strict=False)), row[3]]) for row in rows]
    return [
        *lines,
        "",
        "Others: hf:TYPE, hf:config.json, timm:NAME, torchvision:NAME, file.py:function",
        f"Next:   foretell fit {entries[0].name} --on H100",
    ]
