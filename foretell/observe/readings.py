"""What a watched script was seen to do: seconds, parts of a step, memory; and what of it drifts. Plain data."""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

SKIPPED = 5
"""Steps at the start that medians leave out, at most: first allocations, cold caches."""
WINDOW = 20
"""Steps that are held against the ones before."""
SLOWER = 1.25
"""Times as long as before is told, where the prediction has no band."""
LEAK_SAMPLES = 8
LEAK_STEPS = 20
LEAK_SHARE = 0.02
"""Memory after a step that rose in all of so many readings, over so many steps, by such a share of the peak, is told."""
LEAK_BYTES = {"cuda": 8 << 20, "cpu": 48 << 20}
"""And by so many bytes: a process's own memory moves more than an allocator's."""
WAITS = 0.2
"""Share of the time that the host waits for data, from which on it is told."""


@dataclass
class Readings:
    """Grows with every message of the hooks."""

    seconds: array[float] = field(default_factory=lambda: array("d"))
    """Of every step, from the second on."""
    steps: int = 0
    kind: str = "cpu"
    device_name: str = ""
    parts: list[Mapping[str, Any]] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    """The last reading; peaks are those of the whole run."""
    weights: int = 0
    rest: int = 0
    """On a CPU: what the process held besides the model before its first step."""
    data_seconds: float = 0.0
    wall_seconds: float = 0.0
    """In which those waits were."""
    delay_seconds: float = 0.0
    """Of them, those in which it was ready to run and other processes had the cores."""
    after: list[tuple[int, int]] = field(default_factory=list)
    """Step and memory then, for leaks."""
    threads: int | None = None
    versions: dict[str, str] = field(default_factory=dict)
    ended: bool = False
    error: str = ""
    failed: str = ""
    """Why the hooks gave up, if they did."""
    loader_batch: int = 0
    rank: int = 0
    world: int = 1
    """Which of how many processes this is."""
    local: int = 0
    """How many of them run here, where a launcher says it."""
    gone: bool = False
    """It tells nothing more."""
    _last_end: float | None = None
    _timed_by_device: bool = False

    def hear(self, message: Mapping[str, Any]) -> None:
        kind = message["kind"]
        self.rank, self.world = int(message.get("rank") or self.rank), int(message.get("world") or self.world)
        self.local = int(message.get("local") or self.local)
        if kind == "begin":
            self.threads = message.get("threads")
            self.versions = {name: str(message[name]).split("+")[0] for name in ("torch", "python")}
        elif kind == "model":
            self.weights, self.kind, self.rest = int(message["weights"]), str(message["device"]), int(message["rest"])
            self.device_name = str(message.get("name", ""))
        elif kind == "steps":
            self._hear_steps(message)
        elif kind == "failed":
            self.failed = str(message["why"])
        elif kind == "end":
            self.ended, self.error = True, str(message.get("error", ""))

    def pause(self) -> None:
        """The next step has no beginning."""
        self._last_end = None

    def _hear_steps(self, message: Mapping[str, Any]) -> None:
        before, ends = self._last_end, [float(one) for one in message["ends"]]
        self.steps = int(message["step"])
        self.rest = int(message.get("rest") or self.rest)
        self.memory = dict(message["memory"])
        if "allocated" in self.memory:
            self.kind = "cuda"
        if ends and before is not None:
            self.wall_seconds += ends[-1] - before
            self.data_seconds += float(message["data"])
            self.delay_seconds += float(message.get("delay") or 0.0)
        self._count(before, ends, message["device"])
        self._last_end = ends[-1] if ends else before
        self.parts += message.get("parts", ())
        now = self.memory.get("allocated", self.memory.get("rss", 0))
        if ends and now:
            self.after.append((self.steps, now))

    def _count(self, before: float | None, ends: Sequence[float], device: Sequence[Sequence[float]]) -> None:
        """By the device's clock where it has one: the host runs ahead of it."""
        if device and not self._timed_by_device:
            self._timed_by_device = True
            del self.seconds[:]
        if self._timed_by_device:
            for first, last, seconds in device:
                self.seconds.extend([seconds / (last - first)] * int(last - first))
            return
        for end in ends:
            if before is not None:
                self.seconds.append(end - before)
            before = end

    # ------------------------------------------------------------------ figures

    @property
    def skipped(self) -> int:
        return min(SKIPPED, len(self.seconds) // 2)

    @property
    def step_seconds(self) -> float | None:
        kept = self.seconds[self.skipped :]
        return statistics.median(kept) if kept else None

    @property
    def peak(self) -> int | None:
        """Bytes at the peak: allocated on a GPU, resident on a CPU."""
        return self.memory.get("allocated_peak" if self.kind == "cuda" else "rss_peak") or None

    @property
    def micro_batches(self) -> int:
        return max([int(one["micro_batches"]) for one in self.parts], default=1) or 1

    def shares(self) -> dict[str, float]:
        """Share of a step in each of its parts, by the steps that were looked at."""
        names = ("data", "forward", "backward", "update", "between")
        sums = {name: sum(float(one.get(name, 0.0)) for one in self.parts) for name in names}
        total = sum(sums.values())
        return {name: value / total for name, value in sums.items()} if total else {}

    def part_seconds(self, name: str) -> float | None:
        found = [float(one[name]) for one in self.parts if name in one]
        return statistics.median(found) if found else None

    # ------------------------------------------------------------------ drift

    def recent(self) -> float | None:
        """Median of the last steps, once there are as many before them."""
        return statistics.median(self.seconds[-WINDOW:]) if len(self.seconds) >= 2 * WINDOW else None

    def leak(self) -> tuple[int, int] | None:
        """Bytes that memory after a step grew by, and over how many steps, where it only ever grows."""
        found = self.after[-LEAK_SAMPLES:]
        if len(found) < LEAK_SAMPLES or any(later <= earlier for (_, earlier), (_, later) in pairwise(found)):
            return None
        steps, grown = found[-1][0] - found[0][0], found[-1][1] - found[0][1]
        enough = max(LEAK_SHARE * (self.peak or 0), LEAK_BYTES[self.kind if self.kind == "cuda" else "cpu"])
        return (grown, steps) if steps >= LEAK_STEPS and grown > enough else None

    def delay_share(self) -> float:
        """Share of the time in which other processes had the cores that it was ready to run on."""
        return min(1.0, self.delay_seconds / self.wall_seconds) if self.wall_seconds > 0 else 0.0

    def data_share(self) -> float:
        return self.data_seconds / self.wall_seconds if self.wall_seconds > 0 else 0.0
