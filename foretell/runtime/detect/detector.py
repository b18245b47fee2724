"""Reads the rings of all ranks while the run goes, on the first rank, about once a second, and tells what it finds.

    rings ──► steps of all ranks ──► windows of clean ones ──► slow ranks, slow links, steps slower than predicted
                                          │                          └─► the screen, log.jsonl
                                          └─► collectives/ranks.jsonl: what each rank took, for the report

Steps and links take no more than a four-hundredth of the time of one core each: where many ranks make that slow, it looks less often. No torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from foretell.runtime.detect import findings
from foretell.runtime.detect.findings import SLOW_LINK, RankFinding, RunFacts, probed
from foretell.runtime.detect.layout import FOLDER, HISTORY
from foretell.runtime.detect.links import LinkWatch, MatrixReading, SlowLink, transfers
from foretell.runtime.detect.records import (
    RingContent,
    StepTable,
    clean,
    joined,
    read_all,
    read_ring,
    read_steps,
    step_table,
)
from foretell.runtime.detect.slow import LIMITS, SlowLimits, SlowWatch, excess_of

LOOK_SECONDS = 0.25
LINKS_SECONDS = 5.0
"""Between two looks at what transfers took."""
SHARE = 400
"""Times as long as a look took, until the next one; a look at links does not put off the one at steps."""
WARM_UP_STEPS = 10
HISTORY_SECONDS = 5.0
"""A row of the history covers at least that."""


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What was predicted of a step; None where nothing was."""

    step_seconds: float | None = None
    high_seconds: float | None = None


@dataclass
class StragglerWatch:
    """What the detector knows: windows of steps in, findings out. No files, no threads."""

    roles: Sequence[str]
    facts: RunFacts
    expected: Expectation = field(default_factory=Expectation)
    limits: SlowLimits = LIMITS
    warm_up: int = WARM_UP_STEPS
    """Counted from the first step of the processes."""
    _first: int | None = None
    _pending: list[StepTable] = field(default_factory=list)
    _recent: list[StepTable] = field(default_factory=list)
    _count: int = 0
    _medians: list[float] = field(default_factory=list)
    _told_step: bool = False

    def __post_init__(self) -> None:
        self.slow, self.links = SlowWatch(self.roles, self.limits), LinkWatch()

    def steps(self, table: StepTable) -> tuple[list[RankFinding], list[StepTable]]:
        """The next steps: findings, and the clean ones in parts of `limits.stride`."""
        if not len(table):
            return [], []
        if self._first is None:
            self._first = int(table.steps[0])
        found, parts, limits = [], [], self.limits
        whole = joined([*self._pending, clean(table, self._first + self.warm_up - 1)])
        while len(whole) >= limits.stride:
            part, whole = whole.at(slice(0, limits.stride)), whole.at(slice(limits.stride, None))
            parts.append(part)
            self._count += limits.stride
            self._recent = [*self._recent[1 - limits.spikes_window // limits.stride :], part]
            if self._count >= limits.window:
                window = joined(self._recent[-limits.window // limits.stride :])
                found += [findings.of_rank(one, self.facts) for one in self.slow.window(window)]
                found += self._predicted(window)
            if self._count >= limits.spikes_window and self._count % limits.spikes_stride == 0:
                found += [findings.of_rank(one, self.facts) for one in self.slow.long_window(joined(self._recent))]
        self._pending = [whole]
        return found, parts

    def _predicted(self, window: StepTable) -> list[RankFinding]:
        """Once: that steps take longer than predicted, and by how much."""
        predicted, high = self.expected.step_seconds, self.expected.high_seconds
        self._medians = [*self._medians[1 - self.limits.windows :], float(np.median(window.whole[0]))]
        if not predicted or not high or self._told_step or len(self._medians) < self.limits.windows or min(self._medians) <= high:
            return []
        self._told_step = True
        return [findings.of_prediction(float(np.median(self._medians)), predicted, high, int(window.steps[-1]), self.facts)]

    def transfers(self, rings: Sequence[RingContent], window: StepTable) -> list[SlowLink]:
        """The collectives of a window."""
        first, last = int(window.steps[0]), int(window.steps[-1])
        return self.links.window(transfers(rings, after=first, before=last), float(np.median(window.whole)), last - first)


class StragglerDetector:
    """A thread on the first rank, from `start` to `close`."""

    def __init__(
        self, run: Path, session: str, world: int, *, log: Path, tell: Callable[[str], None], expected: Expectation | None = None,
        price_per_hour: float | None = None, step: Callable[[], int] = lambda: 0,
    ) -> None:  # fmt: skip
        """`log` gets a row for each finding; `step` tells how many are done."""
        self.run, self.session, self.world, self.log, self.tell, self.step = run, session, world, log, tell, step
        self.expected, self.price_per_hour = expected or Expectation(), price_per_hour
        self.locate: Callable[[], None] = lambda: None
        """Asks the ranks to find out which link is slow; `located` gets the answer, while `_asked` says why."""
        self._asked: RankFinding | None = None
        self.watch: StragglerWatch | None = None
        self.found: list[RankFinding] = []
        self._seen = 0
        self._linked: tuple[float, StepTable | None] = (time.monotonic() + LINKS_SECONDS, None)
        self._link_cost = 0.0
        """CPU seconds of the last look at links."""
        self._written = time.monotonic()
        self._windows: list[StepTable] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._loop, name="foretell-detect", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """One last look, so that short runs are told of too."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=10.0)
        with contextlib.suppress(Exception):
            self.look()
        self._write_history(last=True)

    def _loop(self) -> None:
        pause = LOOK_SECONDS
        while not self._stop.wait(pause):
            began = time.thread_time()
            try:
                self.look()
            except Exception as error:  # nothing that is found is worth a run
                self.tell(f"nobody looks for slow ranks any more: {type(error).__name__}: {str(error)[:200]}")
                return
            pause = max(LOOK_SECONDS, SHARE * (time.thread_time() - began - self._link_cost))

    def look(self) -> None:
        """Read what is new and tell what follows."""
        self._link_cost = 0.0
        rings = self._rings(read_steps)
        if len(rings) < self.world:
            return
        if self.watch is None:
            places = {ring.header.rank: ring.header.place for ring in rings}
            facts = RunFacts(world=self.world, places=places, price_per_hour=self.price_per_hour, several=len(set(places.values())) > 1)
            self.watch = StragglerWatch([ring.header.role for ring in rings], facts, self.expected)
        table = step_table([ring.steps for ring in rings], after=self._seen)
        if not len(table):
            return
        self._seen = int(table.steps[-1])
        found, windows = self.watch.steps(table)
        if windows:
            found += self._links(windows)
        self._windows += windows
        self._write_history()
        for one in found:
            self.give(one)

    def _rings(self, read: Callable[[Path], RingContent]) -> list[RingContent]:
        return [ring for ring in read_all(self.run, read) if ring.header.session == self.session]

    def _links(self, windows: Sequence[StepTable]) -> list[RankFinding]:
        """Slow links, every few seconds: collectives are many more rows than steps."""
        assert self.watch is not None
        now, (due, before) = time.monotonic(), self._linked
        whole = joined([*([before] if before is not None else []), *windows])
        if now < due:
            self._linked = due, whole
            return []
        began = time.thread_time()
        found = [findings.of_link(link, self.watch.facts) for link in self.watch.transfers(self._rings(read_ring), whole)]
        self._link_cost = time.thread_time() - began
        self._linked = now + max(LINKS_SECONDS, SHARE * self._link_cost), None
        if found:
            self._asked = found[0]
            self.locate()
        return found

    def located(self, reading: MatrixReading) -> None:
        """Which link it is, after it was probed."""
        if self._asked is not None:
            text = f"{SLOW_LINK}: {probed(reading)}"
            self.give(replace(self._asked, text=text, ranks=reading.ranks, step=self.step()))
            self._asked = None

    def give(self, finding: RankFinding) -> None:
        """Tell it on the screen and in the log."""
        self.found.append(finding)
        self.tell(finding.text)
        self._append(self.log, {**finding.to_json(), "told_step": self.step()})

    def _write_history(self, *, last: bool = False) -> None:
        """What each rank took, a row for a few seconds of steps."""
        now = time.monotonic()
        if not self._windows or self.watch is None or (now - self._written < HISTORY_SECONDS and not last):
            return
        whole = joined(self._windows)
        self._windows, self._written = [], now
        excess = excess_of(whole.own, self.watch.roles)
        self._append(self.run / FOLDER / HISTORY, {
            "steps": [int(whole.steps[0]), int(whole.steps[-1])], "step_seconds": _round(np.median(whole.whole)),
            **{name: [_round(one) for one in np.median(rows, axis=1)] for name, rows in
               (("excess", excess), ("own", whole.own), ("waited", whole.waited), ("delayed", whole.delayed))},
            "mean_excess": [_round(one) for one in np.mean(excess, axis=1)],
        })  # fmt: skip

    def _append(self, path: Path, row: dict[str, Any]) -> None:
        """One write at the end of a file, which others write to as well."""
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(handle, json.dumps(row).encode() + b"\n")
            finally:
                os.close(handle)


def _round(value: Any) -> float:
    return round(float(value), 7)
