"""Where the time of a forward goes: kernels on a GPU, ops on a CPU, as torch's own profiler has it. For hints, never for a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from foretell.tune.verify.inside.calls import synchronize

CALLS, SHOWN = 3, 8


def profile_of(module: nn.Module, arguments: Sequence[Any], device: str) -> list[dict[str, Any]]:
    """The longest first: name, how often a call has it, microseconds of a call."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device != "cpu"
    with torch.no_grad():
        module(*arguments)
        synchronize(device)
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as found:
            for _ in range(CALLS):
                module(*arguments)
            synchronize(device)
    rows = [
        {"name": str(one.key)[:80], "count": one.count / CALLS,
         "microseconds": round(float(one.self_device_time_total if on_gpu else one.self_cpu_time_total) / CALLS, 2)}
        for one in found.key_averages()
    ]  # fmt: skip
    return sorted((one for one in rows if one["microseconds"] > 0), key=lambda one: -one["microseconds"])[:SHOWN]
