"""What the zoo knows of a model without building it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Entry:
    """A model at one size."""

    name: str
    module: str
    """File of the zoo that builds it, without its folder."""
    config: Mapping[str, int | float | str | bool] = field(hash=False)
    domain: str
    """What it works on: text, image, points, graph, field, ..."""
    summary: str
    seq: int | None = None
    image: int | None = None
    small: bool = False
    """Small enough to be run by tests."""
    paper: str = ""
    """Short name of the paper whose structure it has."""
    task: str = ""
    """What is learned: lm, cls, seg, det, gen, match, ..."""
    motif: str = ""
    """What it computes that others do not: scatter, sort, scan, unrolled loop, frozen half, ..."""
    trap: str = ""
    """What of it a planner gets wrong, in a sentence."""
