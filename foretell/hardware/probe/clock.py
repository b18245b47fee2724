"""Time one operation on a device: how long the device works on it, and how long the host takes to ask for it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

SLEEP_CYCLES_PER_SECOND = 1.9e9
HOST_CALL_SECONDS = 30e-6
"""What one asking is given at least while the device is held back."""


WAKE_SECONDS = 0.05
BURST_SECONDS = 30e-6
"""On the host a burst lasts about this long, so that the clock itself does not count."""
LONG_CALL_SECONDS = 20e-3
"""On the host such a call is made three times in all."""
HOLD_SECONDS = 2e-3
"""A GPU that is held back for so long shows whether a call waits for it."""


def host_clock() -> Callable[[], float]:
    """Seconds on a CPU: those in which its one thread has a core, so that others who use the machine do not count; or the
    wall's, where several threads wait for each other."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


class Timing(NamedTuple):
    """Seconds of one call."""

    seconds: float
    """Of the device, back to back with others of its kind: the median of several bursts; of a CPU the lower quartile."""
    spread: float
    """(slowest - fastest burst) / median; of a CPU (median - fastest) / lower quartile."""
    host_seconds: float
    """Of the host, to ask a GPU for it: the fastest burst. 0 where it is part of `seconds`: of a CPU, and of a call that
    waits for the GPU."""


class Clock:
    """Measures calls on `cpu` or `cuda`; `budget` is the device time spent on one of them; `watchful` asks of each call
    whether it waits for the GPU, as those do whose result decides what the host does next."""

    def __init__(self, device: str, budget: float = 2e-3, bursts: int = 3, *, watchful: bool = False) -> None:
        self.device, self.budget, self.bursts, self.watchful = device, budget, bursts, watchful
        self._empty: float | None = None

    def measure(self, call: Callable[[], Any]) -> Timing:
        return self._cuda(call) if self.device == "cuda" else self._host(call)

    def _cuda(self, call: Callable[[], Any]) -> Timing:
        call()
        waited = self._waited(call) if self.watchful else None
        if waited is not None:
            return waited
        first, asked = self._burst(call, 2, HOST_CALL_SECONDS)
        count = max(3, min(30, int(self.budget / self.bursts / max(first, 1e-6))))
        bursts = [self._burst(call, count, 2 * asked) for _ in range(self.bursts)]
        return _timing([device for device, _ in bursts], [host for _, host in bursts])

    def _burst(self, call: Callable[[], Any], count: int, asking: float) -> tuple[float, float]:
        """Device and host seconds a call. The device is held back until the host has asked for the whole burst, so
        that it never waits inside it; where it was let go too early, once more with a longer hold."""
        hold = count * max(asking, HOST_CALL_SECONDS) + 50e-6
        for _ in range(4):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(int(hold * SLEEP_CYCLES_PER_SECOND))
            start.record()
            before = time.perf_counter()
            for _ in range(count):
                call()
            asked = time.perf_counter() - before
            late = start.query()
            end.record()
            end.synchronize()
            found = max(0.0, start.elapsed_time(end) / 1e3 - self._nothing()) / count
            if not late or found > 1.5 * asked / count or hold > 0.05:
                break
            hold *= 3
        return found, asked / count

    def _waited(self, call: Callable[[], Any]) -> Timing | None:
        """Of a call that waits for the GPU: seconds from asking an idle one until both are done. None of others."""
        first, asked = self._wall(call, 1)
        mark = torch.cuda.Event()
        torch.cuda._sleep(int(max(HOLD_SECONDS, 3 * asked) * SLEEP_CYCLES_PER_SECOND))
        mark.record()
        call()
        if not mark.query():
            torch.cuda.synchronize()
            return None
        count = max(1, min(30, int(self.budget / self.bursts / max(first, 1e-6))))
        found = [self._wall(call, count)[0] for _ in range(self.bursts if first < LONG_CALL_SECONDS else 1)]
        return _timing(found, [0.0])

    def _wall(self, call: Callable[[], Any], count: int) -> tuple[float, float]:
        """Seconds a call until the GPU is done, and until the host is."""
        torch.cuda.synchronize()
        before = time.perf_counter()
        for _ in range(count):
            call()
        asked = time.perf_counter() - before
        torch.cuda.synchronize()
        return (time.perf_counter() - before) / count, asked / count

    def _nothing(self) -> float:
        """Seconds between two marks with nothing between them: what a burst reads too long. The least of many, once
        the device is awake: an idle one runs slowly."""
        if self._empty is None:
            torch.cuda._sleep(int(WAKE_SECONDS * SLEEP_CYCLES_PER_SECOND))
            found = []
            for _ in range(30):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda._sleep(int(HOST_CALL_SECONDS * SLEEP_CYCLES_PER_SECOND))
                start.record()
                end.record()
                end.synchronize()
                found.append(start.elapsed_time(end) / 1e3)
            self._empty = min(found)
        return self._empty

    def _host(self, call: Callable[[], Any]) -> Timing:
        """Many short bursts, of which the calmer ones count: a host shares its cores with whatever else runs there."""
        now = host_clock()
        call()
        before = now()
        call()
        first = now() - before
        each = max(1, min(50, int(BURST_SECONDS / max(first, 1e-7))))
        bursts = max(3, min(30, int(self.budget / max(first * each, 1e-7)))) if first < LONG_CALL_SECONDS else 1
        found = [first] if bursts == 1 else []
        for _ in range(bursts):
            before = now()
            for _ in range(each):
                call()
            found.append((now() - before) / each)
        found.sort()
        calm = found[(len(found) - 1) // 4]
        return Timing(calm, (found[len(found) // 2] - found[0]) / calm, 0.0)


def _timing(device: list[float], host: list[float]) -> Timing:
    middle = statistics.median(device)
    return Timing(middle, (max(device) - min(device)) / middle if middle else 0.0, min(host))
