"""What making a device cost: its mass, its metals and its CO2, from `catalog/footprint.toml`. All rough."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from foretell.hardware.types import Device


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Of one device, without the server around it."""

    mass_kg: float
    heavy_metals_kg: float
    """Copper above all, then iron, tin and nickel."""
    embodied_kg_co2: float
    """Cradle to gate."""
    lifetime_years: float
    """Over which it is spread."""
    sources: Mapping[str, str] = field(default_factory=dict)


def footprint(device: Device) -> Footprint | None:
    """By the device's name, else by its backend; None where nothing is known (Apple's chips, a CPU)."""
    table = _table()
    row = next((row for row in table["footprint"] if device.name in row.get("devices", ())), None)
    row = row or next((row for row in table["footprint"] if device.backend in row.get("backends", ())), None)
    if row is None:
        return None
    return Footprint(
        mass_kg=row["mass_kg"],
        heavy_metals_kg=row["mass_kg"] * table["heavy_metal_share"],
        embodied_kg_co2=row["embodied_kg_co2"],
        lifetime_years=table["lifetime_years"],
        sources={
            "mass_kg": row["mass_source"],
            "heavy_metals_kg": table["heavy_metal_source"],
            "embodied_kg_co2": row["embodied_source"],
            "lifetime_years": table["lifetime_source"],
        },
    )


@cache
def _table() -> dict[str, Any]:
    text = (resources.files("foretell.hardware") / "catalog" / "footprint.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
