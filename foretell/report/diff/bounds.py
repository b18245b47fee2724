"""How far a number may grow from one revision to the next: `+2%`, `+200MiB`, `+3ms`, `+1M` or `none`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from foretell.errors import UserError
from foretell.units import parse_bytes

MEMORY, STEP, PARAMETERS = "memory", "step", "parameters"
BOUNDED = (MEMORY, STEP, PARAMETERS)
DEFAULTS = {MEMORY: "+2%", STEP: "+5%", PARAMETERS: "+0%"}
NO_BOUND = "none"
_EXAMPLES = {MEMORY: "+2% or +200MiB", STEP: "+5% or +3ms", PARAMETERS: "+0% or +1M"}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_ROUNDING = 1e-14
"""Of a value: less is arithmetic and no growth."""
_AMOUNT = re.compile(r"\s*\+?\s*([0-9]+(?:\.[0-9]+)?)\s*([%A-Za-zµ]*)\s*")


@dataclass(frozen=True, kw_only=True)
class GrowthBound:
    """The largest growth that is allowed; neither a share nor an amount: any."""

    text: str
    """As it was written."""
    share: float | None = None
    amount: float | None = None

    @property
    def unlimited(self) -> bool:
        return self.share is None and self.amount is None

    def allows(self, base: float, head: float) -> bool:
        """Whether growth from `base` to `head` is within it; shrinking always is."""
        if self.unlimited:
            return True
        limit = self.amount if self.amount is not None else (self.share or 0.0) * abs(base)
        return head - base <= limit + _ROUNDING * max(abs(base), abs(head))


def parse(what: str, text: str, where: str = "") -> GrowthBound:
    """The bound that a text says; `where` it was written, for the error."""
    named = where or f"--max-{what}"
    plain = text.strip()
    if plain.casefold() == NO_BOUND:
        return GrowthBound(text=NO_BOUND)
    found = _AMOUNT.fullmatch(plain)
    if found is None:
        raise _wrong(what, named, text)
    number, unit = float(found[1]), found[2]
    written = f"+{plain.lstrip('+ ')}"
    if unit == "%":
        return GrowthBound(text=written, share=number / 100)
    amount = _amount(what, number, unit)
    if amount is None or not math.isfinite(amount):
        raise _wrong(what, named, text)
    return GrowthBound(text=written, amount=amount)


def _amount(what: str, number: float, unit: str) -> float | None:
    """In bytes, seconds or parameters; None for a unit that is not one of these."""
    if what == MEMORY:
        try:
            return float(parse_bytes(f"{number:.6f}{unit}")) if unit else None
        except UserError:
            return None
    units = _SECONDS if what == STEP else _COUNTS
    scale = units.get(unit.lower())
    return None if scale is None else number * scale


def _wrong(what: str, named: str, text: str) -> UserError:
    return UserError(f"{named} {text!r} is not a bound on growth", f"write it like {_EXAMPLES[what]}, or {NO_BOUND}")


def all_of(given: Mapping[str, str | None], base: Mapping[str, GrowthBound] | None = None, where: str = "") -> dict[str, GrowthBound]:
    """A bound for each quantity: as given, else as in `base`, else the usual."""
    usual = base or {what: parse(what, text) for what, text in DEFAULTS.items()}
    return {what: usual[what] if (text := given.get(what)) is None else parse(what, text, f"{where} {what}".strip() if where else "")
            for what in BOUNDED}  # fmt: skip
