"""A script of the user's from its start to its end: the process, what it tells, what is said of it, and its run folder.

The script has this process's standard streams, folder and arguments, and its exit status becomes this one's. Everything that
is said goes to stderr, a line at a time. The script never waits for this process, but where memory ran out: that is
explained before its own traceback.
"""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.errors import ForetellError, UserError
from foretell.observe import lines, out_of_memory
from foretell.observe.group import RankGroup
from foretell.observe.listen import Listener
from foretell.observe.machine import cluster_of, one_of
from foretell.observe.record import Record
from foretell.observe.tell import RAM_BAND, Predicted, Say, Teller
from foretell.search.advice.script_faster import ScriptSpeedSearch as Faster
from foretell.search.advice.script_ways import ScriptFitSearch
from foretell.search.traces import followed
from foretell.trace.script.words import ScriptCommand

BEFORE, BESIDE, NO = "before", "beside", "no"
PATIENCE_SECONDS = 60.0
"""For a prediction that is not there yet when the script has ended by itself."""
_PR_SET_PDEATHSIG = 1
_BOOT = str(Path(__file__).resolve().parents[1] / "runtime" / "observe" / "boot")

@dataclass(frozen=True, kw_only=True)
class WatchRequest:
    """What was typed."""

    script: ScriptCommand
    on: str = "auto"
    limit: int | None = None
    predict: str = BEFORE
    out: Path
    time_limit: float = 600.0


def predict(asked: WatchRequest, found: Predicted) -> None:
    """Follow the script on fake tensors and cost it; whatever is in the way is a reason, and no error."""
    try:
        if asked.predict == NO:
            return
        if asked.script.not_followed:
            raise UserError(asked.script.not_followed)
        followed.make_ready()
        found.cluster = found.cluster or cluster_of(asked.on)
        found.followed = followed.follow(asked.script, found.cluster, time_limit=asked.time_limit)
        if found.followed.world == 1:
            one_of(found.cluster, asked.on)
        found.cost = followed.cost(found.followed, found.cluster, asked.on)
    except ForetellError as error:
        found.why_not = " ".join(str(error).split())
    except Exception as error:  # a prediction is never worth the run
        found.why_not = f"following it failed ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    finally:
        found.done.set()


class Session(Teller):
    """One watched script."""

    def __init__(self, asked: WatchRequest, record: Record, say: Say) -> None:
        super().__init__(shlex.join(asked.script.words), asked.on, record, say)
        self.asked = asked
        self.readings: RankGroup = RankGroup()
        self.signals: list[int] = []
        self._explained = False

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
        before: dict[int, Any] = {}
        try:
            status = self._watched(before)
            self._finish(status)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if status == 0 and not self.signals:
            self._faster()
        return status

    def _faster(self) -> None:
        """The largest gains, once the script has ended by itself: looking for them takes the processor that it needs."""
        cost, step, cluster = self.found.cost, self.found.followed, self.found.cluster
        if cost is None or step is None or cluster is None or self.readings.steps < 2:
            return
        try:
            found = Faster(step, cluster, self.asked.on, cost).advice()
        except (ForetellError, KeyboardInterrupt):
            return
        for line in lines.faster(found.gains):
            self.say(line)

    def _watched(self, before: dict[int, Any]) -> int:
        """`before` gets the handlers of signals that were there: they come back once everything is written."""
        listener = Listener()
        try:
            process = self._started(listener.at)
            before |= self._catch(process)
            self._listen(process, listener)
            return process.wait()
        finally:
            listener.close()

    def _started(self, at: str) -> subprocess.Popen[bytes]:
        settings = {"at": at, "limit": self.asked.limit, "device": self.device(), "launched": self.asked.script.launched}
        path = os.environ.get("PYTHONPATH")
        environment = {
            **os.environ, "FORETELL_WATCH": json.dumps(settings), "PYTHONPATH": os.pathsep.join(filter(None, (_BOOT, path))),
            **({"FORETELL_WATCH_PATH": path} if path is not None else {}),
        }  # fmt: skip
        words = list(self.asked.script.words)
        words = [sys.executable, *words] if words[0].endswith(".py") else words
        sys.stdout.flush()
        return subprocess.Popen(words, env=environment, preexec_fn=_end_with_parent())

    def _catch(self, process: subprocess.Popen[bytes]) -> dict[int, Any]:
        """Signals are the script's to handle; those that a terminal sends, it has got itself."""

        def forward(number: int, _: Any) -> None:
            self.signals.append(number)
            if not (number == signal.SIGINT and _in_foreground()) and process.poll() is None:
                process.send_signal(number)

        return {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def _listen(self, process: subprocess.Popen[bytes], listener: Listener) -> None:
        """Until the script has ended and all of what it told is read; processes that it left behind may stay connected."""
        while process.poll() is None or listener.pending():
            for source, message in listener.messages(0.0 if process.poll() is not None else 0.25):
                if message["kind"] != "oom":
                    self.readings.hear_from(source, message)
                    continue
                try:
                    self._explain(message)
                finally:
                    source.answer()
            self.look()

    # ------------------------------------------------------------------ out of memory

    def _explain(self, told: Mapping[str, Any]) -> None:
        """What held the bytes, and what would have fitted: each way is followed with the change made. Of several ranks, the first's."""
        if self._explained:
            self.say(out_of_memory.on_another_rank(told))
            return
        self._explained = True
        self.found.done.wait(self.asked.time_limit)
        cost, step, cluster = self.found.cost, self.found.followed, self.found.cluster
        room, limit = self._room(told)
        said = cost.plan.predicted if cost is not None else None
        memory = cost.worst.memory if cost is not None else None
        found = out_of_memory.explained(told, limit, said, memory.categories if memory else {}, memory.holders if memory else ())
        for line in found:
            self.say(line)
        ways, tried = [], 0
        if cost is not None and step is not None and cluster is not None and room is not None:
            search = ScriptFitSearch(step, followed.with_room(cluster, room), self.asked.on)
            ways = search.ways()
            tried = len(search.tried)
            for line in out_of_memory.remedies(ways, tried):
                self.say(line)
        elif self.asked.predict != NO:
            self.say(f"  would fit  not known: {self.found.why_not or 'nothing limits it that is known'}")
        self.record.out_of_memory({
            **told, "room_bytes": room, "predicted": dict(said or {}), "ways_tried": tried, "ways": [way.to_json() for way in ways],
            "held": dict(memory.categories) if memory else {}, "lines": [*found, *(out_of_memory.remedies(ways, tried) if ways else [])],
        })  # fmt: skip

    def _room(self, told: Mapping[str, Any]) -> tuple[int | None, str]:
        """Bytes that tensors may hold, and what limits them in words."""
        allowed, held = told.get("allowed") or {}, told["memory"]
        if allowed:
            own = held.get("reserved", 0)
            room = min(allowed["free"] + own, allowed["allowed"], self.asked.limit or allowed["total"])
            held_to = allowed["allowed"] < allowed["total"]
            what = f"{lines.size(allowed['allowed'])} allowed" if held_to else f"{lines.size(allowed['total'])} on the device"
            return room, f"{what}, {lines.size(allowed['free'])} of the device free"
        if self.asked.limit is not None:
            return _tensors_in(self.asked.limit, told), f"--memory-limit {lines.size(self.asked.limit)}"
        cluster = self.found.cluster
        ram = cluster.device.memory_bytes if cluster is not None and cluster.device.backend == "cpu" else None
        return (_tensors_in(ram, told), f"{lines.size(ram)} of RAM") if ram else (None, "no limit is known")

    def _finish(self, status: int) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while status == 0 and not self.signals and time.monotonic() < until and not self.found.done.wait(0.2):
            pass
        if not self.readings.versions:
            self.say("the script did not import torch: nothing was watched")
        elif not self.readings.steps and status == 0:
            self.say("no step of an optimizer was seen")
        self.end()


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
