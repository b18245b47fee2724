"""What the processes of one script were seen to do, as one: its slowest step, its largest memory, and how far its ranks are apart.

    a message of a process ─► its Readings ─┐
                                            ├─► Group: what one line says of all of them
    a message of another ──► its Readings ──┘

A group of one is that process's own readings.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping
from typing import Any

from foretell.observe.readings import Readings

SPREAD = 0.03
"""Ranks that are further apart than this share are told of."""
_LATEST = 200
"""Steps by which the slowest rank is found while all of them run."""


class RankGroup(Readings):
    """Grows with every message; figures are those of `slowest`, peaks the largest of all."""

    def __init__(self) -> None:
        super().__init__()
        self.members: dict[Hashable, Readings] = {}
        """In the order in which they began."""

    def hear_from(self, source: Hashable, message: Mapping[str, Any]) -> None:
        if message["kind"] == "gone":
            if source in self.members:
                self.members[source].gone = True
            return
        one = self.members.setdefault(source, Readings())
        one.hear(message)
        if one.steps:
            self._replaced(source, one)
        self._take()

    def pause(self) -> None:
        for one in self.members.values():
            one.pause()

    # ------------------------------------------------------------------ who

    @property
    def ranks(self) -> list[Readings]:
        """Those that train, by their numbers."""
        return sorted((one for one in self.members.values() if one.steps), key=lambda one: one.rank)

    @property
    def expected(self) -> int:
        """How many of them there are here, once all have begun."""
        local = max((one.local for one in self.members.values()), default=0)
        world = max((one.world for one in self.members.values()), default=1)
        return local or world

    @property
    def whole(self) -> bool:
        """Whether all that run here have taken steps."""
        return len(self.ranks) >= self.expected

    @property
    def elsewhere(self) -> int:
        """Ranks that run on other nodes."""
        return max(0, self.world - len(self.ranks)) if self.whole else 0

    @property
    def slowest(self) -> Readings:
        return max(self.ranks, key=lambda one: _latest(one) or 0.0, default=self)

    @property
    def largest(self) -> Readings:
        return max(self.ranks, key=lambda one: one.peak or 0, default=self)

    def time_spread(self) -> float:
        """How much longer the slowest rank's step is than the fastest's."""
        found = [seconds for one in self.ranks if (seconds := one.step_seconds)]
        return max(found) / min(found) - 1 if len(found) > 1 else 0.0

    def memory_spread(self) -> tuple[float, int]:
        """Share by which the largest peak is above the least, and that one."""
        found = [peak for one in self.ranks if (peak := one.peak)]
        return (max(found) / min(found) - 1, min(found)) if len(found) > 1 else (0.0, 0)

    def by_rank(self) -> list[dict[str, Any]]:
        """For the measurement; nothing of a script of one process."""
        if self.world <= 1:
            return []
        return [
            {
                "rank": one.rank, "step_seconds": one.step_seconds, "steps": one.steps, "allocated_bytes": one.memory.get("allocated_peak"),
                "reserved_bytes": one.memory.get("reserved_peak"), "host_bytes": one.memory.get("rss_peak"),
            }
            for one in self.ranks
        ]  # fmt: skip

    # ------------------------------------------------------------------ as one

    def _replaced(self, source: Hashable, one: Readings) -> None:
        """A launcher starts a rank again after an error: what the one before did is over."""
        for other, before in list(self.members.items()):
            if other != source and before.gone and before.rank == one.rank and before.world == one.world:
                del self.members[other]

    def _take(self) -> None:
        every = list(self.members.values())
        found = self.ranks or every[:1]
        slow, large = (self.slowest, self.largest) if self.ranks else (found[0], found[0])
        self.seconds, self.parts = slow.seconds, slow.parts
        self.data_seconds, self.wall_seconds, self.after = slow.data_seconds, slow.wall_seconds, large.after
        self.delay_seconds = slow.delay_seconds
        self.steps = min(one.steps for one in found)
        self.kind, self.device_name, self.rest, self.weights = large.kind, large.device_name, large.rest, large.weights
        self.memory = {name: max(one.memory.get(name, 0) for one in found) for name in large.memory}
        self.threads, self.versions = found[0].threads, found[0].versions
        self.rank, self.world = slow.rank, max(one.world for one in every)
        self.ended = all(one.ended or one.gone for one in found)
        self.error = next((one.error for one in every if one.error), "")
        self.failed = next((one.failed for one in every if one.failed), "")


def _latest(one: Readings) -> float | None:
    kept = one.seconds[max(one.skipped, len(one.seconds) - _LATEST) :]
    return statistics.median(kept) if kept else None
