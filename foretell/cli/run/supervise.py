"""`foretell run supervise -- COMMAND`: any command, started again after a fault or a standstill."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

from foretell.cli import common
from foretell.errors import UserError
from foretell.options import words as texts

MOST_RESTARTS = 3
GRACE_SECONDS = 2.0


def supervise(
    max_restarts: int = typer.Option(MOST_RESTARTS, metavar="N",
        help="Start it again so often in a row; all of them again once it has run for five minutes."),
    stall_after: str | None = typer.Option(None, metavar="TIME", show_default=False,
        help="Without a sign of life for so long, such as 10m, it is ended and started again; default: never."),
    heartbeat: Path | None = typer.Option(None, metavar="FILE", show_default=False,
        help="The sign of life: this file changes. Default: what it writes to stdout and stderr."),
    grace: float = typer.Option(GRACE_SECONDS, metavar="SECONDS", help="From SIGTERM to SIGKILL, for one that stands still and for what it leaves."),
    notice: str | None = typer.Option(None, metavar="FILE|URL", show_default=False,
        help="Pass SIGUSR1 on when this file appears, or this address answers with a notice; with commas."),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:  # fmt: skip
    """Run a command and start it again when it fails; it leaves no process behind, however it or this one ends:

    foretell run supervise --stall-after 10m -- torchrun --nproc-per-node 8 train.py

    Signals are passed on. The exit status is the command's own, 128 and the signal's number where one ended it. It is not
    started again after the statuses 0, 2, 126, 127, 130 and 143. FORETELL_RESTARTS tells it how often it was started before;
    as a task of Slurm it gets RANK, WORLD_SIZE and the others as torchrun would give them.
    """
    from foretell.runtime.process.supervise import slurm
    from foretell.runtime.process.supervise.command import CommandKeeper, CommandRequest

    words = common.script_words()
    if not words:
        raise UserError("no command is given", "foretell run supervise -- torchrun --nproc-per-node 8 train.py")
    if max_restarts < 0:
        raise UserError(f"--max-restarts must not be negative, got {max_restarts}", "give --max-restarts 0 or more")
    if not 0 <= grace < float("inf"):
        raise UserError(f"--grace must be a number of seconds, got {grace}", "give such as --grace 10")
    stall_s = texts.duration("--stall-after", "30s, 10m or 1h")(stall_after) if stall_after is not None else None
    if heartbeat is not None and stall_s is None:
        raise UserError("--heartbeat says what a sign of life is, and nothing waits for one", "give --stall-after TIME as well")
    if stall_s is not None and not stall_s > 0:
        raise UserError(f"--stall-after {stall_after} is no time", "give such as 10m")
    request = CommandRequest(
        words=words, restarts=max_restarts, stall_s=stall_s, heartbeat=heartbeat, grace_s=grace,
        notices=texts.names(notice) if notice else (), environment=slurm.rank_variables(os.environ),
    )  # fmt: skip
    return CommandKeeper(request, lambda text: common.emit(f"foretell: {text}", sys.stderr)).run()
