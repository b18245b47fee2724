"""What benchmarks/time.py runs: real steps, timed, each in a process of its own; and their predictions."""

from __future__ import annotations

import fcntl
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

LOCK = Path(tempfile.gettempdir()) / "foretell-gpu.lock"


@contextmanager
def gpu_alone() -> Iterator[None]:
    """One process at a time runs on the device; the others may import, build and compile meanwhile."""
    with LOCK.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def time_step(
    config: dict[str, Any], *, least_steps: int = 50, least_seconds: float = 0.8, profile: bool = False,
    gate: Callable[[], None] = lambda: None,
) -> dict[str, Any]:  # fmt: skip
    """Median seconds of a step, its joules, its peaks of memory; with `profile`, what kernels ran.

    `gate` is called when all is built, compiled and warm, and returns when this process may have the machine.
    """
    import torch
    from cases import build_step

    started = time.perf_counter()
    step = build_step(config)
    one = _one(step)
    one()
    torch.cuda.synchronize()
    warm = time.perf_counter() - started
    gate()
    with gpu_alone():
        for _ in range(3):
            one()
        torch.cuda.synchronize()
        first = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        found = _timed(one, least_steps, least_seconds)
        found |= {
            "allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved(),
            "warm_up_allocated": first,
            "warm_up_seconds": round(warm, 2),
        }  # fmt: skip
        if profile:
            found["kernels"] = kernels_of(one)
    return found


def _one(step: Any) -> Any:
    def one() -> None:
        for _ in range(step.recipe.accumulate):
            step.micro_batch()
        step.update()
        step.zero_grad()

    return one


def _timed(one: Any, least_steps: int, least_seconds: float) -> dict[str, Any]:
    """Wall seconds of steps as a training loop runs them: the host may run ahead, the last step is waited for."""
    import torch

    for _ in range(2):
        one()
    torch.cuda.synchronize()
    before = time.perf_counter()
    one()
    asked = time.perf_counter() - before
    torch.cuda.synchronize()
    first = time.perf_counter() - before
    count = max(least_steps if first < 0.3 else 10, min(1000, int(least_seconds / first) + 1))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    energy = _joules()
    begun = time.perf_counter()
    marks[0].record()
    for position in range(count):
        one()
        marks[position + 1].record()
    marks[-1].synchronize()
    wall = time.perf_counter() - begun
    used = _joules() - energy
    each = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]
    return {
        "seconds": statistics.median(each), "wall_seconds": wall / count, "p10": _share(each, 0.1), "p90": _share(each, 0.9),
        "alone_seconds": first, "host_seconds": asked, "steps": count, "joules": used / count if wall > 0.3 else None,
        "watts": used / wall if wall > 0.3 else None,
    }  # fmt: skip


def _share(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _joules() -> float:
    import pynvml

    pynvml.nvmlInit()
    index = int((os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0])
    return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByIndex(index))) / 1e3


def kernels_of(one: Any) -> dict[str, Any]:
    """Kernels of one step: name → [count, microseconds]; and how long the device was busy."""
    import torch
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        one()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            entry = found.setdefault(event.name[:90], [0, 0.0])
            entry[0] += 1
            entry[1] += event.device_time if hasattr(event, "device_time") else event.cuda_time
    kept = dict(sorted(found.items(), key=lambda item: -item[1][1])[:60])
    return {
        "busy_us": round(sum(us for _, us in found.values()), 1), "count": sum(int(n) for n, _ in found.values()),
        "top": {name: [int(n), round(us, 1)] for name, (n, us) in kept.items()},
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------- predictions


def predict_seconds(config: dict[str, Any]) -> dict[str, Any]:
    """Seconds, joules and peak memory predicted on fake tensors; runs in a process that sees no GPU."""
    import warnings

    warnings.simplefilter("ignore")
    from memory import parts

    from foretell.hardware import parse
    from foretell.hardware.lookup import find_profile
    from foretell.simulate.plan import Options, predict_step
    from foretell.simulate.whole import speed
    from foretell.trace.load.model import load
    from foretell.trace.record.capture import capture

    source, recipe = parts(config)
    try:
        counted = capture(lambda: load(source), recipe)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    cluster = parse("H200")
    recipe = replace(recipe, compile={"eager": "none", "compiled": "model"}.get(config["mode"], config["mode"]))
    how = Options(profile_of=find_profile)
    begun = time.perf_counter()
    cost = predict_step(counted, recipe, cluster, how, micro_batch=config["micro_batch"])
    found = speed(cost, cluster, how)
    took = time.perf_counter() - begun
    assert found.time is not None
    memory = cost.worst.memory
    return {
        "seconds": found.time.step_seconds, "low": found.time.low_seconds, "high": found.time.high_seconds,
        "device_seconds": found.time.device_seconds, "host_seconds": found.time.host_seconds, "binds": found.time.binds,
        "breakdown": {name: round(value, 6) for name, value in found.time.breakdown.items()},
        "joules": found.energy.joules_per_step if found.energy else None, "roofline_seconds": roofline(counted, cluster.device),
        "allocated": memory.allocated_bytes, "reserved": memory.reserved_bytes, "prediction_seconds": round(took, 4),
    }  # fmt: skip


def roofline(trace: Any, device: Any) -> float:
    """What FLOPs over peak or bytes over bandwidth, op by op, would say."""
    from foretell.price.host import steady
    from foretell.price.kernels.features import FREE
    from foretell.price.kernels.shapes import short

    total = 0.0
    for name, times in steady(trace):
        for op in trace.programs[name].ops:
            if short(op.name) in FREE:
                continue
            dtype = op.inputs[1 if "addmm" in op.name else 0].spec.dtype if op.inputs else "float32"
            moved = (op.bytes_read + op.bytes_written) / device.memory_bandwidth_bytes_per_second
            total += times * max((op.flops or 0) / device.peak(dtype), moved)
    return total
