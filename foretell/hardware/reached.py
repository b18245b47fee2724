"""What messages reach of a link's nominal rate, and whose measured tables serve whom: `catalog/reached.toml`."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from foretell.hardware.catalog import find, table


class RateFraction(NamedTuple):
    """A fraction of a nominal rate, and where it is known from."""

    fraction: float
    source: str


@cache
def by_ring() -> dict[str, RateFraction]:
    """By name of a link, else by its kind, else under the empty name: the part of the nominal rate a large ring reaches."""
    rows = table("reached", {"fraction": float, "source": str}, {"link": str, "kind": str})
    return {row.get("link", row.get("kind", "")): RateFraction(row["fraction"], row["source"]) for row in rows}


@cache
def by_switch() -> dict[str, RateFraction]:
    """Link → buffer bytes per second of an all-reduce in the switch, over the nominal rate of the link."""
    rows = table("switch", {"link": str, "fraction": float, "source": str})
    return {row["link"]: RateFraction(row["fraction"], row["source"]) for row in rows}


@cache
def crossing() -> dict[str, float]:
    """Link → bytes per second of a ring of more than two cards that passes through the host's processors."""
    return {row["link"]: row["gb_per_s"] * 1e9 for row in table("crossing", {"link": str, "gb_per_s": float, "source": str})}


@cache
def same_wires() -> dict[str, tuple[str, ...]]:
    """Link → devices whose tables serve others that are joined so."""
    return {row["link"]: tuple(find(name).name for name in row["devices"]) for row in table("same_wires", {"link": str, "devices": list})}


@cache
def like() -> dict[str, dict[str, float]]:
    """Kind of link → devices whose tables speak for others of it, with their nominal bytes per second."""
    found: dict[str, dict[str, float]] = {}
    for row in table("like", {"kind": str, "device": str, "bytes_per_second": float}):
        found.setdefault(row["kind"], {})[find(row["device"]).name] = row["bytes_per_second"]
    return found
