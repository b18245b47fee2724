"""Devices that a whole run uses up, as a small table: as predicted first, then by MFU and lifetime."""

from __future__ import annotations

from collections.abc import Sequence

from foretell.hardware.types import Device
from foretell.price.footprint import Scenario
from foretell.report import words


def lines(found: Sequence[Scenario], device: Device) -> list[str]:
    if not found:
        return ["no footprint: the speed of this device is not known"]
    own, *others = found
    rows: list[tuple[str, ...]] = [("MFU", "years", f"{device.name} used up", "mass", "CO2 of making them", "saves")]
    rows += [_row(own, "as predicted"), *(_row(one, f"{100 * one.saves:.0f} %") for one in others)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["", *("  ".join(cell.rjust(wide) for cell, wide in zip(row, widths, strict=True)).rstrip() for row in rows)]


def _row(one: Scenario, last: str) -> tuple[str, ...]:
    mass, made = (words.mass(value) if value is not None else "-" for value in (one.mass_kg, one.embodied_kg_co2))
    return words.percent(one.mfu), f"{one.lifetime_years:g}", f"{one.devices:,}", mass, made, last
