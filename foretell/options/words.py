"""Text of a flag as a value: `1T`, `30m`, `layers=4`. One line says what is wrong with it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from foretell.errors import UserError
from foretell.units import parse_bytes, parse_duration

MAX = "max"
_SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


def amount(flag: str) -> Callable[[str], float]:
    """`1T`, `300M`, `1.28e6`, `1_000` → a number above zero."""

    def read(text: str) -> float:
        match = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]?)\s*", text)
        scale = _SCALES.get(match.group(2).upper()) if match else None
        value = float(match.group(1).replace("_", "")) * scale if match and scale else 0.0
        if not 0 < value < math.inf:
            raise UserError(f"{flag} {text!r} is no amount", f"write a number above zero with K, M, B or T, such as {flag} 1.5B")
        return value

    return read


def duration(flag: str, example: str = "30m, 2h or 90") -> Callable[[str], float]:
    """`30m`, `2h`, `3d` or seconds."""

    def read(text: str) -> float:
        try:
            return parse_duration(text, bare=True)
        except UserError:
            raise UserError(f"{flag} {text!r} is not a length of time", f"write it like {example}") from None

    return read


def memory(flag: str) -> Callable[[str], int]:
    """`24GiB`, `24GB`, or `24` (GiB) in bytes."""

    def read(text: str) -> int:
        try:
            return parse_bytes(f"{text}GiB" if text.strip().replace(".", "", 1).isdigit() else text)
        except (UserError, OverflowError):
            raise UserError(f"{flag} {text!r} is not an amount of memory", "write it like 24GiB, 24GB or 24 (GiB)") from None

    return read


def size(flag: str) -> Callable[[str], int | str]:
    """A whole number, or `max`."""

    def read(text: str) -> int | str:
        if text.strip().casefold() == MAX:
            return MAX
        try:
            return int(text)
        except ValueError:
            raise UserError(f"{flag} {text!r} is no whole number, and not {MAX}", f"write it like {flag} 8 or {flag} {MAX}") from None

    return read


def names(text: str) -> tuple[str, ...]:
    """Names with commas between them."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def known_names(flag: str, known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Names with commas between them, each one of those known."""

    def read(text: str) -> tuple[str, ...]:
        found = names(text)
        strange = next((name for name in found if name not in known), None)
        if strange is not None or not found:
            raise UserError(f"{flag} {strange or text!r} is not known", f"known: {', '.join(known)}")
        return found

    return read


def overrides(settings: Sequence[str]) -> dict[str, Any]:
    """`KEY=VALUE` words as a mapping; a later one wins."""
    found: dict[str, Any] = {}
    for word in settings:
        key, equals, text = word.partition("=")
        if not equals or not key.strip() or not text:
            raise UserError(f"--set {word!r} is not KEY=VALUE", "write it like --set layers=4")
        found[key.strip()] = _value(text)
    return found


def _value(text: str) -> Any:
    """JSON if it is JSON, Python's True, False and None as such, otherwise the text itself."""
    if text in _PYTHON_WORDS:
        return _PYTHON_WORDS[text]
    try:
        return json.loads(text, parse_constant=_no_constant)
    except ValueError:
        return text


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def hints(words: Sequence[str]) -> dict[str, float]:
    """`PATTERN=NUMBER` words as a mapping; the pattern may hold '=' itself."""
    found: dict[str, float] = {}
    for word in words:
        pattern, equals, text = word.rpartition("=")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not equals or not pattern or not math.isfinite(value):
            raise UserError(f"--hint {word!r} is not PATTERN=NUMBER", "write it like --hint 'aten.nonzero*=0.5'")
        found[pattern] = value
    return found
