"""Where the seconds of a step go by kind of op: a few steps of a plan on its example batch, under torch's profiler.

Only shares are taken from it: the profiler makes a step longer, and how long it really takes is measured without it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from foretell.plan.types import Plan
from foretell.price.calibrate.corrections import COMPUTE, HOST, MEMORY, kind_of
from foretell.runtime.parallel import ranks as members
from foretell.runtime.parallel.apply import apply
from foretell.runtime.train.prepare import build
from foretell.trace.record.on_cpu import quiet_stderr

WARM, PLAIN, WATCHED = 3, 5, 3
"""Steps before anything is measured, with a clock alone, and under the profiler."""
MOST_LONGER = 1.3
"""A CPU step that the profiler makes longer than this says little about what it was."""


def shares(plan: Plan, *, device: str = "auto") -> dict[str, float] | None:
    """compute, memory, host → share of a step of a plan of one rank; None where watching disturbs it too much."""
    ranks = members.start(plan, device=device)
    workload = build(plan, 0)
    job = apply(workload, plan, ranks)
    batches = [workload.batch] * plan.accumulate

    def step() -> None:
        job.train_step(batches)
        if ranks.device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(WARM):
        step()
    plain = statistics.median(_seconds(step) for _ in range(PLAIN))
    cuda = ranks.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with quiet_stderr(), profile(activities=activities) as watched:
        took = sum(_seconds(step) for _ in range(WATCHED)) / WATCHED
    rows = watched.key_averages()
    return of_device(rows, plain * WATCHED) if cuda else of_host(_own(rows), took * WATCHED, plain * WATCHED)


def _seconds(step: Callable[[], None]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def _own(rows: Iterable[Any]) -> list[tuple[str, float]]:
    return [(row.key, row.self_cpu_time_total / 1e6) for row in rows]


def of_host(rows: Sequence[tuple[str, float]], took: float, plain: float) -> dict[str, float] | None:
    """Shares on a CPU, from (name, own seconds); what is in no op is the host's."""
    if took > MOST_LONGER * plain or took <= 0:
        return None
    found = {kind: sum(seconds for name, seconds in rows if kind_of(name) == kind) / took for kind in (COMPUTE, MEMORY)}
    return {**found, HOST: max(0.0, 1.0 - sum(found.values()))}


def of_device(rows: Iterable[Any], plain: float) -> dict[str, float] | None:
    """Shares of the step in which a GPU's kernels ran: those launched by products and attention, and all others."""
    kernels = products = 0.0
    for row in rows:
        seconds = row.self_device_time_total / 1e6
        if row.device_type == torch.autograd.DeviceType.CUDA:
            kernels += 0.0 if getattr(row, "is_user_annotation", False) or row.key.startswith("nccl") else seconds
        elif kind_of(row.key) == COMPUTE:
            products += seconds
    if not 0 < products <= kernels <= MOST_LONGER * plain:
        return None
    return {COMPUTE: products / plain, MEMORY: (kernels - products) / plain, HOST: max(0.0, 1 - kernels / plain)}
