"""Bytes, counts and seconds: parsing what people type, printing what they read."""

from __future__ import annotations

import re

from foretell.errors import UserError

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_BINARY = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1024**4}
_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}

DTYPE_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint16": 2, "uint32": 4, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip


def parse_bytes(text: str) -> int:
    """`80GB`, `79.6 GiB`, `512` → bytes. Decimal and binary suffixes keep their own meaning."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = match.group(2).lower() if match else ""
    scale = _BINARY.get(unit) or _DECIMAL.get(unit)
    if match is None or scale is None:
        raise UserError(f"'{text}' is not an amount of memory", "write it like 80GB, 79.6GiB or 1048576")
    return int(float(match.group(1)) * scale)


_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str, *, bare: bool = False) -> float:
    """`90s`, `30m`, `4.5h`, `2d` → seconds; with `bare` also a number alone, which is seconds."""
    match = re.fullmatch(r"\s*([0-9]{1,12}(?:\.[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    unit = match[2] or ("s" if bare else "") if match else ""
    if match is None or unit not in _SECONDS or float(match[1]) <= 0:
        raise UserError(f"'{text}' is not a length of time", "write it like 30m, 4h or 2d")
    return float(match[1]) * _SECONDS[unit]


def human_seconds(seconds: float, *, short: bool = False) -> str:
    """`10 min`, `1.5 h`, `45 s`; with `short` as `parse_duration` reads it: `10m`."""
    for unit, letter in (("d", "d"), ("h", "h"), ("min", "m"), ("s", "s")):
        if seconds >= _SECONDS[unit] or unit == "s":
            number = f"{seconds / _SECONDS[unit]:.3g}"
            return f"{number}{letter}" if short else f"{number} {unit}"
    raise AssertionError


def gib(count: float) -> str:
    """Bytes as GiB, for people: two digits below ten, one above."""
    value = count / GIB
    return f"{value:.2f} GiB" if abs(value) < 10 else f"{value:,.1f} GiB"


def human_bytes(count: float) -> str:
    """Bytes in the unit that reads best."""
    for unit, scale in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= scale:
            return f"{count / scale:,.1f} {unit}"
    return f"{int(count)} B"


def human_count(count: float) -> str:
    """12_345_678 → 12.3M; 8_030_261_248 → 8.03B."""
    for suffix, scale in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if abs(count) >= scale:
            return f"{count / scale:.3g}{suffix}"
    return f"{count:g}"


def relative_error(predicted: float | None, measured: float | None) -> float | None:
    """predicted / measured - 1: with a plus, more was predicted than measured. The one sign of every table, chart and line."""
    return predicted / measured - 1 if predicted is not None and measured else None


def signed_percent(share: float) -> str:
    """`+3.1 %`, `-12.0 %`."""
    return f"{100 * share:+.1f} %"
