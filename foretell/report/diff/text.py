"""Numbers, changes and verdicts of two revisions, as a terminal and a pull request both say them."""

from __future__ import annotations

from foretell.quantities import NO
from foretell.report import words
from foretell.report.diff.judge import (
    BROKEN,
    BYTES,
    GROWN,
    NEW,
    SECONDS,
    UNCOMPARED,
    WITHIN,
    DiffRow,
    Growth,
    ModelDiff,
    RevisionDiff,
)
from foretell.units import GIB, gib, human_bytes, human_count, signed_percent

VERDICTS = {WITHIN: "ok", GROWN: "GROWN", NEW: "new", BROKEN: "BROKEN", UNCOMPARED: "not compared"}
FITS_WORDS = {"fits": "fits", "tight": "tight", NO: "does not fit", "unknown": "unknown"}
SHOWN = 6
"""Lines of what grew, of each kind."""
COMMON_CAUSE = "both revisions are predicted the same way, so growth is judged by the predicted values"


def value(number: float | None, unit: str) -> str:
    if number is None:
        return "-"
    if unit == BYTES:
        return gib(number) if abs(number) >= GIB else human_bytes(number)
    return words.seconds(number) if unit == SECONDS else human_count(number)


def signed(number: float, unit: str) -> str:
    return f"{'+' if number > 0 else '-' if number < 0 else ''}{value(abs(number), unit)}"


def change(row: DiffRow) -> str:
    """`+16.0 MiB (+12.3 %)`."""
    if row.change is None:
        return "new" if row.base is None and row.head is not None else "-"
    if not row.change:
        return "0"
    return signed(row.change, row.unit) + (f" ({signed_percent(row.share)})" if row.share is not None else "")


def bound(row: DiffRow) -> str:
    return row.bound.replace("%", " %") if row.bound else "-"


def verdict(row: DiffRow) -> str:
    """Of one row; nothing where it is only told."""
    if row.base is None or row.head is None or not row.bound:
        return ""
    return "ok" if row.ok else "GROWN"


def before(growth: Growth, unit: str) -> str:
    return f"{'<= ' if growth.at_most else ''}{value(growth.base, unit)}" if growth.base else "-"


def outcome(one: ModelDiff) -> str:
    """A model in a few words: what grew, or why there is nothing to compare."""
    if one.verdict == GROWN:
        grown = [f"{row.name} {change(row)}, bound {bound(row)}" for row in one.grown]
        return "; ".join([*grown, *([f"no longer fits on {one.on}"] if one.stops_fitting else [])])
    if one.verdict == NEW:
        return f"new: {one.base_problem}" if one.base_problem else "new"
    if one.verdict == UNCOMPARED:
        return f"not compared, the base cannot be traced: {one.base_problem}"
    return one.head_problem if one.verdict == BROKEN else "within the bounds"


def title(one: ModelDiff) -> str:
    return " ".join(filter(None, (one.model, one.options, f"on {one.on}")))


def summary(found: RevisionDiff) -> str:
    """`2 models: 1 within the bounds, 1 grown`."""
    named = {WITHIN: "within the bounds", GROWN: "grown", NEW: "new", BROKEN: "broken", UNCOMPARED: "not compared"}
    counts = [(sum(one.verdict == name for one in found.models), said) for name, said in named.items()]
    if len(found.models) == 1:
        return named[found.models[0].verdict]
    return f"{len(found.models)} answers: " + ", ".join(f"{count} {said}" for count, said in counts if count)


def bounds(found: RevisionDiff) -> str:
    return ", ".join(f"{name} {one.text.replace('%', ' %')}" for name, one in found.bounds.items())


def confidence(one: ModelDiff) -> str:
    """`peak memory counted, device memory assumed, step time measured ±8 %`."""
    told = []
    for row in one.rows:
        spread = words.about(row.head, row.low, row.high) if row.head and row.low and row.high and row.unit == SECONDS else ""
        told.append(" ".join(filter(None, (row.name, row.provenance, spread))))
    return ", ".join(told)
