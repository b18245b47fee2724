"""Which measured device speaks for one that was not: its own generation's, held back by its power limit."""

from __future__ import annotations

from foretell.hardware.generations import nearest
from foretell.hardware.types import Device
from foretell.price.analytic import FAMILIES, family

POWER = 0.6
"""Exponent of the sustained rate in watts where power is the limit: lower clocks need less voltage. Assumed; with it the table of
the RTX PRO 6000 (600 W for 504 TFLOP/s) says what the L40S's shows (350 W for 362)."""


MOST_GAINED = 0.7
"""Large products then reach 90 % of the peak, the best 110 %: public tests of an RTX 4090 show 94 to 107 %."""


def kin_of(device: Device, without: str = "") -> tuple[str, ...]:
    """Names of devices whose profiles may speak for this one, the nearest first."""
    near = tuple(name for name in FAMILIES[family(device)].kin if name != without)
    return (*near, nearest().get(device.backend, ""))


def fewer_watts(device: Device, measured: Device) -> float:
    """How many times fewer watts a device has for a FLOP of its peak than the measured one; 1 where that is not known."""
    if not device.tdp_watts or not measured.tdp_watts or device.name == measured.name:
        return 1.0
    dtype = "bfloat16" if "bfloat16" in device.peak_flops_per_second else "float16"
    return float(device.peak(dtype) / device.tdp_watts / (measured.peak(dtype) / measured.tdp_watts))


def held_back(device: Device, measured: Device) -> float:
    """How much longer products take than the measured device's efficiency says, where this one has fewer watts for a FLOP."""
    if fewer_watts(device, measured) == 1.0:
        return 1.0
    least = MOST_GAINED if measured.name in FAMILIES[family(measured)].power_limited else 1.0
    return float(max(least, fewer_watts(device, measured) ** POWER))
