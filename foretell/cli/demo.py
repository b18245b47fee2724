"""`foretell demo`: the whole loop on this machine, small."""

from __future__ import annotations

from typing import Any

import typer

from foretell.cli import common
from foretell.cli.zoo import tell


def demo(
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:
    """Predict a small model's memory and step time, really run it here, and print both. Exit 0 they agree, 1 they do not."""
    return tell(common.call(_demo, "running the demo"), json=json)


def _demo() -> Any:
    from foretell import api

    return api.demo()
