"""Watts of a device from what it does: joules, money and carbon of a step follow.

    watts = idle + awake · busy + compute · √(busy · share of peak rate) + memory · √(busy · share of bandwidth)

never above the power limit. The four figures are fitted to readings of the power meter (NVML) at load points and
reference steps; a device that was never read borrows them as shares of its own power limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, NamedTuple

from foretell.hardware.types import Device
from foretell.price.host import steady
from foretell.price.kernels.features import FREE
from foretell.price.kernels.shapes import short
from foretell.quantities import ASSUMED, MEASURED, Cost, Energy, Run, Throughput, Time
from foretell.trace.types import Trace

YEAR_SECONDS = 365.25 * 24 * 3600
NAMES = ("idle", "awake", "compute", "memory")
USUAL: Mapping[str, float] = {"idle": 0.12, "awake": 0.06, "compute": 0.67, "memory": 0.73}
"""Shares of the power limit, as fitted on an H200; for devices that were never read."""
ASSUMED_BAND = (0.7, 1.3)


class DeviceLoad(NamedTuple):
    """What a stretch of work asks of a device: shares between 0 and 1, averaged over its seconds."""

    busy: float
    """Share of the time in which kernels run."""
    compute: float
    """FLOPs over what the peak rate of their dtypes would do."""
    memory: float
    """Bytes over what the memory could move."""

    def terms(self) -> tuple[float, float, float, float]:
        """Half the rate takes more than half the watts: the square root, while kernels run."""
        return 1.0, self.busy, sqrt(self.compute * self.busy), sqrt(self.memory * self.busy)


@dataclass(frozen=True, kw_only=True)
class PowerModel:
    """Watts of a device by load."""

    weights: Mapping[str, float]
    """Watts for each of NAMES."""
    limit: float
    provenance: str = MEASURED
    error: float = 0.0
    """Median relative error of the readings, each held out."""

    def watts(self, load: DeviceLoad) -> float:
        found = sum(self.weights[name] * term for name, term in zip(NAMES, load.terms(), strict=True))
        return min(self.limit, found)

    def to_dict(self) -> dict[str, Any]:
        return {
            "weights": {name: round(value, 2) for name, value in self.weights.items()}, "limit": self.limit,
            "error": round(self.error, 4),
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PowerModel:
        return cls(weights=dict(data["weights"]), limit=data["limit"], error=data.get("error", 0.0))


def usual(device: Device) -> PowerModel | None:
    """A power model for a device that was never read, or None where its power limit is not known."""
    if not device.tdp_watts:
        return None
    weights = {name: share * device.tdp_watts for name, share in USUAL.items()}
    return PowerModel(weights=weights, limit=device.tdp_watts, provenance=ASSUMED)


def learn(readings: Sequence[tuple[DeviceLoad, float]], limit: float) -> PowerModel:
    """Fit the weights to (load, watts) readings."""
    rows = [load.terms() for load, _ in readings]
    watts = [value for _, value in readings]
    weights = _solve(rows, watts, limit)
    errors = []
    for held in range(len(rows)):
        rest = _solve(rows[:held] + rows[held + 1 :], watts[:held] + watts[held + 1 :], limit)
        guess = min(limit, sum(w * t for w, t in zip(rest, rows[held], strict=True)))
        errors.append(abs(guess / watts[held] - 1))
    error = sorted(errors)[len(errors) // 2] if errors else 0.0
    return PowerModel(weights=dict(zip(NAMES, weights, strict=True)), limit=limit, error=error)


def _solve(rows: Sequence[Sequence[float]], watts: Sequence[float], limit: float) -> list[float]:
    """Weights ≥ 0 of least relative error; readings at the limit only say "at least"."""
    import numpy as np

    a, b = np.array(rows), np.array(watts)
    start = np.array([USUAL[name] * limit for name in NAMES])
    weights = start.copy()
    capped = b > 0.97 * limit
    for _ in range(30):
        use = ~capped | (a @ weights < b)
        left = a[use] / b[use][:, None]
        pull = 0.1 * np.diag((left * left).sum(axis=0) + 1e-12)
        square, right = left.T @ left + pull, left.sum(axis=0) + pull @ start
        for _ in range(60):
            for j in range(len(weights)):
                weights[j] = max(0.0, weights[j] + (right[j] - square[j] @ weights) / square[j, j])
    return [float(value) for value in weights]


GATHERS = frozenset({"embedding", "index_select", "index", "gather"})
DENSE_FLOPS_PER_BYTE = 12
"""FLOPs a byte above which an op is taken to run on the cores' product units."""


def load_of(trace: Trace, device: Device, step_seconds: float, busy_seconds: float) -> DeviceLoad:
    """What a steady step asks of the device."""
    compute = memory = 0.0
    for name, times in steady(trace):
        for op in trace.programs[name].ops:
            called = short(op.name)
            if called in FREE:
                continue
            moved = float(op.bytes_read + op.bytes_written)
            if called in GATHERS:
                moved = 2.0 * op.bytes_written
            elif called.startswith(("_fused", "_foreach")) and not op.outputs:
                moved = 1.75 * op.bytes_read
            memory += times * moved
            if op.flops and op.flops > DENSE_FLOPS_PER_BYTE * moved:
                dtype = op.inputs[1 if called == "addmm" else 0].spec.dtype
                compute += times * op.flops / device.peak(dtype)
    if step_seconds <= 0:  # by a profile whose ops take no time
        return DeviceLoad(0.0, 0.0, 0.0)
    return DeviceLoad(
        min(1.0, busy_seconds / step_seconds), compute / step_seconds,
        memory / device.memory_bandwidth_bytes_per_second / step_seconds,
    )  # fmt: skip


# ---------------------------------------------------------------- what follows from watts and seconds


def energy(
    time: Time, watts: float, model: PowerModel, devices: int, carbon: tuple[float, str] | None, pue: float = 1.0
) -> Energy:
    """Joules of a step on devices that draw so much each; carbon by the grid, the building's overhead included."""
    joules = watts * time.step_seconds * devices
    spread = max(0.1, 2 * model.error) if model.provenance == MEASURED else None
    low, high = (1 - spread, 1 + spread) if spread else ASSUMED_BAND
    grams = joules * pue / 3.6e6 * carbon[0] if carbon else None
    both = MEASURED if model.provenance == time.provenance == MEASURED else ASSUMED
    return Energy(
        joules_per_step=joules, low_joules=joules * low, high_joules=joules * high, watts_per_device=watts,
        provenance=both, carbon_grams_per_step=grams, carbon_source=carbon[1] if carbon else "",
    )  # fmt: skip


def cost(step_seconds: float, throughput: Throughput, per_device_hour: float, source: str, devices: int) -> Cost:
    """Money of a step that takes so long, predicted or measured."""
    per_hour = per_device_hour * devices
    per_step = per_hour * step_seconds / 3600
    return Cost(
        per_hour=per_hour, per_step=per_step, per_billion=per_step / throughput.per_step * 1e9,
        unit=throughput.unit, currency="USD", source=source,
    )  # fmt: skip


def whole_run(
    amount: float, unit: str, per_step: int, time: Time, devices: int, *, energy: Energy | None, cost: Cost | None,
    embodied_kg_per_device: float | None = None, lifetime_years: float = 5.0,
) -> Run:  # fmt: skip
    """Days, money, energy and footprint of processing `amount` tokens or samples."""
    grams = energy.carbon_grams_per_step if energy else None
    return _of_steps(
        amount, unit, per_step, (time.step_seconds, time.low_seconds, time.high_seconds), devices,
        joules=energy.joules_per_step if energy else None, money=cost.per_step if cost else None, grams=grams,
        embodied=embodied_kg_per_device / lifetime_years if embodied_kg_per_device else None,
    )  # fmt: skip


def planned_run(amount: float, unit: str, said: Mapping[str, Any], devices: int) -> Run | None:
    """The same from what a plan says of its step; None where that has no seconds."""
    if "step_seconds" not in said:
        return None
    seconds = (said["step_seconds"], said.get("low_seconds", said["step_seconds"]), said.get("high_seconds", said["step_seconds"]))
    return _of_steps(
        amount, unit, int(said[f"{unit}_per_step"]), seconds, devices, joules=said.get("joules_per_step"), money=said.get("dollars_per_step")
    )


def _of_steps(
    amount: float, unit: str, per_step: int, each: tuple[float, float, float], devices: int, *, joules: float | None, money: float | None,
    grams: float | None = None, embodied: float | None = None,
) -> Run:  # fmt: skip
    """What so many steps take; `embodied` is kilograms of one device and year."""
    steps = max(1, -(-int(amount) // per_step))
    years = devices * steps * each[0] / YEAR_SECONDS
    return Run(
        amount=amount, unit=unit, steps=steps, seconds=steps * each[0], low_seconds=steps * each[1], high_seconds=steps * each[2],
        joules=None if joules is None else steps * joules, money=None if money is None else steps * money,
        carbon_kilograms=None if grams is None else steps * grams / 1e3, device_years=years,
        embodied_carbon_kilograms=None if embodied is None else embodied * years,
    )  # fmt: skip
