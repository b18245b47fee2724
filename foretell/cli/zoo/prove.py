"""`foretell compare prove`: predict configurations nobody chose, lock the predictions, run them, report every row."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from foretell.cli import common
from foretell.errors import UserError
from foretell.plan.text import shell_word

if TYPE_CHECKING:
    from foretell.prove.types import Sealed

USUAL_COUNT = 20
MOST_COUNT = 1000


def prove(
    seed: str | None = typer.Option(None, "--seed", metavar="TEXT", show_default=False, help="What to draw from; default today's date."),
    count: int = typer.Option(USUAL_COUNT, "-n", metavar="N", help="How many configurations."),
    on: str = typer.Option("auto", "--on", metavar="HW", help="One device; default: this machine's."),
    seal: Path | None = typer.Option(None, "--seal", metavar="FILE", show_default=False, help="Predict and seal only."),
    run: Path | None = typer.Option(None, "--run", metavar="FILE", show_default=False, help="Measure a sealed forecast here."),
    show: Path | None = typer.Option(None, "--show", metavar="FILE", show_default=False, help="Show the results again."),
    seconds: float = typer.Option(1e9, "--seconds", metavar="S", show_default=False, help="Start no new row after this long."),
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:  # fmt: skip
    """Draw configurations from a public seed, predict and seal them, run them here, tell all, misses first.

    Exit 0 where nothing that was said to fit ran out of memory, 1 where something did.
    """
    _check(seed, count, seal, run, show, on, seconds)
    if show is not None:
        return _tell(show, json=json)
    if run is not None:
        _measure(run, seconds)
        return _tell(run, json=json)
    name = seed or f"foretell-{time.strftime('%Y-%m-%d')}"
    path = seal or Path("runs") / f"prove-{name.replace('/', '-')}-{on.replace('/', '-')}-{count}.json"
    if seal is not None or not path.exists():
        _seal(name, count, on, path)
    if seal is not None:
        return _sealed(path, json=json)
    _measure(path, seconds)
    return _tell(path, json=json)


def _check(
    seed: str | None, count: int, seal: Path | None, run: Path | None, show: Path | None, on: str, seconds: float
) -> None:
    """What contradicts itself, before any work."""
    given = [name for name, value in (("--seal", seal), ("--run", run), ("--show", show)) if value is not None]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} exclude each other", "seal first, then run the sealed file")
    if (run or show) and seed is not None:
        raise UserError(f"--seed is given with {given[0]}, whose file has its own", "leave --seed away")
    if not 1 <= count <= MOST_COUNT:
        raise UserError(f"-n {count} is no number of configurations", f"ask for 1 to {MOST_COUNT}, such as -n 20")
    if seed is not None and not seed.strip():
        raise UserError("the seed is empty", "give any text, such as --seed 2026-11-15")
    if not seconds > 0:
        raise UserError(f"--seconds {seconds:g} is no time", "give seconds above zero")
    if seal is not None and seal.exists():
        raise UserError(f"{seal} is there already", "a sealed forecast is not replaced; give another path")
    if not given and on != "auto":
        raise UserError(f"--on {on} is given without --seal", "add --seal FILE to predict for a device that is not here")


# --- predicting ------------------------------------------------------------------------------------------------------


def _seal(seed: str, count: int, on: str, path: Path) -> str:
    """Predict and write the sealed file; a journal beside it lets a stopped one go on."""
    from foretell.api import proofs

    with common.stdout_aside():
        try:
            return proofs.seal(seed, count, on, path, progress=_say)
        except KeyboardInterrupt:
            _say("stopped; what was predicted is kept, and the same command goes on with it")
            raise


def _sealed(path: Path, *, json: bool) -> int:
    from foretell.prove import seal

    sealed, found = seal.read(path)
    if json:
        return common.emit_json({"assumptions": [], "prove": {"file": str(path), "sha256": found, **sealed.to_json()}})
    near = sum(row.limit_bytes is not None for row in sealed.rows)
    common.emit(
        f"sealed {len(sealed.rows)} configurations on {sealed.device}, {near} near a limit of memory, "
        f"{len(sealed.passed_over)} draws passed over\nfile   {path}\nsha256 {found}\nNext:  foretell compare prove --run {shell_word(path)}"
    )
    return common.YES


# --- measuring -------------------------------------------------------------------------------------------------------


def _measure(path: Path, seconds: float) -> None:
    from foretell.api import proofs

    with common.stdout_aside():
        try:
            proofs.measure(path, seconds, progress=_say)
        except KeyboardInterrupt:
            _say(f"stopped; what was measured is kept; resume with: foretell compare prove --run {shell_word(path)}")
            raise


def _say(text: str) -> None:
    """One line on stderr, written over where that is a terminal."""
    if not common.speaks():
        return
    if sys.stderr.isatty():
        sys.stderr.write("\r" + common.encodable(text, sys.stderr)[: common.width() - 1] + "\x1b[K")
        sys.stderr.flush()
    elif not text.endswith("configurations predicted"):
        common.emit(text, sys.stderr)


# --- telling ---------------------------------------------------------------------------------------------------------


def _tell(path: Path, *, json: bool) -> int:
    from foretell.prove import run, seal, tell

    sealed, found = seal.read(path)
    if sys.stderr.isatty() and common.speaks():
        sys.stderr.write("\r\x1b[K")
    rows = tell.judged(sealed, run.read_rows(run.rows_path(path), found))
    total = tell.summary(sealed, rows)
    if json:
        content = {"file": str(path), "sha256": found, "summary": total, "rows": [one.to_json() for one in rows], **_about(sealed)}
        common.emit_json({"assumptions": _assumptions(sealed), "prove": content})
    else:
        common.emit("\n".join(tell.lines(sealed, found, rows)))
    return common.NO_OR_FAILED if total["limits"]["wrong_fits"] else common.YES


def _about(sealed: Sealed) -> dict[str, Any]:
    whole = sealed.to_json()
    return {name: whole[name] for name in ("seed", "count", "device", "made", "profile", "code", "pacers", "passed_over")}


def _assumptions(sealed: Sealed) -> list[str]:
    said = ["peaks and seconds are of eager or compiled steps on random data, each in a process of its own"]
    if sealed.backend == "cpu":
        said.append("seconds are held at the pace of this CPU beside each row, by other small models")
    return said
