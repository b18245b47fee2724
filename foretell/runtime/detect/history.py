"""What is left of a run for a report: what each rank took over time, what was found, and who waited for whom at the end. No torch."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from foretell.decode import json_of, value_of
from foretell.runtime.detect.hangs import HangReading, read_hang
from foretell.runtime.detect.layout import FOLDER, HISTORY
from foretell.runtime.detect.records import positions_of, read_all, step_table
from foretell.runtime.detect.slow import excess_of

_MOST_BYTES = 64 * 2**20
_PARTS = 40
_FEW = 8


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Some seconds of a run: medians over these steps, a number for each rank."""

    steps: tuple[int, int]
    step_seconds: float
    excess: tuple[float, ...]
    """Seconds that each worked longer than the others of its role."""
    mean_excess: tuple[float, ...]
    """The same on average, in which few long steps count."""
    waited: tuple[float, ...]
    delayed: tuple[float, ...]


def read_history(run: Path) -> list[RankTimes]:
    """All rows that are whole and of as many ranks as the last; what the rings still hold, where the run ended before it wrote any."""
    found: list[RankTimes] = []
    with suppress(OSError), Path(run, FOLDER, HISTORY).open("rb") as stream:
        for line in stream.read(_MOST_BYTES).split(b"\n"):
            with suppress(ValueError):
                row = value_of(RankTimes, json_of(line))
                numbers = (row.step_seconds, *row.excess, *row.mean_excess, *row.waited, *row.delayed)
                lengths = {len(one) for one in (row.excess, row.mean_excess, row.waited, row.delayed)}
                if all(math.isfinite(one) for one in numbers) and len(lengths) == 1:
                    found.append(row)
    found = [row for row in found if len(row.excess) == len(found[-1].excess)]
    if len(found) >= _FEW:
        return found
    rings = _of_rings(run)  # of a short run they hold every step
    return rings if rings and (not found or rings[0].steps[0] <= found[0].steps[0]) else found


def _of_rings(run: Path) -> list[RankTimes]:
    rings = read_all(run)
    table = step_table([ring.steps for ring in rings], after=1)
    if len(rings) < 2 or not len(table):
        return []
    size = max(1, len(table) // _PARTS)
    parts = [table.at(slice(first, first + size)) for first in range(0, len(table), size)]
    roles = [ring.header.role for ring in rings]
    found = []
    for part in parts:
        excess = excess_of(part.own, roles)
        columns = {name: tuple(rows.mean(axis=1).tolist()) for name, rows in (("waited", part.waited), ("delayed", part.delayed))}
        found.append(RankTimes(
            steps=(int(part.steps[0]), int(part.steps[-1])), step_seconds=float(part.whole.mean()), excess=tuple(excess.mean(axis=1).tolist()),
            mean_excess=tuple(excess.mean(axis=1).tolist()), **columns,
        ))  # fmt: skip
    return found


def last_hang(run: Path) -> HangReading | None:
    """Who waited for whom when the rings were last written; None where nobody did, or a rank's ring is gone."""
    rings = read_all(run)
    if len(rings) < 2 or len(rings) < rings[0].header.world:
        return None
    return read_hang(positions_of(rings))
