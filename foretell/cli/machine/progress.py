"""How far a measurement is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from foretell.cli import common

Progress = Callable[[str, float], None]
SILENCE_SECONDS = 15.0
"""Between two lines where there is no terminal for a bar."""


@contextlib.contextmanager
def bar(lines: bool = False) -> Iterator[Progress]:
    """A bar on a terminal's stderr; elsewhere a line now and then if `lines`. What libraries print meanwhile goes to stderr as well."""
    if not (sys.stderr.isatty() and common.speaks()):
        with common.stdout_aside():
            yield _said_now_and_then() if lines else lambda doing, share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True, highlight=False, no_color=not common.coloured(sys.stderr))
    columns = (
        BarColumn(30),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with common.stdout_aside(), Bar(*columns, console=console, transient=True, redirect_stdout=False) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda doing, share: bar.update(task, completed=share, description=doing)


def _said_now_and_then() -> Progress:
    """A line on stderr at the beginning and every while: minutes without a word look like a hang."""
    last = [float("-inf")]

    def progress(doing: str, share: float) -> None:
        now = time.monotonic()
        if now - last[0] >= SILENCE_SECONDS:
            last[0] = now
            common.emit(f"{100 * share:3.0f} %  {doing}", sys.stderr)

    return progress
