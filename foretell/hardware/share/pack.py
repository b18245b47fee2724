"""Measured cases as a few columns that compress well, and back.

    families   names of families
    names      names of ops
    attrs      attributes of ops, each list once
    patterns   [name, inputs, outputs, attrs]: an op, its tensors counted within its case
    cases      [family, number, shapes, patterns], one for each case; a shape is [dtype, sizes...]
    dtypes     names of dtypes
    ns         device time of every row, in nanoseconds, case by case
    host_ns    the host's, the same
    spread     of every row, in percent

Numbers are those of OpRow to four digits, the host's to three; what is equal in many cases is said once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from foretell.decode import Mismatch, shown
from foretell.hardware.profile import Case, OpRow
from foretell.trace.types import TensorSpec

COLUMNS = ("families", "names", "dtypes", "attrs", "patterns", "cases", "ns", "host_ns", "spread")
NANO = 1e-9
DIGITS, HOST_DIGITS = 4, 3
MOST_PERCENT = 9999


class _Table:
    """Values in the order they first came, each once."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}
        self.values: list[Any] = []

    def place(self, value: Any) -> int:
        key = json.dumps(value)
        if key not in self.places:
            self.places[key] = len(self.values)
            self.values.append(value)
        return self.places[key]


def packed(cases: Iterable[Case]) -> dict[str, Any]:
    """Columns of cases."""
    families, names, dtypes, attrs, patterns = (_Table() for _ in range(5))
    told: list[Any] = []
    ns: list[int] = []
    host: list[int] = []
    spread: list[int] = []
    for case in cases:
        shapes, ops = _Table(), []
        for row in case.rows:
            inputs, outputs = (
                [shapes.place([dtypes.place(spec.dtype), *spec.shape]) for spec in specs] for specs in (row.inputs, row.outputs)
            )
            ops.append(patterns.place([names.place(row.name), inputs, outputs, attrs.place(list(row.attrs))]))
            ns.append(_whole(row.seconds, DIGITS))
            host.append(_whole(row.host_seconds, HOST_DIGITS))
            spread.append(min(MOST_PERCENT, round(100 * row.spread)))
        told.append([families.place(case.family), case.number, shapes.values, ops])
    return {
        "families": families.values, "names": names.values, "dtypes": dtypes.values, "attrs": attrs.values,
        "patterns": patterns.values, "cases": told, "ns": ns, "host_ns": host, "spread": spread,
    }  # fmt: skip


def _whole(seconds: float, digits: int) -> int:
    """Nanoseconds, so many digits of them; what is not nothing stays at least one."""
    return max(round(float(f"{seconds / NANO:.{digits}g}")), int(seconds > 0))


def unpacked(columns: Mapping[str, Any]) -> tuple[Case, ...]:
    """Cases of columns; raises `Mismatch` where one refers to what is not there."""
    for name in COLUMNS:
        if not isinstance(columns.get(name), list):
            raise Mismatch(f"ops.{name}", "is missing" if name not in columns else "is no list")
    _texts(columns)
    ns, host, spread = (_numbers(columns, name) for name in ("ns", "host_ns", "spread"))
    if not len(ns) == len(host) == len(spread):
        raise Mismatch("ops", f"has columns of {len(ns)}, {len(host)} and {len(spread)} rows")
    found, at = [], 0
    for place, case in enumerate(columns["cases"]):
        try:
            family, number, shapes, ops = case
            specs = [TensorSpec(_sizes(sizes), columns["dtypes"][_index(dtype)]) for dtype, *sizes in shapes]
            rows = []
            for op in ops:
                name, inputs, outputs, attrs = columns["patterns"][_index(op)]
                read, written = (tuple(specs[_index(one)] for one in side) for side in (inputs, outputs))
                rows.append(OpRow(
                    columns["names"][_index(name)], read, written, tuple(columns["attrs"][_index(attrs)]), ns[at] * NANO,
                    spread[at] / 100, host[at] * NANO,
                ))  # fmt: skip
                at += 1
            found.append(Case(columns["families"][_index(family)], _index(number), tuple(rows)))
        except (TypeError, ValueError, IndexError):
            raise Mismatch(f"ops.cases[{place}]", f"is {shown(case)} and is no case of these columns") from None
    if at != len(ns):
        raise Mismatch("ops", f"has {len(ns)} rows, and its cases have {at}")
    return tuple(found)


def _texts(columns: Mapping[str, Any]) -> None:
    for name in ("families", "names", "dtypes"):
        wrong = next((one for one in columns[name] if type(one) is not str), None)
        if wrong is not None:
            raise Mismatch(f"ops.{name}", f"has {shown(wrong)} and should have texts")


def _numbers(columns: Mapping[str, Any], name: str) -> list[int]:
    """Whole, finite, not below zero: JSON's NaN and Infinity are none."""
    wrong = next((one for one in columns[name] if type(one) is not int or one < 0 or one > 10**15), None)
    if wrong is not None:
        raise Mismatch(f"ops.{name}", f"has {shown(wrong)} and should have whole numbers that are not negative")
    return list(columns[name])


def _index(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(value)
    return value


def _sizes(sizes: list[Any]) -> tuple[int, ...]:
    return tuple(_index(size) for size in sizes)
