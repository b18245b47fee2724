"""`foretell tune`: says what can be tuned."""

from __future__ import annotations

import typer

from foretell.cli import common


def tune(context: typer.Context, debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP)) -> int:
    """Search by prediction, measure the best few on this machine, keep what was measured."""
    common.emit(context.get_help())
    return common.BAD_INPUT
