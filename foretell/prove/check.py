"""A small zoo model, predicted as this CPU runs it, beside a real run of it here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretell.errors import ModelError

if TYPE_CHECKING:
    from foretell.prove.zoo_rows import CheckRow
    from foretell.quantities import Prediction


@dataclass(frozen=True, kw_only=True)
class Check:
    """A prediction held against a real run on this machine."""

    name: str
    predicted_bytes: int
    measured_bytes: int
    ok: bool
    lines: tuple[str, ...] = ()
    prediction: Prediction | None = None
    predicted_seconds: float | None = None
    """Of a step on this CPU; None where no profile of a CPU is at hand."""
    measured_seconds: float | None = None
    rows: tuple[CheckRow, ...] = ()
    """All that was checked, a row for each phase."""

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def check(name: str) -> Check:
    """Trace a small zoo model as this CPU runs it, predict it, really run it, plan it for half the memory, run that; compare.

    A module with phases is checked in each, and in all of them in turn; bytes and seconds are those of the first.
    """
    from foretell.prove import zoo as checks
    from foretell.prove.zoo_rows import FAIL
    from foretell.simulate.pace import Pace
    from foretell.units import human_bytes

    rows = tuple(checks.check(checks.asked_of([checks.small(name)])))
    first = rows[0]
    if not first.predicted_bytes or not first.measured_bytes:
        raise ModelError(f"{first.title}: {first.reason}", "see `foretell zoo` for others")
    lines: tuple[str, ...] = (
        f"traced {first.title}: {first.ops} ops on fake tensors",
        f"predicted peak in tensors  {human_bytes(first.predicted_bytes)}",
        f"measured peak in tensors   {human_bytes(first.measured_bytes)}  ({100 * (first.predicted_bytes / first.measured_bytes - 1):+.1f} %)",
    )
    if first.pace and first.host_pace and first.pacers:
        lines += (Pace(ops=first.pace, host=first.host_pace, models=first.pacers).words,)
    return Check(
        name=name, predicted_bytes=first.predicted_bytes, measured_bytes=first.measured_bytes, lines=lines, rows=rows,
        ok=all(row.status != FAIL or row.failed == ("time",) for row in rows),
        predicted_seconds=first.predicted_seconds, measured_seconds=first.measured_seconds,
    )  # fmt: skip
