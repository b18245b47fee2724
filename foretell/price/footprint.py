"""How many devices a training uses up: devices whose whole life of work it takes, their mass and the CO2 of making them.

    devices = FLOPs ÷ (peak rate · MFU · seconds of a device's life), rounded up

by MFU and lifetime, as Falk et al. 2025 (arXiv 2512.04142, "From FLOPs to Footprints") count them. Not how many run at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from foretell.hardware.footprint import footprint
from foretell.hardware.types import Device

YEAR_SECONDS = 365 * 24 * 3600
"""A year as the paper counts it."""
MFUS, LIFETIMES_YEARS = (0.2, 0.4, 0.6), (1.0, 3.0, 5.0)
"""The regimes that the paper compares."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One regime: how well devices are used, and for how long."""

    mfu: float
    lifetime_years: float
    devices: int
    saves: float
    """Share of devices that it does without, beside the scenario that needs most."""
    mass_kg: float | None
    heavy_metals_kg: float | None
    embodied_kg_co2: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def devices_used_up(flops: float, peak_flops_per_second: float, mfu: float, lifetime_years: float) -> int:
    """Whole devices whose life of work so many FLOPs are."""
    if not (flops > 0 and peak_flops_per_second > 0 and 0 < mfu <= 1 and lifetime_years > 0):
        raise ValueError(f"{flops:g} FLOPs at {mfu:g} of {peak_flops_per_second:g} FLOP/s over {lifetime_years:g} years are no training")
    return ceil(flops / (peak_flops_per_second * mfu * lifetime_years * YEAR_SECONDS))


def scenarios(
    flops: float, device: Device, *, dtype: str = "bfloat16", mfus: Sequence[float] = MFUS, lifetimes: Sequence[float] = LIFETIMES_YEARS
) -> tuple[Scenario, ...]:
    """Every MFU with every lifetime, the one that needs most devices first where they are given from low to high."""
    made, peak = footprint(device), device.peak(dtype)
    needed = {(mfu, years): devices_used_up(flops, peak, mfu, years) for mfu in mfus for years in lifetimes}
    most = max(needed.values())
    return tuple(
        Scenario(
            mfu=mfu, lifetime_years=years, devices=count, saves=1 - count / most, mass_kg=made.mass_kg * count if made else None,
            heavy_metals_kg=made.heavy_metals_kg * count if made else None, embodied_kg_co2=made.embodied_kg_co2 * count if made else None,
        )
        for (mfu, years), count in needed.items()
    )  # fmt: skip
