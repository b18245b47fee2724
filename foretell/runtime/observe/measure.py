"""Measure a run while it runs: seconds of every step without waiting for the device, peaks of memory, and the summary.

On a GPU the host is one step ahead: a step's loss and times are copied behind its last kernel and read while the next
step computes. On a CPU everything is known when the step returns.
"""

from __future__ import annotations

import functools
import gc
import math
import platform
import resource
import statistics
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretell.plan.precision import computes_in
from foretell.plan.types import Plan
from foretell.runtime.observe.machine_load import MachineLoad
from foretell.runtime.observe.measurement import CONVENTION as CONVENTION
from foretell.runtime.observe.measurement import Measurement as Measurement
from foretell.runtime.observe.measurement import nearest, stretches
from foretell.runtime.parallel.ranks import Ranks
from foretell.units import human_bytes

SKIP_MOST = 5
"""Steps at the start that the summary leaves out: compiling, first allocations, cold caches."""
LONG_STEPS = 60
"""So often it is looked at whether steps take longer than predicted, and so many of them are looked at."""
SLOWER_SHARE = 0.2
"""Of the predicted step."""
OWN_CONTEXT = 2 * 2**30
"""Bytes of a device that a process may hold beside its tensors."""


@dataclass(frozen=True, kw_only=True)
class StepReading:
    """One step, measured."""

    step: int
    """Counted from 1: so many updates are done."""
    loss: float
    grad_norm: float | None
    loss_scale: float | None = None
    """After the step, where the loss is scaled."""
    seconds: float
    """From the end of the step before to the end of this one; after a pause, from its own start."""
    backward_seconds: float
    """Forward and backward."""
    update_seconds: float
    between_seconds: float
    """Between two steps: what the loop itself costs, data included."""


# --- clocks ----------------------------------------------------------------------------------------------------------


class HostClock:
    """Times of a CPU step, known at once."""

    def __init__(self) -> None:
        self._end: float | None = None
        self._ready: list[StepReading] = []

    def begin(self) -> None:
        self._start = time.perf_counter()

    def middle(self) -> None:
        self._middle = time.perf_counter()

    def end(self, step: int, loss: Tensor, norm: Tensor | None, scale: Tensor | None = None) -> None:
        now = time.perf_counter()
        before = self._start if self._end is None else self._end
        reading = StepReading(
            step=step, loss=float(loss), grad_norm=None if norm is None else float(norm),
            loss_scale=None if scale is None else float(scale), seconds=now - before,
            backward_seconds=self._middle - self._start, update_seconds=now - self._middle,
            between_seconds=self._start - before,
        )  # fmt: skip
        self._ready.append(reading)
        self._end = now

    def pause(self) -> None:
        """Something else comes between two steps: evaluation, a save."""
        self._end = None

    def read(self, *, all: bool = False) -> list[StepReading]:
        ready, self._ready = self._ready, []
        return ready


class _Slot:
    def __init__(self, event: Callable[[], Any], pin: bool) -> None:
        self.start, self.middle, self.end = event(), event(), event()
        self.values = torch.zeros(3, pin_memory=pin)
        self.step, self.has_norm, self.has_scale = 0, False, False
        self.before: _Slot | None = None


class DeviceClock:
    """Times of a GPU step from events on its stream, read when the next step is under way.

    Three sets of events take turns: of the step under way, of the one being read, and of the one before that.
    """

    def __init__(self, event: Callable[[], Any] | None = None, *, pin: bool = True) -> None:
        make = event or functools.partial(torch.cuda.Event, enable_timing=True)
        self._slots = [_Slot(make, pin) for _ in range(3)]
        self._waiting: deque[_Slot] = deque()
        self._last: _Slot | None = None
        self._turn = 0

    def begin(self) -> None:
        self._slot = self._slots[self._turn % len(self._slots)]
        self._turn += 1
        self._slot.start.record()

    def middle(self) -> None:
        self._slot.middle.record()

    def end(self, step: int, loss: Tensor, norm: Tensor | None, scale: Tensor | None = None) -> None:
        slot = self._slot
        slot.step, slot.has_norm, slot.has_scale, slot.before = step, norm is not None, scale is not None, self._last
        values = torch.stack([(loss if value is None else value).float() for value in (loss, norm, scale)])
        slot.values.copy_(values, non_blocking=True)
        slot.end.record()
        self._waiting.append(slot)
        self._last = slot

    def pause(self) -> None:
        self._last = None

    def read(self, *, all: bool = False) -> list[StepReading]:
        """Steps that are done, but for the last, which still computes; with `all`, that one too."""
        found = []
        while len(self._waiting) > (0 if all else 1):
            slot = self._waiting.popleft()
            slot.end.synchronize()
            loss, norm, scale = slot.values.tolist()
            between = slot.before.end.elapsed_time(slot.start) / 1e3 if slot.before is not None else 0.0
            backward = slot.start.elapsed_time(slot.middle) / 1e3
            update = slot.middle.elapsed_time(slot.end) / 1e3
            reading = StepReading(
                step=slot.step, loss=loss, grad_norm=norm if slot.has_norm else None,
                loss_scale=scale if slot.has_scale else None, seconds=between + backward + update, backward_seconds=backward, update_seconds=update,
                between_seconds=between,
            )  # fmt: skip
            found.append(reading)
        return found


def clock_of(device: torch.device) -> HostClock | DeviceClock:
    return DeviceClock() if device.type == "cuda" else HostClock()


# --- memory, peaks, machine ------------------------------------------------------------------------------------------


def memory(device: torch.device) -> dict[str, int | None]:
    """Peaks since the start, or since `forget_peaks`."""
    cuda = device.type == "cuda"
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(device) if cuda else None,
        "reserved_bytes": torch.cuda.max_memory_reserved(device) if cuda else None,
        "host_bytes": _host_peak(),
    }


def others_words(device: torch.device) -> str:
    """What other processes hold of the device, in words; empty where that is little or nobody can say."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    theirs = total - free - torch.cuda.memory_reserved(device)
    return f"; {human_bytes(theirs)} of the device is held outside this run" if theirs > OWN_CONTEXT else ""


def forget_peaks(device: torch.device) -> None:
    """From here on peaks are those of steps: what building the model left is given back, and what only cycles of objects hold with it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def set_aside() -> bool:
    """What is alive now stays: later collections need not look at it. Whether `gc.unfreeze` is to take it back, which takes back all:
    where somebody has set things aside before, as the process has that ranks are forked from, the little that came since is left."""
    if gc.get_freeze_count():
        return False
    gc.freeze()
    return True


def _host_peak() -> int:
    """Peak resident memory of this process."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The dense rate the device's data sheet gives for what the plan computes in; None for a CPU or an unknown GPU."""
    if device.type != "cuda":
        return None
    from foretell.hardware.catalog import find_reported

    known = find_reported(torch.cuda.get_device_name(device))
    if known is None:
        return None
    return known.peak_flops_per_second.get(computes_in(precision))


def hardware(ranks: Ranks) -> dict[str, Any]:
    cuda = ranks.device.type == "cuda"
    name = torch.cuda.get_device_name(ranks.device) if cuda else (_cpu_name() or platform.machine())
    found: dict[str, Any] = {"device": name, "kind": ranks.device.type, "count": ranks.world, "host": platform.node()}
    if not cuda:
        found["threads"] = torch.get_num_threads()
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


# --- the summary -----------------------------------------------------------------------------------------------------


class Tally:
    """What is kept of every step until the summary: a few numbers, so that long runs stay small."""

    def __init__(self) -> None:
        self.columns = {name: array("d") for name in ("seconds", "backward_seconds", "update_seconds", "between_seconds")}
        self.data_seconds, self.save_seconds, self.eval_seconds = array("d"), array("d"), array("d")
        self.first_loss, self.last_loss = math.nan, math.nan
        self.eval_loss: float | None = None
        self.started, self.since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), time.monotonic()

    @property
    def steps(self) -> int:
        return len(self.columns["seconds"])

    @property
    def last_seconds(self) -> float:
        return self.columns["seconds"][-1] if self.steps else 0.0

    @property
    def skipped(self) -> int:
        return min(SKIP_MOST, self.steps // 2)

    def add(self, reading: StepReading) -> None:
        if not self.steps:
            self.first_loss = reading.loss
        self.last_loss = reading.loss
        for name, column in self.columns.items():
            column.append(getattr(reading, name))

    def recent_seconds(self, count: int = 20) -> float:
        """Median of the last steps, the first ones left out as long as there are others; 0 before the first."""
        kept = self.columns["seconds"][max(self.skipped, self.steps - count) :]
        return statistics.median(kept) if kept else 0.0


class PredictedPace:
    """Whether steps take for long what was not predicted of them."""

    def __init__(self) -> None:
        self._slow = False

    def look(self, tally: Tally, predicted: float | None) -> float | None:
        """Every `LONG_STEPS` steps: seconds of a step where it takes longer by `SLOWER_SHARE`, as it did at the look before."""
        if predicted is None or tally.steps % LONG_STEPS or tally.steps == 0:
            return None
        seconds, before = tally.recent_seconds(LONG_STEPS), self._slow
        self._slow = seconds > (1 + SLOWER_SHARE) * predicted
        return seconds if self._slow and before else None


def mfu(plan: Plan, seconds: float, peak: float | None) -> float | None:
    flops = plan.predicted.get("flops_per_step")
    if not flops or not peak or seconds <= 0:
        return None
    return float(flops) / (seconds * peak * plan.mesh.world)


def summarise(
    tally: Tally, plan: Plan, ranks: Ranks, *, unit: str, per_step: int, by_rank: Sequence[Mapping[str, Any]],
    command: str, versions: Mapping[str, str], load: MachineLoad | None = None,
) -> Measurement | None:  # fmt: skip
    """The measurement of a run; None if no step was done."""
    if not tally.steps:
        return None
    skipped = tally.skipped
    kept = {name: column[skipped:] for name, column in tally.columns.items()}
    seconds = sorted(kept["seconds"])
    median = statistics.median(seconds) if plan.sync is None else with_rounds(kept["seconds"], plan.sync.every)
    phases = {name: statistics.median(kept[f"{name}_seconds"]) for name in ("backward", "update", "between")}
    if tally.data_seconds:
        phases["data"] = statistics.median(tally.data_seconds[skipped:] or tally.data_seconds)
    peak = peak_flops(ranks.device, plan.precision)
    flops = plan.predicted.get("flops_per_step")
    return Measurement(
        steps=len(seconds), skipped_steps=skipped, step_seconds=median, p10_seconds=nearest(seconds, 0.1),
        p90_seconds=nearest(seconds, 0.9), mean_seconds=statistics.fmean(seconds), unit=unit, per_step=per_step,
        per_second=per_step / median, phases=phases, overhead=phases["between"] / median if median else 0.0,
        stretches=tuple(stretches(kept["seconds"])), allocated_bytes=_most(by_rank, "allocated_bytes"),
        reserved_bytes=_most(by_rank, "reserved_bytes"), host_bytes=_most(by_rank, "host_bytes") or 0,
        by_rank=tuple(by_rank), mfu=mfu(plan, median, peak), flops_per_step=float(flops) if flops else None,
        peak_flops_per_second=peak, first_loss=tally.first_loss, last_loss=tally.last_loss, eval_loss=tally.eval_loss,
        save_seconds=statistics.fmean(tally.save_seconds) if tally.save_seconds else None,
        eval_seconds=statistics.fmean(tally.eval_seconds) if tally.eval_seconds else None, hardware=hardware(ranks),
        versions=dict(versions), command=command, started=tally.started, wall_seconds=time.monotonic() - tally.since,
        joules_per_step=_sum(by_rank, "joules_per_step"), delayed=_most(by_rank, "delayed"), load=load,
    )  # fmt: skip


def with_rounds(seconds: Sequence[float], every: int) -> float:
    """Of replicas that are joined every so many steps: a step on average over whole rounds, as many as there are."""
    whole = len(seconds) // every * every
    return statistics.fmean(seconds[-whole:] if whole else seconds)


def _sum(by_rank: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Over all ranks; None where one of them does not know."""
    found = [float(said[name]) for said in by_rank if said.get(name) is not None]
    return sum(found) if found and len(found) == len(by_rank) else None


def _most(by_rank: Sequence[Mapping[str, Any]], name: str) -> Any:
    found = [said[name] for said in by_rank if said.get(name) is not None]
    return max(found) if found else None
