"""Measure a sealed forecast: every row in a process of its own, written as soon as it is known.

A row that runs out of memory, crashes or hangs is a row. What was measured stays when the run is stopped, and a later one
goes on after it.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from foretell.decode import decode
from foretell.errors import UserError
from foretell.prove.types import Forecast, Sealed

PRELOAD = ["torch", "foretell.prove.measure", "foretell.zoo", "foretell.hardware.this_machine"]
ROW_SECONDS = 90.0
"""After which a process that does not answer is ended."""
COMPILE_SECONDS = 300.0
WAVE = 6
"""Configurations that are compiled side by side."""

Progress = Callable[[str], None]
Row = dict[str, Any]


def rows_path(sealed: Path) -> Path:
    return sealed.with_name(f"{sealed.stem}.rows.jsonl")


def read_rows(path: Path, seal: str) -> dict[int, Row]:
    """Rows that were measured for this seal, by their position; a row of other types than a measurement's is an error."""
    found: dict[int, Row] = {}
    if not path.exists():
        return found
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}", "check the path and its permissions") from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue  # cut off when it was stopped
        if isinstance(row, dict) and row.get("seal") == seal:
            kept = decode(_Kept, row, f"{path}, line {number}", "delete that line and measure it again")
            found[kept.position] = row
    return found


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """What a process says of a row that it ran."""

    allocated: float | None
    reserved: float | None
    device: float | None
    seconds: float | None
    error: str | None
    why: str | None
    ran: bool | None
    pacers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """A row of the file."""

    position: int
    measured: _Seen
    limited: _Seen | None


# ---------------------------------------------------------------------------------------------- processes


def in_child(function: str, *args: Any, timeout: float = ROW_SECONDS) -> Row:
    """Call a function, of `prove.measure` unless its module is named, in a fresh process whose parent has torch loaded and no
    device open."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin keep others from the cores
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(theirs, function, args), daemon=True)
    process.start()
    theirs.close()
    try:
        answer: Row = ours.recv() if ours.poll(timeout) else {"error": f"no answer in {timeout:.0f} s"}
        if "error" in answer and answer["error"].startswith("no answer"):
            process.kill()
    except EOFError:
        process.join(10)
        answer = {"error": f"the process ended with {process.exitcode} and no answer"}
    except BaseException:
        process.kill()
        raise
    finally:
        ours.close()
    process.join(10)
    return answer


def _call(pipe: Connection, function: str, args: Sequence[Any]) -> None:
    module, _, name = function.rpartition(".")
    try:
        answer = getattr(importlib.import_module(module or "foretell.prove.measure"), name)(*args)
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {error}"[:300]}
    pipe.send(answer)
    pipe.close()


def this_device() -> Row:
    """Name, kind and memory of the device here."""
    found = in_child("look", timeout=120)
    if "error" in found:
        raise UserError(f"this machine's device cannot be asked: {found['error']}", "see `foretell doctor`")
    return found


def check_device(sealed: Sealed, here: Mapping[str, Any]) -> None:
    """Refuse to measure on another device than the one that was predicted."""
    mine = here["reported_as"] if here["backend"] == "cpu" else here["device"]
    if mine != sealed.device:
        raise UserError(
            f"the forecast is for {sealed.device} and this is {mine}",
            "run it there, or seal one for this device with `foretell compare prove`",
        )


# ---------------------------------------------------------------------------------------------- measuring


def measure(
    sealed: Sealed, seal: str, path: Path, about: Mapping[str, Any], *, seconds: float = float("inf"),
    progress: Progress = lambda _: None,
) -> dict[int, Row]:  # fmt: skip
    """Measure what is not measured yet, until the time is up; all rows there are."""
    done = read_rows(path, seal)
    until = time.monotonic() + seconds
    for position, found in _measured(sealed, set(done), until, progress):
        row = {"seal": seal, "position": position, **found, **about}
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
        done[position] = row
    return done


def _measured(sealed: Sealed, done: set[int], until: float, progress: Progress) -> Iterator[tuple[int, Row]]:
    left = [(position, row) for position, row in enumerate(sealed.rows) if position not in done and not row.error]
    compiled = [(position, row) for position, row in left if row.config.compile != "none"]
    for first in range(0, len(compiled), WAVE):
        if time.monotonic() > until:
            return
        progress(f"compiling {len(compiled[first : first + WAVE])} configurations")
        yield from _wave(compiled[first : first + WAVE])
    for position, row in left:
        if time.monotonic() > until:
            return
        if row.config.compile == "none":
            progress(f"{position + 1} of {len(sealed.rows)}: {row.config.words()}")
            yield position, _one(sealed, row)


def _one(sealed: Sealed, row: Forecast) -> Row:
    said = row.config.to_json()
    if sealed.backend == "cpu":
        return {"measured": in_child("on_cpu", said, list(sealed.pacers))}
    found: Row = {"measured": in_child("freely", said)}
    if row.limit_bytes is not None:
        found["limited"] = in_child("limited", said, row.limit_bytes)
    return found


def _wave(rows: Sequence[tuple[int, Forecast]]) -> list[tuple[int, Row]]:
    """Compile side by side; each is timed when all are ready, one after another."""
    with tempfile.TemporaryDirectory(prefix="foretell-") as name:
        folder = Path(name)
        running = [_compiling(folder / f"{position}.asked", row) for position, row in rows]
        try:
            began = time.monotonic()
            while time.monotonic() - began < COMPILE_SECONDS:
                if all((folder / f"{at}.ready").exists() or p.poll() is not None for (at, _), p in zip(rows, running, strict=True)):
                    break
                time.sleep(0.2)
            (folder / "go").touch()
            for process in running:
                try:
                    process.wait(ROW_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
        finally:
            for process in running:
                if process.poll() is None:
                    process.kill()
        return [(position, {"measured": _answer(folder / f"{position}.json")}) for position, _ in rows]


def _compiling(asked: Path, row: Forecast) -> subprocess.Popen[bytes]:
    asked.write_text(json.dumps(row.config.to_json()))
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    command = [sys.executable, "-m", "foretell.prove.measure", str(asked)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _answer(path: Path) -> Row:
    found: Row = json.loads(path.read_text()) if path.exists() else {"error": "no answer"}
    return found
