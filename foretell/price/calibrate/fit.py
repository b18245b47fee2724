"""From measurements to what predictions rest on: ops, host, the step around them, and watts.

    rows of ops ───────────────► OpModel
    steps that wait for the host ─► HostModel
    steps that keep the device busy ─► how much longer ops take inside a step
    load points and steps with a power reading ─► PowerModel
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from foretell.hardware.profile import Measured
from foretell.hardware.types import Device
from foretell.price import energy, host
from foretell.price.clocks import Clocks
from foretell.price.clocks import learn as learn_clocks
from foretell.price.kernels.ops import OpModel, learn
from foretell.price.kernels.shapes import Shape
from foretell.price.time import COMPUTE_KINDS, Machine, op_prices
from foretell.trace.types import TensorSpec, Trace

BUSY, IDLE = 0.93, 0.6
"""Kernels' share of a step above which the device binds it, and below which the host does."""

LEAST_METERED_SECONDS = 0.5
"""The energy counter moves in jumps: what is shorter says little about watts."""
EARLY = 0.7
"""Share of a step after which a host that has asked for all of it is early."""
ZEROS = "-zeros"
"""Load points of numbers that no training has: they say how far watts depend on data, and nothing about steps."""
LARGE = 4096
"""Products of so many rows are long enough to be held without gaps."""
PULL = 0.1
"""Weight, in steps, of the belief that ops take as long inside a step as alone."""

Step = tuple[Mapping[str, Any], Trace]
"""A measured reference step (config, seconds, busy_seconds, watts as far as known) and its trace."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was fitted to the measurements of one machine."""

    ops: OpModel
    host: host.HostModel
    in_step: Mapping[str, float]
    power: energy.PowerModel | None
    clocks: Clocks | None = None
    in_step_steps: int = 0

    def accuracy(self) -> dict[str, Any]:
        return {
            "ops": {name: dict(family.accuracy) for name, family in self.ops.families.items()},
            "host": {"median": self.host.error, "references": self.host.references},
            "power": {"median": self.power.error} if self.power else {},
        }  # fmt: skip

    def fitted(self) -> dict[str, Any]:
        power = {"power": self.power.to_dict()} if self.power else {}
        factors = {name: round(value, 4) for name, value in self.in_step.items()}
        clocks = {"clocks": self.clocks.to_dict()} if self.clocks else {}
        return {"in_step": factors, "in_step_steps": self.in_step_steps, **power, **clocks}


def calibrate(measured: Measured, device: Device, steps: Sequence[Step], basis: OpModel | None = None) -> Calibration:
    """Fit everything to what one probe measured; with a `basis`, what a fuller probe of another device says of this one's ops."""
    ops = learn(measured.rows, device, groups=measured.groups, basis=basis)
    calls = host.call_seconds((row.name, row.host_seconds) for row in measured.rows)
    turns = {**host.turn_seconds(measured.rows), **host.matrix_seconds(measured.rows, calls)} if device.backend != "cpu" else {}
    waits = host.waiting(measured.rows) if device.backend != "cpu" else {}
    clocks = _clocks(measured.power, ops) if device.backend != "cpu" else None
    totals = [_op_seconds(trace, ops, clocks) for _, trace in steps]
    if device.backend == "cpu":
        factor, model = _serial([(trace, step["seconds"], sum(total)) for (step, trace), total in zip(steps, totals, strict=True)])
        longer = {"compute": factor, "memory": factor}
        return Calibration(ops=ops, host=model, in_step=longer, in_step_steps=len(steps), power=None)
    waiting = [
        (trace, float(step["seconds"])) for step, trace in steps if _busy(step) < IDLE and not step.get("other_machine")
    ]
    full = [(total, float(step["seconds"])) for (step, _), total in zip(steps, totals, strict=True) if _busy(step) > BUSY]
    limit = measured.clocks.get("power_limit_watts") or device.tdp_watts
    longer = in_step(full)
    busy = [_busy_seconds(step, total, longer) for (step, _), total in zip(steps, totals, strict=True)]
    readings = [*_load_points(measured.power, device), *_step_readings(steps, busy, device)]
    return Calibration(
        ops=ops, host=host.learn(waiting, calls, turns, waits), in_step=longer, in_step_steps=len(full),
        power=energy.learn(readings, limit) if len(readings) >= 6 and limit else None, clocks=clocks,
    )  # fmt: skip


def _serial(steps: Sequence[tuple[Trace, float, float]]) -> tuple[float, host.HostModel]:
    """Where the host computes itself: (trace, seconds of a step, seconds of its ops alone) → how much longer ops take
    inside a step, and what the host spends around them. The factor whose held-out steps come out best. Errors are relative to
    the whole step: in one that is nearly all ops, what is left for the host is little more than their errors."""
    none: dict[str, float] = {"": 0.0}
    rows = [[host.counts(trace, none)[name] for name in host.COUNTS] for trace, _, _ in steps]
    whole = [seconds for _, seconds, _ in steps]

    def weights(factor: float, kept: Sequence[int]) -> list[float]:
        rest = [whole[at] - factor * steps[at][2] for at in kept]
        return host.solve([rows[at] for at in kept], rest, [whole[at] for at in kept], host.BESIDE)

    best = (float("inf"), 0.0, 1.0)
    every = range(len(steps))
    for factor in (1.0 + 0.1 * number for number in range(13)) if len(steps) > 2 else ():
        errors = []
        for held, (_, seconds, alone) in enumerate(steps):
            found = weights(factor, [at for at in every if at != held])
            around = sum(a * w for a, w in zip(rows[held], found, strict=True))
            errors.append(abs((factor * alone + around) / seconds - 1))
        best = min(best, (mean(errors), median(errors), factor))
    _, error, factor = best
    learned = dict(zip(host.COUNTS, weights(factor, every), strict=True)) if steps else dict(host.BESIDE)
    return factor, host.HostModel(learned, none, len(steps), error)


def _busy(step: Mapping[str, Any]) -> float:
    """Kernels' share of a reference step; without a figure, a host that is done early means a device that is busy."""
    if step.get("busy_seconds"):
        return float(step["busy_seconds"] / step["seconds"])
    return 1.0 if step.get("host_seconds", step["seconds"]) < EARLY * step["seconds"] else 0.0


def _busy_seconds(step: Mapping[str, Any], total: tuple[float, float], longer: Mapping[str, float]) -> float:
    """Seconds of a step in which kernels run: counted, or what its ops take."""
    if step.get("busy_seconds"):
        return float(step["busy_seconds"])
    product, other = total
    return min(float(step["seconds"]), product * longer.get("compute", 1.0) + other * longer.get("memory", 1.0))


HELD = "gemm-bf16-"
"""Load points of square products, by their size."""


def _clocks(points: Sequence[Mapping[str, Any]], ops: OpModel) -> Clocks | None:
    """How far products slow down that are held at the power limit, by the load points of large ones."""
    found = []
    for point in points:
        size = str(point["name"]).removeprefix(HELD)
        if str(point["name"]).startswith(HELD) and size.isdecimal() and int(size) >= LARGE:
            spec = TensorSpec((int(size), int(size)), "bfloat16")
            shape = Shape("aten.mm.default", (spec, spec), (spec,), ("layout:cc",))
            found.append(point["seconds"] / ops.seconds([shape])[shape])
    return learn_clocks(median(found)) if found else None


def _op_seconds(trace: Trace, ops: OpModel, clocks: Clocks | None = None) -> tuple[float, float]:
    """Seconds of a step's ops taken alone: products and their like, and what moves bytes."""
    prices = op_prices(trace, Machine(ops=ops, host=host.HostModel(host.START, {}), clocks=clocks))
    product = other = 0.0
    for name, times in host.steady(trace):
        for op in trace.programs[name].ops:
            family, seconds = prices[id(op)]
            if family in COMPUTE_KINDS:
                product += times * seconds
            else:
                other += times * seconds
    return product, other


def in_step(steps: Sequence[tuple[tuple[float, float], float]]) -> dict[str, float]:
    """Factors on (products, other ops) that explain the seconds of steps that keep the device busy; drawn towards 1,
    so that few steps move them little."""
    pairs = [((product / seconds, other / seconds)) for (product, other), seconds in steps if seconds]
    if not pairs:
        return {}
    a, b = [x for x, _ in pairs], [y for _, y in pairs]
    aa, bb, ab = sum(x * x for x in a) + PULL, sum(y * y for y in b) + PULL, sum(x * y for x, y in pairs)
    left, right = sum(a) + PULL, sum(b) + PULL
    determinant = aa * bb - ab * ab
    return {"compute": (left * bb - right * ab) / determinant, "memory": (right * aa - left * ab) / determinant}


def _load_points(points: Sequence[Mapping[str, Any]], device: Device) -> list[tuple[energy.DeviceLoad, float]]:
    """Readings while one op ran over and over; `unit` says whether its rate is FLOPs or bytes."""
    found = []
    for point in points:
        rate, unit, watts = point.get("rate"), str(point.get("unit", "")), point.get("watts")
        if not watts or point["name"].endswith(ZEROS):
            continue
        if point["name"] == "idle":
            found.append((energy.DeviceLoad(0.0, 0.0, 0.0), float(watts)))
        elif rate and unit.startswith("flop"):
            dtype = next((name for name in ("tf32", "float32", "float16", "bfloat16") if name in unit or name in point["name"]), "bfloat16")
            found.append((energy.DeviceLoad(1.0, rate / device.peak(dtype), 0.1), float(watts)))
        elif rate and unit.startswith("byte"):
            busy = float(point.get("busy", 1.0))
            found.append((energy.DeviceLoad(busy, 0.0, rate / device.memory_bandwidth_bytes_per_second), float(watts)))
    return found


def _step_readings(steps: Sequence[Step], busy: Sequence[float], device: Device) -> list[tuple[energy.DeviceLoad, float]]:
    return [
        (energy.load_of(trace, device, step["seconds"], seconds), float(step["watts"]))
        for (step, trace), seconds in zip(steps, busy, strict=True)
        if step.get("watts") and step["seconds"] * step.get("steps", 1) > LEAST_METERED_SECONDS
    ]
