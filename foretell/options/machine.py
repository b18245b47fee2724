"""Options of what is measured here: `probe` and `compare prove`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from foretell.options.describe import option


def silent(doing: str, share: float) -> None:
    """No sign of life."""


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """How this machine is measured."""

    full: bool = option(False, "Some minutes: more cases, better predictions.")
    device: str = option("auto", "What to measure.", metavar="auto|cpu|cuda")
    out: Path | None = option(None, "Where to keep the profile (or the cluster file).", metavar="FILE", shown="")
    resume: bool = option(False, "Resume a probe that was stopped.")
    force: bool = option(False, "Measure a GPU that somebody else is using.")
    progress: Callable[[str, float], None] = silent
    """Is told what is going on, and the share that is done."""


@dataclass(frozen=True, kw_only=True)
class ProveOptions:
    """Which configurations nobody chose are predicted, sealed and run."""

    seed: str | None = option(None, "What to draw from; default today's date.", metavar="TEXT")
    count: int = option(20, "How many configurations.", flag="-n", metavar="N")
    seconds: float = option(1e9, "Start no new row after this long.", metavar="S", shown="")
