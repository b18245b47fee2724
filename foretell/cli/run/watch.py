"""`foretell watch -- python train.py ...`: the script runs as it is; predicted beside measured, and why memory ran out."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import signal
import sys
import time
from pathlib import Path

import typer

from foretell.cli import common
from foretell.cli.options import TIME_LIMIT
from foretell.errors import UserError

_UNSEEN = ("-S", "-E", "-I")
"""Flags of Python with which it does not look for what watches."""
FEW_CORES = 4


def watch(
    on: str = typer.Option("auto", "--on", metavar="HW", help="What it runs on, for the prediction: auto (this machine) or a name such as H100."),
    memory_limit: str | None = typer.Option(None, metavar="BYTES", show_default=False,
        help="Let it use no more than this, such as 2GiB: of GPU memory on a GPU, of RAM on a CPU."),
    predict: str | None = typer.Option(None, metavar="before|beside|no", show_default=False,
        help="When the script is followed on fake tensors; default: beside the run, before it on fewer than 4 cores."),
    out: Path | None = typer.Option(None, metavar="FOLDER", show_default=False, help="The run folder; default: runs/SCRIPT-DATE."),
    time_limit: float = TIME_LIMIT,
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:  # fmt: skip
    """Run a training script for real, unchanged, and say on stderr how it does against its prediction:

    foretell watch -- python train.py --batch-size 64

    One line after the first steps, then only what drifts: slower steps, growing memory, waits for data. Where memory runs out:
    what held it, and what would have fitted. Exit status and output are the script's own.
    """
    from foretell.observe import record
    from foretell.observe.session import BEFORE, BESIDE, NO, Session, WatchRequest
    from foretell.trace.script.words import named
    from foretell.units import parse_bytes

    _streams()
    words = common.script_words()
    if words is None:
        raise UserError("no script is given", "foretell watch -- python train.py ...")
    script = named(words)
    unseen = next((word for word in words[1 : words.index(script.name)] if word in _UNSEEN), None)
    if unseen is not None:
        raise UserError(f"python {unseen} cannot be watched: it ignores PYTHONPATH", f"leave {unseen} out")
    predict = predict or (BESIDE if (os.cpu_count() or 1) >= FEW_CORES else BEFORE)
    if predict not in (BEFORE, BESIDE, NO):
        raise UserError(f"--predict {predict!r} is not known", "give before, beside or no")
    limit = parse_bytes(memory_limit) if memory_limit is not None else None
    if limit is not None and limit < 1 << 20:
        raise UserError(f"--memory-limit {memory_limit} is less than 1 MiB", "write it like 2GiB")
    if limit is not None and not on.strip().casefold().startswith(("auto", "cpu")):
        raise UserError(f"--memory-limit holds the script to it where it runs, and --on {on} may be another device", "leave --on out")
    path = out or _new_folder(Path("runs") / f"{Path(script.name).stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    asked = WatchRequest(script=script, on=on, limit=limit, predict=predict, out=path, time_limit=time_limit)
    status = Session(asked, record.Record(path, shlex.join(["foretell", *common.typed()]), common.versions()), say).run()
    if status < 0:  # ended by a signal: so does this
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _new_folder(path: Path) -> Path:
    """That folder, made here, or the first of `path-2`, `path-3`, ... that no other has made."""
    for number in itertools.count(1):
        found = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            found.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"the run folder {found} cannot be made: {error.strerror or error}", "give another --out") from error
        return found
    raise AssertionError("numbers do not end")


def _streams() -> None:
    """Standard streams that were closed lead nowhere: what is opened later would take their places, and be written to."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115  # for as long as the process


def say(line: str) -> None:
    """A line of its own on stderr, in one piece; a progress bar there is drawn anew."""
    text = common.encodable(f"foretell: {line}", sys.stderr) + "\n"
    if sys.stderr.isatty():
        text = "\r\x1b[K" + text
    with contextlib.suppress(OSError, ValueError):
        os.write(sys.stderr.fileno(), text.encode(sys.stderr.encoding or "utf-8", "replace"))
