"""Seconds, money and joules for people: about three digits, the unit that reads best."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from foretell.units import human_bytes, human_seconds

_SHORT = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
_LONG = (("years", 365.25 * 86400), ("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0))
_CURRENCIES = {"USD": "$", "EUR": "€", "GBP": "£"}


def number(value: float) -> str:
    """Three digits or so: 0.0123, 1.42, 14.2, 142, 57,700."""
    if value != value or abs(value) == float("inf"):
        return "unknown"
    rounded = float(f"{value:.3g}")
    if abs(rounded) >= 100:
        return f"{rounded:,.0f}"
    if abs(rounded) >= 1:
        return f"{rounded:.1f}" if abs(rounded) >= 10 else f"{rounded:.2f}"
    return f"{rounded:.3g}" if abs(rounded) >= 1e-4 or not rounded else f"{rounded:.1e}"


def seconds(value: float) -> str:
    """`142 ms`."""
    unit, scale = _unit(value, _SHORT)
    return f"{number(value / scale)} {unit}"


def step_span(value: float, low: float, high: float) -> str:
    """`142 ms (131–155)`: all three in the unit of the first."""
    unit, scale = _unit(value, _SHORT)
    return f"{number(value / scale)} {unit} ({number(low / scale)}–{number(high / scale)})"


def run_span(value: float, low: float, high: float) -> str:
    """`200 days (185–219)`; the unit is one of which there are at least two."""
    unit, scale = next(((unit, scale) for unit, scale in _LONG if value >= 2 * scale), ("s", 1.0))
    return f"{number(value / scale)} {unit} ({number(low / scale)}–{number(high / scale)})"


def _unit(value: float, units: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """The largest unit of which there is one, else the smallest."""
    return next(((unit, scale) for unit, scale in units if abs(value) >= scale * 0.9995), units[-1])


def money(value: float, currency: str = "USD") -> str:
    """`$4.10`, `$19,700`, `$0.0016`."""
    sign = _CURRENCIES.get(currency, f"{currency} ")
    if value and abs(value) < 1:
        return f"{sign}{value:.2g}" if abs(value) >= 1e-4 else f"{sign}{value:.1e}"
    return f"{sign}{value:.2f}" if abs(value) < 100 else f"{sign}{number(value)}"


def per_steps(value: float, currency: str = "USD") -> str:
    """Money of one step, or of as many as cost a cent: `$0.16 per 1K steps`."""
    several = (("step", 1.0), ("1K steps", 1e3), ("1M steps", 1e6))
    count, scale = next(((count, scale) for count, scale in several if value * scale >= 0.01), several[-1])
    return f"{money(value * scale, currency)} per {count}"


def joules(value: float) -> str:
    """`612 J`, `1.20 kJ`, `3.40 MJ`."""
    unit, scale = _unit(value, (("GJ", 1e9), ("MJ", 1e6), ("kJ", 1e3), ("J", 1.0)))
    return f"{number(value / scale)} {unit}"


def kilowatt_hours(value: float) -> str:
    """Joules as kWh, MWh or GWh."""
    unit, scale = _unit(value / 3.6e6, (("GWh", 1e6), ("MWh", 1e3), ("kWh", 1.0)))
    return f"{number(value / 3.6e6 / scale)} {unit}"


def mass(kilograms: float) -> str:
    """`1.60 t`, `420 kg`, `12.0 g`."""
    unit, scale = _unit(kilograms, (("t", 1e3), ("kg", 1.0), ("g", 1e-3)))
    return f"{number(kilograms / scale)} {unit}"


def percent(share: float) -> str:
    """`52 %`; below ten a digit more."""
    return f"{100 * share:.1f} %" if 0 < abs(share) < 0.0995 else f"{100 * share:.0f} %"


def about(value: float, low: float, high: float) -> str:
    """`±8 %`: half the range, as a share of the value."""
    return f"±{50 * (high - low) / value:.0f} %" if value > 0 and high > low else ""


def folded(lines: Iterable[str], width: int) -> list[str]:
    """Lines no wider than a screen: what is too long goes on below, indented; commands to copy stay whole."""
    found: list[str] = []
    for line in lines:
        if len(line) <= width or line.lstrip().startswith("foretell "):
            found.append(line)
            continue
        label = re.match(r"(  )?\w+  +", line)  # beside which the words go on
        indent = " " * (len(label[0]) if label else min(len(line) - len(line.lstrip()) + 4, width // 2))
        found += textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, replace_whitespace=False)
    return found


def rounds(said: Mapping[str, Any]) -> str:
    """What joining replicas takes: `a round of 100 steps: 1.1 s of messages, 0.8 s of them hidden, 3.3 MiB sent by a rank; ...`."""
    number = {name: value for name, value in said.items() if isinstance(value, int | float) and not isinstance(value, bool)}
    told = f"a round of {int(number.get('every', 0))} steps: "
    if "message_seconds" in number:
        hidden = f", {human_seconds(number['hidden_seconds'])} of them hidden" if number.get("hidden_seconds") else ""
        told += f"{human_seconds(number['message_seconds'])} of messages{hidden}, "
    told += f"{human_bytes(number.get('sent_bytes', 0))} sent by a rank"
    return told + (f"; replicas step {number['share']:.0%} of the time" if "share" in number else "")
