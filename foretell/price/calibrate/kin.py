"""Which measured device speaks for one that was not: its own generation's, held back by its power limit."""

from __future__ import annotations

from collections.abc import Mapping

from foretell.hardware.types import Device
from foretell.price.analytic import family

KIN: Mapping[str, tuple[str, ...]] = {
    "hopper": ("H100-SXM-80GB", "H200-SXM-141GB"), "ampere": ("A100-SXM-80GB",), "blackwell": ("B200", "GB200"),
    "ada": ("L40S", "RTX-PRO-6000"), "rtx-blackwell": ("RTX-PRO-6000", "L40S"),
}  # fmt: skip
"""Generation → devices whose kernels were measured, the nearest first."""
NEAREST: Mapping[str, str] = {
    "cuda": "H200-SXM-141GB", "rocm": "H200-SXM-141GB", "xpu": "H200-SXM-141GB", "mps": "H200-SXM-141GB", "cpu": "CPU",
}  # fmt: skip
"""Backend → the device whose profile is carried over where a generation has none."""
POWER = 0.6
"""Exponent of the sustained rate in watts where power is the limit: lower clocks need less voltage. Assumed; with it the table of
the RTX PRO 6000 (600 W for 504 TFLOP/s) says what the L40S's shows (350 W for 362)."""


POWER_LIMITED = ("L40S",)
"""Measured devices whose own products wait for power (62 % of the peak, 76 % on the next of its kind): others with more watts for a
FLOP are faster than their tables say, not only slower with fewer."""


MOST_GAINED = 0.7
"""Large products then reach 90 % of the peak, the best 110 %: public tests of an RTX 4090 show 94 to 107 %."""


def kin_of(device: Device, without: str = "") -> tuple[str, ...]:
    """Names of devices whose profiles may speak for this one, the nearest first."""
    near = tuple(name for name in KIN.get(family(device), ()) if name != without)
    return (*near, NEAREST.get(device.backend, ""))


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
    least = MOST_GAINED if measured.name in POWER_LIMITED else 1.0
    return float(max(least, fewer_watts(device, measured) ** POWER))
