"""Joules of a run's steps, from the GPU's own counter (NVML), read now and then between steps without waiting for the device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import torch

from foretell.hardware.probe.machine import nvml
from foretell.hardware.probe.power import PowerMeter

EVERY_SECONDS = 0.5
"""Between two readings: the counter moves in jumps, and a reading takes the host some microseconds."""
LEAST_SECONDS = 1.0
"""A shorter run has no joules."""


class Joules:
    """Gained over stretches of steps; what lies between them, evaluation or a save, does not count.

    The host is as far ahead of the device at the end of a stretch as at its beginning, so the steps between are right.
    """

    def __init__(self, device: torch.device, read: Callable[[], float | None] | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._stack = contextlib.ExitStack()
        found = self._stack.enter_context(nvml()) if read is None and device.type == "cuda" else None
        self._read = read or (PowerMeter(*found).joules if found is not None else None)
        self._now = now
        self._start: tuple[float, float, int] | None = None
        self._last: tuple[float, float, int] | None = None
        self._joules = self._seconds = 0.0
        self._steps = 0

    def mark(self, step: int) -> None:
        """So many steps are asked for."""
        if self._read is None:
            return
        now = self._now()
        if self._last is not None and now - self._last[1] < EVERY_SECONDS:
            return
        joules = self._read()
        if joules is None:
            self._read = None
            return
        self._last = joules, now, step
        self._start = self._start or self._last

    def pause(self) -> None:
        """Something else comes between two steps."""
        if self._start is not None and self._last is not None:
            self._joules += self._last[0] - self._start[0]
            self._seconds += self._last[1] - self._start[1]
            self._steps += self._last[2] - self._start[2]
        self._start = self._last = None

    def per_step(self) -> float | None:
        """Joules of one step; None where nobody counts them, or the run was too short."""
        self.pause()
        return self._joules / self._steps if self._steps and self._seconds >= LEAST_SECONDS else None

    def close(self) -> None:
        self._stack.close()
