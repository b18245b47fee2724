"""Hold measurements against a sealed forecast: which bands held, wrong "fits" first, then misses, then the rest."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretell.prove.types import Forecast, Sealed
from foretell.quantities import NO
from foretell.units import human_bytes, relative_error

QUANTITIES = ("allocated", "reserved", "device", "seconds")
WRONG_FIT, FAILED, MISS, HELD, CAREFUL = "wrong fit", "failed", "miss", "held", "too careful"
ORDER = (WRONG_FIT, FAILED, MISS, CAREFUL, HELD)
"""Kinds of rows in the order they are published; too careful: a limit was refused and the step got through."""

BUSY = 1.5
"""A CPU that takes so many times as long as its profile says has other work, which steps of several threads suffer from
most."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One row: what was said, what was seen, and whether it held."""

    position: int
    row: Forecast
    kind: str
    errors: Mapping[str, float] = field(default_factory=dict)
    """Quantity → predicted over measured, less one."""
    outside: tuple[str, ...] = ()
    """Quantities that were measured outside their bands."""
    measured: Mapping[str, float] = field(default_factory=dict)
    pace: float = 1.0
    """At which seconds were held."""
    ran: bool | None = None
    """Under the limit; None where there is none, or it was not tried."""
    why: str = ""

    @property
    def worst(self) -> float:
        return max((abs(self.errors[name]) for name in self.outside), default=max(map(abs, self.errors.values()), default=0.0))

    def to_json(self) -> dict[str, Any]:
        return {
            "position": self.position, "kind": self.kind, "words": self.row.config.words(), "errors": dict(self.errors),
            "outside": list(self.outside), "measured": dict(self.measured), "pace": self.pace, "ran": self.ran,
            "why": self.why,
            "forecast": self.row.to_json(),
        }  # fmt: skip


def pace_of(sealed: Sealed, measured: Mapping[str, Any]) -> float:
    """How much longer than by the profile other models took beside a row; 1 on a GPU."""
    ratios = [seconds / sealed.pacers[name] for name, seconds in measured.get("pacers", {}).items() if sealed.pacers.get(name)]
    return statistics.median(ratios) if ratios else 1.0


def judge(sealed: Sealed, position: int, found: Mapping[str, Any] | None) -> Judged | None:
    """A row beside its measurement; None where it was not measured yet."""
    row = sealed.rows[position]
    if row.error:
        return Judged(position=position, row=row, kind=FAILED, why=f"no prediction: {row.error}")
    if found is None:
        return None
    measured, limited = found.get("measured", {}), found.get("limited", {})
    pace = pace_of(sealed, measured)
    said: dict[str, float | None] = {**row.bytes, "seconds": pace * row.seconds if row.seconds else None}
    seen = {name: measured[name] for name in QUANTITIES if measured.get(name) and said.get(name)}
    errors = {name: relative_error(said[name], value) or 0.0 for name, value in seen.items()}
    bands = {name: (low, high) if name != "seconds" else (pace * low, pace * high) for name, (low, high) in row.bands.items()}
    outside = tuple(name for name, value in seen.items() if not bands[name][0] <= value <= bands[name][1])
    ran = limited.get("ran")
    why = measured.get("error") or limited.get("error") or limited.get("why") or ""
    kind = HELD
    if outside:
        kind = MISS
    elif ran and row.limit_verdict == NO:
        kind = CAREFUL
    if measured.get("error") or limited.get("error"):
        kind = FAILED
    if ran is False and row.limit_verdict != NO:
        kind = WRONG_FIT
    return Judged(
        position=position, row=row, kind=kind, errors=errors, outside=outside, measured=seen, pace=pace, ran=ran, why=why
    )


def judged(sealed: Sealed, rows: Mapping[int, Mapping[str, Any]]) -> list[Judged]:
    """All rows that are known, the worst first."""
    found = [judge(sealed, position, rows.get(position)) for position in range(len(sealed.rows))]
    return sorted((one for one in found if one is not None), key=lambda one: (ORDER.index(one.kind), -one.worst, one.position))


def summary(sealed: Sealed, found: Sequence[Judged]) -> dict[str, Any]:
    """Counts of kinds, of bands and of verdicts; errors by quantity."""
    kinds = {kind: sum(one.kind == kind for one in found) for kind in ORDER}
    quantities = {}
    for name in QUANTITIES:
        errors = [one.errors[name] for one in found if name in one.errors]
        if errors:
            sizes = sorted(map(abs, errors))
            quantities[name] = {
                "rows": len(errors), "held": sum(name in one.errors and name not in one.outside for one in found),
                "median_percent": 100 * statistics.median(sizes), "p90_percent": 100 * ninety(sizes),
                "bias_percent": 100 * statistics.median(errors), "worst_percent": 100 * max(errors, key=abs),
            }  # fmt: skip
    tried = [one for one in found if one.ran is not None]
    limits = {
        "rows": len(tried), "said_to_fit": sum(one.row.limit_verdict != NO for one in tried),
        "wrong_fits": sum(one.kind == WRONG_FIT for one in found),
        "refused": sum(one.row.limit_verdict == NO for one in tried),
        "refused_and_ran": sum(bool(one.ran) and one.row.limit_verdict == NO for one in tried),
    }  # fmt: skip
    return {
        "rows": len(sealed.rows), "measured": len(found), "kinds": kinds, "quantities": quantities, "limits": limits,
        "pace": statistics.median(one.pace for one in found) if found else 1.0,
    }  # fmt: skip


def ninety(ordered: Sequence[float]) -> float:
    """What nine of ten stay below, between the two nearest values."""
    return statistics.quantiles(ordered, n=10, method="inclusive")[8] if len(ordered) > 1 else ordered[0]


# ---------------------------------------------------------------------------------------------- words


def lines(sealed: Sealed, seal: str, found: Sequence[Judged]) -> list[str]:
    """The report for people."""
    total = summary(sealed, found)
    said = [f"sealed {sealed.made}  seed {sealed.seed!r}, {sealed.count} configurations on {sealed.device}, sha256 {seal}"]
    if total["measured"] < total["rows"]:
        said.append(f"{total['measured']} of {total['rows']} measured so far")
    said += [_quantity(name, figures) for name, figures in total["quantities"].items()]
    limits = total["limits"]
    if limits["rows"]:
        said.append(
            f"limits     {limits['rows']} rows run near a limit of memory: {limits['said_to_fit']} said to fit, "
            f"{limits['wrong_fits']} of them ran out; {limits['refused']} refused, {limits['refused_and_ran']} of them ran"
        )
    if total["pace"] > BUSY:
        said.append(f"this CPU took {total['pace']:.1f} times as long as its profile says: it is busy, and seconds say little")
    for kind in ORDER:
        mine = [one for one in found if one.kind == kind]
        if mine:
            said += ["", f"{_TITLES[kind]}: {len(mine)}", *(_line(one) for one in mine)]
    return said


_TITLES = {
    WRONG_FIT: "said to fit, and ran out of memory", FAILED: "no prediction, or no measurement", MISS: "outside a band",
    CAREFUL: "within all bands; a limit was refused, and the step got through", HELD: "within all bands",
}  # fmt: skip


def _quantity(name: str, figures: Mapping[str, float]) -> str:
    return (
        f"{name:<10} {figures['held']:.0f} of {figures['rows']:.0f} within the band; |error| median "
        f"{figures['median_percent']:.2f} %, p90 {figures['p90_percent']:.2f} %, worst {figures['worst_percent']:+.1f} %"
    )


def _line(one: Judged) -> str:
    parts = []
    for name in QUANTITIES:
        if name in one.errors:
            mark = "!" if name in one.outside else ""
            parts.append(f"{mark}{name} {_value(name, one.measured[name])} {one.errors[name]:+.1%}")
    if one.row.limit_bytes is not None:
        outcome = {True: "ran", False: "ran out", None: "not tried"}[one.ran]
        parts.append(f"in {human_bytes(one.row.limit_bytes)}: said {one.row.limit_verdict}, {outcome}")
    if one.why and one.kind in (FAILED, WRONG_FIT):
        parts.append(one.why)
    side = f", {one.row.config.image} pixels wide" if one.row.config.image else ""
    return f"  {one.position + 1:>3}  {one.row.config.words()}{side}\n       {'  '.join(parts)}"


def _value(name: str, value: float) -> str:
    return f"{1e3 * value:.2f} ms" if name == "seconds" else human_bytes(int(value))
