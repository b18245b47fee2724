"""Measure this machine, stage by stage, into a journal. Nothing is fitted here."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from foretell.errors import UserError
from foretell.hardware.probe import chase, machine, memory, ops, power, updates
from foretell.hardware.probe import journal as journals
from foretell.hardware.probe.cases import steps
from foretell.hardware.probe.journal import Journal
from foretell.hardware.profile import MODES, Case, Measured, journal_path, own_path
from foretell.hardware.types import Device

Progress = Callable[[str, float], None]
"""Told what is being done, and which share of the whole is behind."""

BUDGET_SECONDS = {
    ("cuda", "quick"): 35.0, ("cuda", "full"): 360.0, ("cuda", "share"): 255.0,
    ("cpu", "quick"): 15.0, ("cpu", "full"): 150.0, ("cpu", "share"): 150.0,
}  # fmt: skip
"""A probe to be shared ends within five minutes, start and ranks included."""
STEPS_SHARE = {"cuda": 0.2, "cpu": 0.25}
"""Of the time, for reference steps."""
SHARED_STEPS_SHARE = 0.27
"""The same of a probe to be shared: with few steps the host is judged too quick."""
POWER_SECONDS = {"quick": 7.0, "full": 18.0, "share": 14.0}
"""Kept for watts, at most a third of what there is."""
LEAST_STEPS = {
    ("cuda", "quick"): 15, ("cuda", "full"): 50, ("cuda", "share"): 20, ("cpu", "quick"): 5, ("cpu", "full"): 10, ("cpu", "share"): 8,
}  # fmt: skip
STEP_SECONDS = {"quick": 0.2, "full": 0.6, "share": 0.35}
SMALL_DISK_FILE = 64 * 2**20
LEAST_FOR_OPS = 0.4
"""Share of the budget that ops get, whatever went before took: without them a profile says nothing of speed."""
SHORT_BUDGET_SECONDS = 10.0
WAKE_SECONDS = 0.3


def probe(
    device: str = "auto",
    mode: str = "quick",
    *,
    journal: str | Path | None = None,
    seconds: float | None = None,
    resume: bool = False,
    force: bool = False,
    progress: Progress = lambda doing, share: None,
) -> Measured:
    """Measure for about `seconds` (by default the mode's) and return what was found.

    Every figure is in `journal` as soon as it is known; with `resume` a journal that is there is gone on with, and
    what it holds is not measured again. A GPU that somebody else is using is refused unless `force`.
    """
    if mode not in MODES:
        raise UserError(f"'{mode}' is no way to probe", f"give {', '.join(MODES)}")
    kind = machine.choose(device)
    if kind == "cuda" and not force:
        machine.refuse_busy()
    about = machine.about(kind)
    path = Path(journal) if journal is not None else journal_path(own_path(about))
    budget = seconds if seconds is not None else BUDGET_SECONDS[kind, mode]
    with journals.begin(path, about, resume=resume) as book:
        with _noticed_interrupts() as asked:
            _Run(kind, mode, machine.device_of(kind), book, budget, progress, asked).all()
        found = journals.measured(book.about, book.entries, mode, journals.stages(kind))
    with contextlib.suppress(OSError):  # the plain journal is as good
        journals.pack(path)
    return found


@contextlib.contextmanager
def _noticed_interrupts() -> Iterator[list[int]]:
    """Ctrl-C interrupts at once, and is remembered: inside autograd an interrupt may come out as another error."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def notice(number: int, _: object) -> None:
        asked.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, notice)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


class _Run:
    """One probe under way."""

    def __init__(
        self, kind: str, mode: str, device: Device, book: Journal, budget: float, progress: Progress, asked: list[int]
    ) -> None:
        self.kind, self.mode, self.device, self.book, self.progress = kind, mode, device, book, progress
        self.asked_to_stop = asked
        self.fully = "quick" if mode == "quick" else "full"  # what takes seconds either way
        self.budget, self.began = budget, time.perf_counter() - book.spent
        self.end = self.began + budget

    def all(self) -> None:
        if not self._done("launch"):
            self._first()
        self._stage("launch", lambda: self._add("launch", [memory.launch(self.kind)]))
        self._stage("levels", lambda: self._add("level", memory.levels(self.kind, self.fully)))
        if self.mode != "quick":
            self._stage("latency", lambda: self._add("latency", chase.latencies(self.kind)))
            self._stage("rates", lambda: self._add("rate", chase.rates(self.kind)))
        self._stage("copies", self._copies)
        self._stage("disk", self._disk)
        self._stage("steps", self._steps)
        self._stage("ops", self._ops)
        if self.kind == "cuda":
            self._stage("power", self._power)
            self._stage("clocks", lambda: self._clocks("after"))

    def _first(self) -> None:
        """What stood before anything was measured; then the device is woken, since an idle one runs slowly."""
        sentence = machine.disturbed()
        if sentence:
            self.book.add("note", 0.0, {"text": sentence})
        if self.kind == "cuda":
            self.book.add("clocks", 0.0, machine.clocks("before"))
        began = time.perf_counter()
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-3)  # the first optimizer imports for seconds
        spent = time.perf_counter() - began
        self.began, self.end = self.began + spent, self.end + spent
        x = torch.randn(2048 if self.kind == "cuda" else 256, 2048 if self.kind == "cuda" else 256, device=self.kind)
        until = time.perf_counter() + min(WAKE_SECONDS, self.budget / 20)
        while time.perf_counter() < until:
            x @ x
            if self.kind == "cuda":
                torch.cuda.synchronize()

    # -- one stage

    def _stage(self, name: str, work: Callable[[], None]) -> None:
        """Do it unless a journal has it already; what fails is left out and said."""
        if self._done(name):
            return
        self._tell(name)
        try:
            work()
        except _Skip as skip:
            self.book.add("skipped", 0.0, {"stage": name, "why": str(skip)})
        except UserError:
            raise
        except (RuntimeError, OSError, ArithmeticError) as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            self.book.add("skipped", 0.0, {"stage": name, "why": why})
        else:
            self.book.add("finished", 0.0, {"stage": name, "mode": self.mode})

    def _done(self, name: str) -> bool:
        """Whether it was finished before, as thoroughly as is asked now."""
        enough = ("full", self.mode)
        return any(
            entry.stage == "finished" and entry.content["stage"] == name and entry.content["mode"] in enough
            for entry in self.book.entries
        )

    def _tell(self, doing: str) -> None:
        if self.asked_to_stop:
            raise KeyboardInterrupt
        self.progress(doing, min(0.99, (time.perf_counter() - self.began) / self.budget))

    def _add(self, stage: str, rows: Iterable[dict[str, object]]) -> None:
        before = time.perf_counter()
        for row in rows:
            now = time.perf_counter()
            self.book.add(stage, now - before, row)
            self._tell(stage)
            before = now

    # -- stages with more to them

    def _clocks(self, moment: str) -> None:
        found = machine.clocks(moment)
        if not found:
            raise _Skip("no NVIDIA driver answers")
        self.book.add("clocks", 0.0, found)

    def _copies(self) -> None:
        self._add("copy", memory.copies(self.kind, self.fully))
        if self.kind == "cuda":
            self._add("copy", updates.updates(self.kind, self.fully))

    def _disk(self) -> None:
        before = time.perf_counter()
        size = SMALL_DISK_FILE if self.budget < SHORT_BUDGET_SECONDS else memory.DISK_BYTES
        rows, why = memory.disk(self.book.path.parent, size)
        if why:
            raise _Skip(why)
        spent = (time.perf_counter() - before) / len(rows)
        for row in rows:
            self.book.add("copy", spent, row)

    def _steps(self) -> None:
        done = {steps.name_of(entry.content["config"]) for entry in self.book.entries if entry.stage == "step"}
        until = min(self.end, time.perf_counter() + (SHARED_STEPS_SHARE if self.mode == "share" else STEPS_SHARE[self.kind]) * self.budget)
        least = LEAST_STEPS[self.kind, self.mode]
        heavy = self.mode != "share"
        for spent, row in steps.run_steps(self.kind, done, until, STEP_SECONDS[self.mode], least, heavy=heavy):
            self.book.add("step", spent, row)
            self._tell(f"steps of {row['config']['model']}")

    def _ops(self) -> None:
        done = {tuple(entry.content["case"]) for entry in self.book.entries if entry.stage in ("ops", "failed")}
        kept = min(POWER_SECONDS[self.mode], self.budget / 3) if self.kind == "cuda" else 0.0
        least = time.perf_counter() + self.budget * LEAST_FOR_OPS  # on a busy machine what comes before takes longer
        self.end = max(self.end, least + kept) if not done else self.end
        for family, index, spent, found in ops.run_cases(self.kind, self.device, done, self.end - kept, mode=self.mode):
            if isinstance(found, Case):
                self.book.add("ops", spent, {"case": [family, index], "rows": [row.to_list() for row in found.rows]})
            else:
                self.book.add("failed", spent, {"case": [family, index], "why": found})
            self._tell(f"ops of {family}")
        if not any(entry.stage == "ops" for entry in self.book.entries):
            raise _Skip("no time was left")

    def _power(self) -> None:
        torch.cuda.empty_cache()
        found = False
        until = time.perf_counter() + POWER_SECONDS[self.mode]
        for spent, row in power.watts(self.fully, until):
            found = True
            self.book.add("power", spent, row)
            self._tell(f"watts: {row['name']}")
        if not found:
            raise _Skip("no NVIDIA driver answers")


class _Skip(Exception):
    """A stage that cannot be measured here, and why."""
