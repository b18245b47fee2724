"""A script of the user's from its start to its end: the process, what it tells, what is said of it, and its run folder.

The script has this process's standard streams, folder and arguments, and its exit status becomes this one's. Everything that
is said goes to stderr, a line at a time. The script never waits for this process, but where memory ran out: that is
explained before its own traceback.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from foretell.errors import ForetellError
from foretell.hardware.types import Cluster
from foretell.observe import lines
from foretell.observe.machine import cluster_of
from foretell.observe.readings import LEAK_SAMPLES, WAITS, WINDOW, Readings
from foretell.observe.record import Record
from foretell.plan.types import Plan
from foretell.search import followed
from foretell.search.followed import Followed
from foretell.search.script_ways import Search
from foretell.simulate.parts import PlanCost
from foretell.trace.recipe import Recipe
from foretell.trace.script.words import Script
from foretell.units import MIB

BEFORE, BESIDE, NO = "before", "beside", "no"
FIRST_STEPS = 4
"""After which predicted is put beside measured."""
WRITE_SECONDS = 5.0
"""Between two writings of the measurement."""
PATIENCE_SECONDS = 60.0
"""For a prediction that is not there yet when the script has ended by itself."""
SLOWER_AGAIN = 1.2
"""Times slower than what was told before is told again."""
RAM_BAND = (0.9, 1.25, 150 * MIB)
"""A process on a CPU is expected between these shares of its tensors, and so many bytes more: pages that the allocator keeps,
threads, libraries that are loaded in the first step. Assumed."""
_PR_SET_PDEATHSIG = 1
_BOOT = str(Path(__file__).resolve().parents[1] / "runtime" / "observe" / "boot")

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What was typed."""

    script: Script
    on: str = "auto"
    limit: int | None = None
    predict: str = BEFORE
    out: Path
    time_limit: float = 600.0


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


def predict(asked: Asked, found: Predicted) -> None:
    """Follow the script on fake tensors and cost it; whatever is in the way is a reason, and no error."""
    try:
        found.cluster = found.cluster or cluster_of(asked.on)
        if asked.predict == NO:
            found.why_not = "no prediction was asked for"
            return
        found.followed = followed.follow(asked.script, found.cluster, time_limit=asked.time_limit)
        found.cost = followed.cost(found.followed, found.cluster, asked.on)
    except ForetellError as error:
        found.why_not = " ".join(str(error).split())
    except Exception as error:  # a prediction is never worth the run
        found.why_not = f"following it failed ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    finally:
        found.done.set()


class Session:
    """One watched run."""

    def __init__(self, asked: Asked, record: Record, say: Say) -> None:
        self.asked, self.record, self.say = asked, record, say
        self.found, self.readings = Predicted(), Readings()
        self.signals: list[int] = []
        self._told: dict[str, float] = {}
        self._settled: float | None = None
        self._written = time.monotonic()
        self._buffer = bytearray()

    # ------------------------------------------------------------------ the whole of it

    def run(self) -> int:
        """The script's exit status, as `subprocess` has it."""
        self._write_plan()
        if self.asked.limit is not None and self.asked.predict != BEFORE:  # where it runs decides how it is held
            self.found.cluster = cluster_of(self.asked.on)
        if self.asked.predict == BEFORE:
            predict(self.asked, self.found)
            self._say_prediction()
        else:
            threading.Thread(target=predict, args=(self.asked, self.found), name="foretell-predict", daemon=True).start()
        status = self._watched()
        self._finish(status)
        return status

    def _watched(self) -> int:
        out, theirs = os.pipe()
        answers, mine = os.pipe()
        try:
            process = self._started(theirs, answers)
        finally:
            os.close(theirs)
            os.close(answers)
        before = self._catch(process)
        try:
            with selectors.DefaultSelector() as ready:
                ready.register(out, selectors.EVENT_READ)
                self._listen(process, ready, out, mine)
            return process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for handle in (out, mine):
                os.close(handle)

    def _started(self, out: int, answers: int) -> subprocess.Popen[bytes]:
        settings = {"out": out, "answers": answers, "limit": self.asked.limit, "device": self._device()}
        path = os.environ.get("PYTHONPATH")
        environment = {
            **os.environ, "FORETELL_WATCH": json.dumps(settings), "PYTHONPATH": os.pathsep.join(filter(None, (_BOOT, path))),
            **({"FORETELL_WATCH_PATH": path} if path is not None else {}),
        }  # fmt: skip
        words = list(self.asked.script.words)
        words = [sys.executable, *words] if words[0].endswith(".py") else words
        sys.stdout.flush()
        return subprocess.Popen(words, env=environment, pass_fds=(out, answers), preexec_fn=_end_with_parent())

    def _device(self) -> str:
        cluster = self.found.cluster
        return "" if cluster is None else "cpu" if cluster.device.backend == "cpu" else "cuda"

    def _catch(self, process: subprocess.Popen[bytes]) -> dict[int, Any]:
        """Signals are the script's to handle; those that a terminal sends, it has got itself."""

        def forward(number: int, _: Any) -> None:
            self.signals.append(number)
            if not (number == signal.SIGINT and _in_foreground()) and process.poll() is None:
                process.send_signal(number)

        return {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def _listen(self, process: subprocess.Popen[bytes], ready: selectors.BaseSelector, out: int, answers: int) -> None:
        """Until the script has ended; processes that it left behind may keep the pipe open."""
        open_ = True
        while open_:
            ended = process.poll() is not None
            if ready.select(0.0 if ended else 0.25):
                piece = os.read(out, 1 << 16)
                open_ = bool(piece)
                self._buffer += piece
                self._hear(answers)
            elif ended:
                return
            self._look()

    def _hear(self, answers: int) -> None:
        *whole, rest = self._buffer.split(b"\n")
        self._buffer = bytearray(rest)
        for line in whole:
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if message["kind"] == "oom":
                    try:
                        self._explain(message)
                    finally:
                        with contextlib.suppress(OSError):
                            os.write(answers, b"told\n")
                else:
                    self.readings.hear(message)

    # ------------------------------------------------------------------ what is said

    def _look(self) -> None:
        """After every message, and now and then without one."""
        readings = self.readings
        if readings.steps >= FIRST_STEPS and "beside" not in self._told and self._ready():
            self._beside()
        if "beside" in self._told:
            self._drifts()
        if readings.steps and time.monotonic() - self._written > WRITE_SECONDS:
            self._write()

    def _ready(self) -> bool:
        """Whether there is a prediction, or there will be none."""
        return self.found.done.is_set() and (self.readings.steps >= 2 * FIRST_STEPS or len(self.readings.parts) > 1 or self.readings.ended)

    def _beside(self) -> None:
        if "predicted" not in self._told and self.asked.predict == BESIDE:
            self._say_prediction()
        self._told["beside"] = 1.0
        self._settle_ram()
        self.say(lines.beside(self.readings, self._comparable(), self.found.why_not))
        self._settled = self.readings.step_seconds

    def _comparable(self) -> Mapping[str, Any]:
        """What was predicted, if it was for the kind of device that the script runs on."""
        if self.found.cost is None or self._device() == ("cpu" if self.readings.kind == "cpu" else "cuda"):
            return self.found.said
        self.found.why_not = f"it was predicted for {self.asked.on} and runs on {'a CPU' if self.readings.kind == 'cpu' else 'a GPU'}"
        self.say(f"not compared: {self.found.why_not}")
        self.found.cost = None
        return {}

    def _say_prediction(self) -> None:
        self._told["predicted"] = 1.0
        if self.found.cost is None:
            if self.asked.predict != NO:
                self.say(f"watching without a prediction: {self.found.why_not}")
            return
        for note in self.found.followed.notes if self.found.followed else ():
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

    # ------------------------------------------------------------------ out of memory

    def _explain(self, told: Mapping[str, Any]) -> None:
        """What held the bytes, and what would have fitted: each way is followed with the change made."""
        self.found.done.wait(self.asked.time_limit)
        cost, step, cluster = self.found.cost, self.found.followed, self.found.cluster
        room, limit = self._room(told)
        said = cost.plan.predicted if cost is not None else None
        memory = cost.worst.memory if cost is not None else None
        found = lines.out_of_memory(told, limit, said, memory.categories if memory else {}, memory.holders if memory else ())
        for line in found:
            self.say(line)
        ways, tried = [], 0
        if cost is not None and step is not None and cluster is not None and room is not None:
            search = Search(step, followed.with_room(cluster, room), self.asked.on)
            ways = search.ways()
            tried = len(search.tried)
            for line in lines.remedies(ways, tried):
                self.say(line)
        elif self.found.why_not:
            self.say(f"  would fit  not known: {self.found.why_not}")
        self.record.out_of_memory({
            **told, "room_bytes": room, "predicted": dict(said or {}), "ways_tried": tried, "ways": [way.to_json() for way in ways],
            "held": dict(memory.categories) if memory else {}, "lines": [*found, *(lines.remedies(ways, tried) if ways else [])],
        })  # fmt: skip

    def _room(self, told: Mapping[str, Any]) -> tuple[int | None, str]:
        """Bytes that tensors may hold, and what limits them in words."""
        allowed, held = told.get("allowed") or {}, told["memory"]
        if allowed:
            own = held.get("reserved", 0)
            room = min(allowed["free"] + own, allowed["allowed"])
            held_to = allowed["allowed"] < allowed["total"]
            what = f"{lines.size(allowed['allowed'])} allowed" if held_to else f"{lines.size(allowed['total'])} on the device"
            return room, f"{what}, {lines.size(allowed['free'])} of the device free"
        if self.asked.limit is not None:
            return _tensors_in(self.asked.limit, told), f"--memory-limit {lines.size(self.asked.limit)}"
        cluster = self.found.cluster
        ram = cluster.device.memory_bytes if cluster is not None and cluster.device.backend == "cpu" else None
        return (_tensors_in(ram, told), f"{lines.size(ram)} of RAM") if ram else (None, "no limit is known")

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
        name = shlex.join(self.asked.script.words)
        if self.found.cost is not None:
            return self.found.cost.plan.with_(model={**self.found.cost.plan.model, "model": name})
        notes = (f"not predicted: {self.found.why_not}",) if self.found.why_not else ()
        return followed.plan_of(name, Recipe(precision="fp32"), self.asked.on, self.readings.loader_batch or 1).with_(notes=notes)

    def _write_plan(self) -> None:
        self.record.plan(self._plan())

    def _write(self) -> None:
        self._written = time.monotonic()
        self._settle_ram()
        plan, cost = self._plan(), self.found.cost
        self.record.plan(plan)
        if self.found.followed is not None and "trace" not in self._told:
            self._told["trace"] = 1.0
            self.record.trace(self.found.followed.text)
        unit, per_step = (cost.unit, cost.per_step) if cost is not None else ("samples", plan.micro_batch * self.readings.micro_batches)
        self.record.measured(self.readings, plan, unit, per_step)

    def _finish(self, status: int) -> None:
        if not self.found.done.is_set() and not self.signals and status == 0:
            self.found.done.wait(PATIENCE_SECONDS)
        if "beside" not in self._told and self.readings.steps > 1:
            self._beside()
        self._write()
        self.record.close()
        if not self.readings.versions:
            self.say("the script did not import torch: nothing was watched")
        elif not self.readings.steps and status == 0:
            self.say("no step of an optimizer was seen")
        readers = " (foretell compare, foretell report)" if self.readings.steps > 1 else ""
        self.say(f"{lines.steps(self.readings.steps)}; run folder {self.record.path}{readers}")


def _tensors_in(limit: int, told: Mapping[str, Any]) -> int:
    """What the tensors of a process on a CPU may be, if it is to stay below a limit at the upper end of its band."""
    _, high, more = RAM_BAND
    return max(0, int((limit - int(told.get("rest", 0)) - more) / high))


def _end_with_parent() -> Callable[[], None] | None:
    """On Linux the script ends when this process is killed: nothing is left behind."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl

    def before_script() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    return before_script


def _in_foreground() -> bool:
    """Whether a terminal sends its signals to this process and the script alike."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
