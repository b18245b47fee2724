"""Products of servers: those of few rows, which read their weights and compute little, and those with weights of few bits. Priced from the
same product in 16 bits, or in 8, which tables have.

    few rows                     what a device's compute, or its power limit, adds does not apply; never above what memory gives

    weights alone in b bits      read b/16 of the bytes, compute in 16 bits: the larger of the two, and never above the 16-bit product's
    4-bit products               of an 8-bit product's seconds, what starts it as it is, and the rest by the peaks

So 4-bit weights halve a decode step and gain nothing in a prompt, whatever engine runs them.
"""

from __future__ import annotations

from collections.abc import Callable

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

MOST_READ = 0.92
"""Share of the memory's rate that no product reads above: the best device of public tables (RTX PRO 6000), at up to 64 rows."""

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


def served(device: Device, how: WeightFormat, held: float) -> Reprice:
    """Seconds of products, and how much of the device's power they ask for. `held`: how much longer than by tables' efficiencies a device
    computes, as its seconds have it."""
    rate, other = device.memory_bandwidth_bytes_per_second, _narrow(device, how)

    def seconds(op: Op, family: str, alone: float) -> tuple[float, float]:
        if family != "gemm":
            return alone, 1.0
        reading = (op.bytes_read + op.bytes_written) / rate
        computing = (op.flops or 0) / device.peak(op.inputs[0].spec.dtype)
        if computing < reading:
            alone = max(alone / held, reading / MOST_READ)
        heat = min(1.0, computing / (COMPUTED * alone)) if alone else 1.0
        return (other(op, alone) if other is not None else alone), heat

    return seconds


def _narrow(device: Device, how: WeightFormat) -> Callable[[Op, float], float] | None:
    """Seconds of marked products; None where weights are in 16 bits."""
    if how.kernel == "16-bit":
        return None
    peak, mark = device.peak("bfloat16"), f"weights:{how.name}"
    eight = device.peak("float8_e4m3fn") / peak
    four = device.peak(FOUR) / device.peak("float8_e4m3fn") if FOUR in device.peak_flops_per_second else 1.0

    def seconds(op: Op, alone: float) -> float:
        if mark not in op.attrs:
            return alone
        if how.kernel == "4-bit" and op.name != GROUPED:
            return START_SECONDS + max(0.0, alone - START_SECONDS) * max(how.bits / 8, 1 / four)
        quick = {"8-bit": eight, "4-bit": eight * four}.get(how.kernel, 1.0)
        computing = (op.flops or 0) / (peak * COMPUTED * quick)
        reading = START_SECONDS + max(0.0, alone - START_SECONDS) * (1 - READ * (1 - how.bits / 16))
        return min(alone, max(computing, reading))

    return seconds
