"""How far the main thread of a rank has come, and what it is at when it comes no further. No torch.

The training loop counts what it begins. A thread beside it looks once a second: at that count, at the collectives that were
started, and at the main thread's Python stack. Where none of them changes the rank is still, and the stack says whether it
waits for other ranks; the kernel says whether it computes. A rank that does neither is asleep.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from types import FrameType
from typing import Any

from foretell.runtime.detect.hangs import RankPosition
from foretell.runtime.process.proc import Idle

PREPARE, DATA, STEP, LOG, EVALUATION, SAVE, END = "preparing", "data", "step", "log", "evaluation", "save", "end"
"""Phases. What may wait for networks, disks or the user's own servers is not `STEP`."""
FAILED = "failed"
"""A collective failed on this rank: it had waited."""
MOVING, WAITING, DEVICE, BUSY, ASLEEP = "moving", "waiting", "device", "busy", "asleep"
"""Kinds: comes on; waits for other ranks; for its device; computes; does none of these."""
LOOK_SECONDS = 3.0
"""For so long the training loop must have begun nothing new before its frames are looked at: a frame that is looked at keeps what
it holds for longer, which was a hundred megabytes of a small model's step."""
STILL_SECONDS = 1.5
"""Less than this is no standstill."""
GAP_SECONDS = 5.0
"""Between two looks: more than this, and this process itself was not running."""
_RECENT = 20
_MOST_WORDS = 300

_TORCH = os.sep + "torch" + os.sep
_WAITS = (
    os.path.join(_TORCH, "distributed", ""), os.path.join(_TORCH, "cuda", ""),
    os.path.join(os.sep + "foretell", "runtime", "process", "control.py"),
    os.path.join(os.sep + "foretell", "runtime", "detect", "recorder.py"),
)  # fmt: skip
"""A thread that does nothing in one of these waits for other ranks, or for its device, which may wait for them."""
_PASSED = (
    os.path.join(_TORCH, "_ops.py"), os.path.join(_TORCH, "utils", "_contextlib.py"), os.path.join(_TORCH, "_compile.py"),
    os.path.join(_TORCH, "_dynamo", ""), os.path.join(_TORCH, "_functorch", ""), os.path.join(_TORCH, "autograd", "function.py"),
    os.sep + "contextlib.py", os.sep + "threading.py",
)  # fmt: skip
"""Passed on the way in: whoever called it says more."""
_ENGINE = "_engine_run_backward"
"""Backward in C++; on a GPU its Python code runs in other threads."""
_COLLECTIVES = "_c10d_functional"


class Progress:
    """What the training loop tells of itself; cheap enough for every step."""

    def __init__(self) -> None:
        self.count, self.phase = 0, PREPARE
        self.spent: dict[str, int] = dict.fromkeys((PREPARE, DATA, STEP, LOG, EVALUATION, SAVE, END, FAILED), 0)
        """Nanoseconds in each phase that is over."""
        self._since = time.monotonic_ns()
        self.observers: list[Callable[[int], None]] = []
        """Told after every update."""
        self.step, self.steps = 0, 0
        """Updates done in all, and by this process."""
        self.trains: Callable[[int], None] = lambda _: None
        """Called once, with the updates that are done: after the first one of this process."""
        self._last: float | None = None
        self._seconds: deque[float] = deque(maxlen=_RECENT)

    def at(self, phase: str) -> None:
        now = time.monotonic_ns()
        self.spent[self.phase] = self.spent.get(self.phase, 0) + now - self._since
        self.phase, self._since = phase, now
        self.count += 1

    def stepped(self, step: int) -> None:
        """That many updates are done."""
        self.step, now = step, time.monotonic()
        if self._last is not None:
            self._seconds.append(now - self._last)
        self._last = now
        self.steps += 1
        self.count += 1
        if self.steps == 1:
            self.trains(step)
        for observer in self.observers:
            observer(step)

    def step_seconds(self) -> float:
        """Median of the last steps; 0 while there are none."""
        return statistics.median(list(self._seconds)) if self._seconds else 0.0


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What a rank says of itself, once a second."""

    beat: int
    kind: str
    seconds: float
    """For how long it has been of that kind without coming on."""
    same_seconds: float
    """Since the training loop began something new."""
    phase: str
    step: int
    """Updates done."""
    steps: int
    """Of these, by this process."""
    step_seconds: float
    recovered_seconds: float
    """The longest sleep in a step that it woke from by itself."""
    collectives: int
    """That it has started, in all groups."""
    where: str
    """File, line and function of the user's code it is in, or of whatever it is in."""
    position: RankPosition | None = None
    """How far it is in each group; None where its collectives are not recorded."""

    def to_json(self) -> dict[str, Any]:
        position = self.position.to_json() if self.position is not None else None
        return {**asdict(replace(self, position=None)), "position": position}

    @classmethod
    def from_json(cls, data: Any) -> RankReport | None:
        """None where it is not a report."""
        if not isinstance(data, dict) or data.keys() != {item.name for item in fields(cls)}:
            return None
        data = {**data, "position": RankPosition.from_json(data["position"])}
        words = all(isinstance(data[name], str) for name in ("kind", "phase", "where"))
        numbers = all(type(value) in (int, float) for name, value in data.items() if name not in ("kind", "phase", "where", "position"))
        return cls(**data) if words and numbers else None


class Monitor:
    """Looks at the thread that made it, from another one."""

    def __init__(
        self, progress: Progress, *, collectives: Callable[[], int] = lambda: 0, device_works: Callable[[], bool] = lambda: False,
        look_s: float = LOOK_SECONDS,
    ) -> None:  # fmt: skip
        """`device_works` tells whether the device still has something to do; asked only while this rank stands still."""
        self.progress, self.collectives, self.device_works, self.look_s = progress, collectives, device_works, look_s
        self.position: Callable[[], RankPosition | None] = lambda: None
        self.thread = threading.get_ident()
        self.idle = Idle(os.getpid())
        self._beat = 0
        self._seen: Any = None
        self._looked = self._still = self._same = time.monotonic()
        self._count = -1
        self._slept = self._recovered = 0.0

    def report(self) -> RankReport:
        """To be asked about once a second."""
        now = time.monotonic()
        if now - self._looked > GAP_SECONDS:  # stopped and continued: that time does not count
            self._still = self._same = now
            self._slept = 0.0
            self.idle.forget()
        self._looked, self._beat = now, self._beat + 1
        progress, started = self.progress, self.collectives()
        if progress.count != self._count:
            self._count, self._same = progress.count, now
        frame = self._frame() if now - self._same >= self.look_s else None
        seen = (progress.count, started, _signature(frame))
        if seen != self._seen:
            if self._slept:
                self._recovered = max(self._recovered, self._slept)
            self._seen, self._still, self._slept = seen, now, 0.0
            self.idle.forget()
        if self.still_seconds():  # it costs a millisecond: not while all is well
            self.idle.look(now)
        kind, seconds = self._kind(frame)
        self._slept = seconds if kind == ASLEEP and progress.phase == STEP else 0.0
        return RankReport(
            beat=self._beat, kind=kind, seconds=round(seconds, 2), same_seconds=round(now - self._same, 2), phase=progress.phase,
            step=progress.step, steps=progress.steps, step_seconds=round(progress.step_seconds(), 4), recovered_seconds=round(self._recovered, 2),
            collectives=started, where=where(frame) if frame is not None else "",
            position=self.position(),
        )  # fmt: skip

    def still_seconds(self) -> float:
        return self._looked - self._still

    def _kind(self, frame: FrameType | None) -> tuple[str, float]:
        still = self.still_seconds()
        if still < STILL_SECONDS or frame is None:
            return MOVING, still
        if waits(frame):
            return WAITING, still
        if self.device_works():
            return DEVICE, still
        idle = min(still, self.idle.seconds())
        return (ASLEEP, idle) if idle >= STILL_SECONDS else (BUSY, still)

    def _frame(self) -> FrameType | None:
        """The innermost frame of the thread, or of the one that runs Python code of its backward."""
        frames = sys._current_frames()
        frame = frames.get(self.thread)
        if frame is None or frame.f_code.co_name != _ENGINE:
            return frame
        known = {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
        return next((other for ident, other in frames.items() if ident not in known), frame)


def _signature(frame: FrameType | None) -> tuple[tuple[int, int], ...]:
    found = []
    while frame is not None:
        found.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def waits(frame: FrameType | None) -> bool:
    """Whether a thread that stands still there waits for other ranks, as far as its Python code tells. Inside C++ code of
    backward nothing is known: that counts as waiting."""
    while frame is not None:
        name = frame.f_code.co_filename
        if frame.f_code.co_name == _ENGINE or any(part in name for part in _WAITS):
            return True
        if name.endswith(_PASSED[0]) and _COLLECTIVES in str(frame.f_locals.get("self", "")):
            return True
        if not any(part in name for part in _PASSED):
            return False
        frame = frame.f_back
    return False


def where(frame: FrameType) -> str:
    """`FILE:LINE in FUNCTION` of the innermost code that is neither Python's, nor a package's, nor foretell's own."""
    found: FrameType | None = frame
    while found is not None and (_foreign(found.f_code.co_filename) or found.f_globals.get("__name__") == "__main__"):
        found = found.f_back
    chosen = found or frame
    return f"{chosen.f_code.co_filename}:{chosen.f_lineno} in {chosen.f_code.co_name}"[-_MOST_WORDS:]


_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_ZOO = os.path.join(_PACKAGE, "zoo", "")
_PYTHON = os.path.dirname(os.__file__) + os.sep


def _foreign(path: str) -> bool:
    own = path.startswith(_PACKAGE) and not path.startswith(_ZOO)
    return own or path.startswith((_PYTHON, "<")) or any(part in path for part in ("site-packages", "dist-packages", "torchinductor_"))
