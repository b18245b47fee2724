"""Several shared probes of one device as one: of everything that more than one measured, the middle.

The same seed draws the same cases on the same device, so rows of two files match one by one. A row that one file alone has is
scaled by how much slower that file is than the middle elsewhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from foretell.hardware.profile import Case, Measured, OpRow
from foretell.hardware.share.file import SharedProbe

TIMED_SECONDS = 5e-6
"""Shorter rows say little about how fast a device is."""
_TIMES = ("seconds", "host_seconds", "busy_seconds", "watts", "bytes_per_second", "rate", "clock_mhz")


@dataclass(frozen=True, kw_only=True)
class Combined:
    """The middle of several files."""

    measured: Measured
    factors: tuple[float, ...]
    """Of each file: its seconds beside the middle."""
    contradiction: str = ""

    @property
    def low(self) -> float:
        return min((1.0, *self.factors))

    @property
    def high(self) -> float:
        return max((1.0, *self.factors))


def combined(files: Sequence[SharedProbe], band: tuple[float, float]) -> Combined:
    """The middle of files of one device; `band` is what each of them alone is believed within."""
    if len(files) == 1:
        return Combined(measured=files[0].measured, factors=(1.0,))
    rows = [_rows(one.measured) for one in files]
    steps = [{_key(step["config"]): float(step["seconds"]) for step in one.measured.steps} for one in files]
    by_ops, by_steps = (_factors([_seconds(one) for one in rows]), _factors(steps))
    factors = tuple(a if abs(math.log(a)) > abs(math.log(b)) else b for a, b in zip(by_ops, by_steps, strict=True))
    newest = max(files, key=lambda one: one.measured.about.date).measured
    middle = replace(
        newest, cases=_cases(files, rows, by_ops), steps=_middles([one.measured.steps for one in files], ("config",)),
        levels=_middles([one.measured.levels for one in files], ("working_set_bytes",)),
        latency=_middles([one.measured.latency for one in files], ("working_set_bytes",)),
        rates=_middles([one.measured.rates for one in files], ("dtype", "side")),
        copies=_middles([one.measured.copies for one in files], ("name", "bytes")),
        power=_middles([one.measured.power for one in files], ("name",)),
        launch=_middle([one.measured.launch for one in files]), clocks=_middle([one.measured.clocks for one in files]),
        missing=tuple(stage for stage in newest.missing if all(stage in one.measured.missing for one in files)),
    )  # fmt: skip
    return Combined(measured=middle, factors=factors, contradiction=_contradiction(files, factors, band))


def _contradiction(files: Sequence[SharedProbe], factors: Sequence[float], band: tuple[float, float]) -> str:
    """The two that are furthest apart, where what one is believed within does not meet the other's."""
    slow, quick = max(range(len(files)), key=factors.__getitem__), min(range(len(files)), key=factors.__getitem__)
    if factors[slow] * band[0] <= factors[quick] * band[1]:
        return ""
    names = [f"{files[place].short} ({files[place].measured.about.date})" for place in (slow, quick)]
    return f"{names[0]} takes {factors[slow] / factors[quick]:.2f} times as long as {names[1]}: their bands do not meet, and the wider one is used"


# ---------------------------------------------------------------- rows

_Rows = dict[tuple[Any, ...], OpRow]


def _rows(measured: Measured) -> _Rows:
    return {(case.family, case.number, *row[:4]): row for case in measured.cases for row in case.rows}


def _seconds(rows: _Rows) -> dict[Any, float]:
    return {key: row.seconds for key, row in rows.items() if row.seconds > TIMED_SECONDS}


def _factors(files: Sequence[Mapping[Any, float]]) -> tuple[float, ...]:
    """Of each file: how much longer than the middle it takes, over what all of them have; 1 where that is nothing."""
    common = set(files[0]).intersection(*files[1:])
    if not common:
        return (1.0,) * len(files)
    middle = {key: geometric(one[key] for one in files) for key in common}
    return tuple(math.exp(median(math.log(one[key] / middle[key]) for key in common)) for one in files)


def geometric(values: Iterable[float]) -> float:
    """The middle: of two, what is as many times one as the other is of it."""
    logs = [math.log(value) for value in values if value > 0]
    return math.exp(median(logs)) if logs else 0.0


def _cases(files: Sequence[SharedProbe], rows: Sequence[_Rows], factors: Sequence[float]) -> tuple[Case, ...]:
    found: dict[tuple[str, int], dict[tuple[Any, ...], list[OpRow]]] = {}
    for one, factor in zip(rows, factors, strict=True):
        for key, row in one.items():
            alone = sum(key in other for other in rows) == 1
            scaled = row._replace(seconds=row.seconds / factor) if alone else row
            found.setdefault(key[:2], {}).setdefault(key, []).append(scaled)
    return tuple(Case(*case, tuple(_one(group) for group in groups.values())) for case, groups in found.items())


def _one(rows: Sequence[OpRow]) -> OpRow:
    return rows[0]._replace(
        seconds=geometric(row.seconds for row in rows), host_seconds=geometric(row.host_seconds for row in rows),
        spread=max(row.spread for row in rows),
    )  # fmt: skip


# ---------------------------------------------------------------- everything else


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _middles(files: Sequence[Sequence[Mapping[str, Any]]], names: Sequence[str]) -> tuple[Mapping[str, Any], ...]:
    """Entries that agree in `names`, each once with the middle of its figures."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for entries in files:
        for entry in entries:
            groups.setdefault(_key([entry.get(name) for name in names]), []).append(entry)
    return tuple({**group[0], **_middle(group, lambda name: name in _TIMES)} for group in groups.values())


def _middle(entries: Sequence[Mapping[str, Any]], wanted: Callable[[str], bool] = lambda _: True) -> dict[str, float]:
    names = dict.fromkeys(name for entry in entries for name in entry if wanted(name))
    every = {name: [entry[name] for entry in entries if isinstance(entry.get(name), int | float)] for name in names}
    return {name: float(median(values)) for name, values in every.items() if values}
