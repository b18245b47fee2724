"""What is said of a watched run while it goes, and what is written down: the same for a script and for a loop from inside."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from foretell.hardware.types import Cluster
from foretell.observe import lines
from foretell.observe.group import RankGroup
from foretell.observe.readings import LEAK_SAMPLES, WAITS, WINDOW, Readings
from foretell.observe.record import Record
from foretell.plan.types import Plan
from foretell.search.traces import followed
from foretell.search.traces.followed import Followed
from foretell.simulate.parts import PlanCost
from foretell.trace.recipe import Recipe
from foretell.trace.store.file import dumps
from foretell.units import MIB

FIRST_STEPS = 4
"""After which predicted is put beside measured."""
WRITE_SECONDS = 5.0
"""Between two writings of the measurement."""
SLOWER_AGAIN = 1.2
"""Times slower than what was told before is told again."""
RAM_BAND = (0.9, 1.25, 200 * MIB)
"""A process on a CPU is expected between these shares of its tensors, and so many bytes more: pages that the allocator keeps,
threads, libraries that are loaded in the first step. Assumed."""

Say = Callable[[str], None]


@dataclass
class Predicted:
    """What is known of the script before it runs, or why nothing is."""

    cluster: Cluster | None = None
    followed: Followed | None = None
    cost: PlanCost | None = None
    why_not: str = ""
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def said(self) -> Mapping[str, Any]:
        return self.cost.plan.predicted if self.cost is not None else {}


def _processes(count: int) -> str:
    return "one process" if count == 1 else f"a group of {count} processes"


class Teller:
    """Says and writes what is known of a run."""

    def __init__(self, name: str, on: str, record: Record, say: Say) -> None:
        """`name` is the command, or the class of the model."""
        self.name, self.on, self.record, self.say = name, on, record, say
        self.found, self.readings = Predicted(), Readings()
        self._told: dict[str, float] = {}
        self._settled: float | None = None
        self._written = time.monotonic()

    # ------------------------------------------------------------------ what is said

    def look(self) -> None:
        """After every message, and now and then without one."""
        readings = self.readings
        if readings.steps >= FIRST_STEPS and self._all_here() and "beside" not in self._told and self._ready():
            self._beside()
        if "beside" in self._told:
            self._drifts()
        if readings.steps and time.monotonic() - self._written > WRITE_SECONDS:
            self._write()

    def _all_here(self) -> bool:
        """Whether every rank has taken steps."""
        return not isinstance(self.readings, RankGroup) or self.readings.whole or self.readings.ended

    def _ready(self) -> bool:
        """Whether there is a prediction, or there will be none."""
        return self.found.done.is_set() and (self.readings.steps >= 2 * FIRST_STEPS or len(self.readings.parts) > 1 or self.readings.ended)

    def _beside(self) -> None:
        if "predicted" not in self._told:
            self._say_prediction()
        self._told["beside"] = 1.0
        self._settle_ram()
        self.say(lines.beside(self.readings, self._comparable(), self.found.why_not, self.record.load.read()))
        self._settled = self.readings.step_seconds

    def _comparable(self) -> Mapping[str, Any]:
        """What was predicted, if it was for the kind of device that the script runs on."""
        step, world = self.found.followed, self.readings.world
        if self.found.cost is None:
            return self.found.said
        if self.device() != ("cpu" if self.readings.kind == "cpu" else "cuda"):
            self.found.why_not = f"it was predicted for {self.on} and runs on {'a CPU' if self.readings.kind == 'cpu' else 'a GPU'}"
        elif step is not None and step.world != world:
            self.found.why_not = f"it was predicted for {_processes(step.world)} and runs in {_processes(world)}"
        else:
            return self.found.said
        self.say(f"not compared: {self.found.why_not}")
        self.found.cost = None
        return {}

    def _say_prediction(self) -> None:
        self._told["predicted"] = 1.0
        if self.found.cost is None:
            if self.found.why_not:
                self.say(f"watching without a prediction: {self.found.why_not}")
            return
        for note in self.found.followed.notes if self.found.followed else ():
            if "scratch folder" not in note:  # of the followed script; the one that is watched writes where it wants to
                self.say(f"note: {note}")

    def _drifts(self) -> None:
        readings = self.readings
        recent = readings.recent()
        if recent is not None and self._settled is not None and len(readings.seconds) < 3 * WINDOW:
            self._settled = min(self._settled, recent) if "slower" not in self._told else self._settled
        line = lines.slower(readings, self.found.said, self._settled) if self._settled is not None else None
        if line is not None and recent is not None and recent > SLOWER_AGAIN * self._told.get("slower", 0.0):
            self._told["slower"] = recent
            self.say(line)
        peak = readings.after[-1][1] if readings.after else 0
        if len(readings.after) >= LEAK_SAMPLES and peak > 1.5 * self._told.get("growing", 0.0) and (line := lines.growing(readings)):
            self._told["growing"] = peak
            self.say(line)
        if readings.steps >= WINDOW and readings.data_share() > WAITS and "waiting" not in self._told:
            self._told["waiting"] = 1.0
            self.say(lines.waiting(readings))

    def device(self) -> str:
        cluster = self.found.cluster
        return "" if cluster is None else "cpu" if cluster.device.backend == "cpu" else "cuda"

    # ------------------------------------------------------------------ the folder

    def _settle_ram(self) -> None:
        """On a CPU the process is predicted as its tensors and what it held before its first step, which is measured."""
        cost, rest = self.found.cost, self.readings.rest
        if cost is None or self.readings.kind != "cpu" or not rest or "ram" in self._told:
            return
        self._told["ram"] = 1.0
        low, high, more = RAM_BAND
        tensors = cost.plan.predicted["allocated_bytes"]
        said = {**cost.plan.predicted, "memory_bytes": tensors + rest}
        said["bands"] = {**said["bands"], "device_bytes": (int(rest + low * tensors), int(rest + high * tensors + more))}
        self.found.cost = replace(cost, plan=cost.plan.with_(predicted=said))

    def _plan(self) -> Plan:
        name = self.name
        if self.found.cost is not None:
            return self.found.cost.plan.with_(model={**self.found.cost.plan.model, "model": name})
        notes = (f"not predicted: {self.found.why_not}",) if self.found.why_not else ()
        return followed.plan_of(name, Recipe(precision="fp32"), self.on, self.readings.loader_batch or 1).with_(notes=notes)

    def _write_plan(self) -> None:
        self.record.plan(self._plan())

    def _write(self) -> None:
        self._written = time.monotonic()
        self._settle_ram()
        plan, cost = self._plan(), self.found.cost
        self.record.plan(plan)
        unit, per_step = (cost.unit, cost.per_step) if cost is not None else ("samples", plan.micro_batch * self.readings.micro_batches)
        self.record.measured(self.readings, plan, unit, per_step)
        if self.found.followed is not None and "trace" not in self._told:  # last: the largest, and the least needed
            self._told["trace"] = 1.0
            self.record.trace(dumps(self.found.followed.trace))

    def end(self) -> None:
        """What was not said yet, and the folder as it stays."""
        if self.readings.failed:
            self.say(f"watching stopped after step {self.readings.steps}: {self.readings.failed}")
        if "beside" not in self._told and self.readings.steps > 1:
            self._beside()
        self._write()
        self.record.close()
        if self.record.missing:
            self.say(f"the run folder lacks {self.record.missing}")
        readers = " (foretell compare, foretell report)" if self.readings.steps > 1 and not self.record.missing else ""
        self.say(f"{lines.steps(self.readings.steps)}; run folder {self.record.path}{readers}")
