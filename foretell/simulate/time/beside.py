"""Several processes on one GPU: their steps side by side, in time slices.

    host A    │ issue │ issue │ …          every process has a host thread of its own
    host B    │ issue │ …
    device    │ A ── slice ──│ B ── slice ──│ A │ B ────│        one process at a time

Without MPS a GPU runs kernels of one process at a time. While several have kernels waiting they take turns of a time slice each, and a
kernel is interrupted where its slice ends; a process with nothing waiting gives its turn away. A turn that goes to another process
costs a context switch. So two steps that keep the device busy take about the sum of their device seconds, and steps that wait for their
hosts slip into each other's gaps. What is left out: caches that the other process filled, host cores that both want.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretell.quantities import HOST, Task
from foretell.simulate.time.streams import LAUNCH_QUEUE

SLICE_SECONDS = 2.09e-3
"""How long a process keeps the device while another waits for it; measured on an H200 (266 slices, 2.089 to 2.091 ms), assumed of others."""
SWITCH_SECONDS = 1.53e-4
"""From one process to another; measured there too (0.152 to 0.155 ms)."""
WARM_STEPS, COUNTED_STEPS = 1, 3
"""Steps of the slowest process that are left out, and that count."""
MOST_KERNELS = 400_000
"""Runs after which the simulation ends, however few steps that are."""


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How a device is shared by processes."""

    slice_seconds: float = SLICE_SECONDS
    switch_seconds: float = SWITCH_SECONDS


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Steps of processes that share one device."""

    step_seconds: tuple[float, ...]
    """Of each process, on average."""
    busy: float
    """Share of the time in which the device runs kernels; switching does not count."""


class _Process:
    """One process: its step again and again, issued by its own host, on the device one kernel after the other."""

    def __init__(self, tasks: Sequence[Task], queue: int) -> None:
        self.tasks, self.queue = tasks, queue
        self.host = 0.0
        self.starts: list[float] = []
        self.place = 0
        self.ends: list[float] = []
        """When each step ended."""
        self.ready, self.left = 0.0, 0.0
        self.last = 0.0
        self._next()

    def _next(self) -> None:
        """On to the next kernel: when it will have been issued, and how long it takes."""
        passed = 0
        while True:
            if self.place == len(self.tasks):
                self.ends.append(max(self.last, self.host))
                self.place = 0
            task = self.tasks[self.place]
            if len(self.starts) >= self.queue:
                self.host = max(self.host, self.starts[-self.queue])
            self.host += task.host_seconds
            if task.resource == HOST:
                self.host = max(self.host, self.last if task.after else 0.0) + task.seconds
                self.place += 1
                passed += 1
                if passed > len(self.tasks):
                    raise ValueError("a step without work for the device")
                continue
            self.ready, self.left = max(self.host, self.last), task.seconds
            return

    def begun(self, moment: float) -> None:
        self.starts.append(moment)
        if len(self.starts) > 4 * self.queue:
            del self.starts[: -self.queue]

    def finished(self, moment: float) -> None:
        """The kernel at hand ended."""
        self.last = moment
        if self.tasks[self.place].synchronises:
            self.host = max(self.host, moment)
        self.place += 1
        self._next()


def beside(jobs: Sequence[Sequence[Task]], sharing: Sharing | None = None, *, queue: int = LAUNCH_QUEUE) -> Beside:
    """Run the steps of all jobs side by side until each has done a few; `jobs` are the tasks of one step each."""
    how = sharing or Sharing()
    processes = [_Process(tasks, queue) for tasks in jobs]
    now = busy = 0.0
    runs = turn = 0
    slice_end = how.slice_seconds
    fresh = [True] * len(processes)
    while runs < MOST_KERNELS and any(len(process.ends) < WARM_STEPS + COUNTED_STEPS for process in processes):
        runs += 1
        mine = processes[turn]
        waiting = [index for index in _after(turn, len(processes)) if processes[index].ready <= now]
        if mine.ready > now or (waiting and now >= slice_end):
            if not waiting:
                now = min(process.ready for process in processes)
                continue
            turn = waiting[0]
            now += how.switch_seconds
            slice_end = now + how.slice_seconds
            continue
        if now >= slice_end:
            slice_end = now + how.slice_seconds
        if fresh[turn]:
            mine.begun(now)
            fresh[turn] = False
        until = now + mine.left
        if waiting:
            until = min(until, max(slice_end, now))
        else:
            arrival = min((processes[index].ready for index in _after(turn, len(processes))), default=until)
            until = min(until, max(arrival, now))
        busy += until - now
        mine.left -= until - now
        now = until
        if mine.left <= 1e-12:
            mine.finished(now)
            fresh[turn] = True
    return Beside(step_seconds=tuple(_step(process, now) for process in processes), busy=busy / now if now else 0.0)


def _after(turn: int, count: int) -> list[int]:
    """The other processes, the next one first."""
    return [(turn + distance) % count for distance in range(1, count)]


def _step(process: _Process, now: float) -> float:
    """Mean seconds between the ends of steps, the first ones left out; of a step that never ended, what it would take at least."""
    ends = process.ends
    if len(ends) > WARM_STEPS + 1:
        return (ends[-1] - ends[WARM_STEPS]) / (len(ends) - 1 - WARM_STEPS)
    return ends[-1] / len(ends) if ends else now
