"""What kernels reach of a device's rates on each generation of devices.

Peaks, bandwidths, core counts and what part of them is reached come from the catalogue (`hardware.generations`), each with its reason.
"""

from __future__ import annotations

from foretell.hardware import generations
from foretell.hardware.types import Device

FAMILIES = generations.generations()


def family(device: Device) -> str:
    """Generation of a device: hopper, ampere, cdna, ..."""
    if device.backend == "rocm":
        return "cdna"
    major, minor = device.compute_capability or (0, 0)
    if device.backend != "cuda" or major < 7:
        return "other"
    names = {7: "volta", 8: "ada" if minor in (6, 9) else "ampere", 9: "hopper", 10: "blackwell"}
    return names.get(major, "rtx-blackwell")
