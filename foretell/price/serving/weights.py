"""Products with weights of few bits: priced from the same product in 16 bits, or in 8, which tables have.

    weights alone in b bits      read b/16 of the bytes, compute in 16 bits: the larger of the two, and never above the 16-bit product's
    4-bit products               of an 8-bit product's seconds, what starts it as it is, and the rest by the peaks

So 4-bit weights halve a decode step and gain nothing in a prompt, whatever engine runs them.
"""

from __future__ import annotations

from foretell.hardware.types import Device
from foretell.lower.serving_split import GROUPED, WeightFormat
from foretell.price.time import Reprice
from foretell.trace.types import Op

START_SECONDS = 3e-6
"""Of a product, that no format shortens. Assumed."""
COMPUTED = 0.72
"""Part of the 16-bit peak at which products with narrow weights compute at most. Assumed: that of large 16-bit products."""
READ = 0.85
"""Part of the bandwidth saved that such kernels turn into time. Assumed: scales and unpacking take the rest."""

FORMATS = {
    "bf16": WeightFormat("bf16", 16, "16-bit"),
    "fp8": WeightFormat("fp8", 8, "8-bit"),
    "fp8-weights": WeightFormat("fp8-weights", 8, "weights alone"),
    "int8": WeightFormat("int8", 8, "weights alone"),
    "int4": WeightFormat("int4", 4.25, "weights alone"),
    "int4-g32": WeightFormat("int4-g32", 5, "weights alone"),
    "fp4": WeightFormat("fp4", 4.5, "4-bit"),
    "fp4-weights": WeightFormat("fp4-weights", 4.5, "weights alone"),
}  # fmt: skip
FOUR = "float4_e2m1fn_x2"


def format_on(name: str, device: Device) -> WeightFormat:
    """A format as a device runs it: without matrix units for it, weights alone are narrow."""
    rates = device.peak_flops_per_second
    if name == "fp8" and "float8_e4m3fn" not in rates:
        name = "fp8-weights"
    if name == "fp4" and FOUR not in rates:
        name = "fp4-weights"
    return FORMATS[name]


def narrow(device: Device, how: WeightFormat) -> Reprice | None:
    """Seconds of marked products; None where weights are in 16 bits."""
    if how.kernel == "16-bit":
        return None
    peak, mark = device.peak("bfloat16"), f"weights:{how.name}"
    eight = device.peak("float8_e4m3fn") / peak
    four = device.peak(FOUR) / device.peak("float8_e4m3fn") if FOUR in device.peak_flops_per_second else 1.0

    def seconds(op: Op, family: str, alone: float) -> tuple[float, float]:
        if mark not in op.attrs:
            return alone, 1.0
        if how.kernel == "4-bit" and op.name != GROUPED:
            return START_SECONDS + max(0.0, alone - START_SECONDS) * max(how.bits / 8, 1 / four), 1.0
        quick = {"8-bit": eight, "4-bit": eight * four}.get(how.kernel, 1.0)
        computing = (op.flops or 0) / (peak * COMPUTED * quick)
        reading = START_SECONDS + max(0.0, alone - START_SECONDS) * (1 - READ * (1 - how.bits / 16))
        return min(alone, max(computing, reading)), 1.0

    return seconds
