"""Where the steps of a script end, what they wait for and what they hold; told to whoever started it, a JSON line at a time.

    optimizer.step ends    one reading of the clock; now and then an event on the stream, never a wait for the device
    DataLoader's next      two readings: what the host waits for data
    backward               read in a few steps only, to see where the time goes
    an error at the end    out of memory: what was held; told before the script's own traceback

Loaded by its path into the script's Python: the standard library and torch, of foretell only the files beside it, by relative imports.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import TracebackType
from typing import Any

import torch
import torch.multiprocessing
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.data import dataloader

from .channel import Channel
from .process_state import about_this, allowed, delayed, is_out_of_memory, memory, status, tried_bytes, where, who

SAMPLE_SECONDS = 1.0
"""Between two readings of memory, events and the pipe."""
EVENT_SECONDS = 0.02
"""Between two events on the stream at least: one costs some microseconds."""
LOOKED_AT = (2, 3)
"""Steps whose parts are timed at the start; step 1 allocates, compiles and fills caches."""
LOOK_SECONDS = 10.0
"""Between later steps whose parts are timed."""
WAITING = 256
"""Events that may wait to be read."""
_BOOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "boot")

Send = Callable[[dict[str, Any]], None]
installed: StepHooks | None = None
"""The one of this process: benchmarks take its hooks off and put them back."""


def begin(given: str) -> None:
    """`given` is what `foretell watch` put into the environment: where it listens, and settings, as JSON."""
    global installed
    settings = json.loads(given)
    channel = Channel(settings["at"])
    watch = installed = StepHooks(channel.send, device=settings.get("device", ""), limit=settings.get("limit"))
    watch.given = given
    watch.install()
    before = sys.excepthook

    def uncaught(kind: Any, error: Any, trace: Any) -> None:
        with contextlib.suppress(Exception, KeyboardInterrupt):  # who presses Ctrl-C again waits for nothing here
            trace = error.__traceback__ = without_hooks(trace)
            watch.failed(error, trace, channel)
        before(kind, error, trace)

    def ended() -> None:
        with contextlib.suppress(Exception, KeyboardInterrupt):
            last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
            if last is not None and watch.error is not last:  # a hook of the script's own came before
                watch.failed(last, last.__traceback__, channel)
            watch.end()
            channel.close()

    def forked() -> None:
        watch.fresh()
        channel.leave(ended)

    sys.excepthook = uncaught
    watch.failing = lambda error: watch.failed(error, without_hooks(error.__traceback__), channel)
    atexit.register(ended)
    os.register_at_fork(after_in_child=forked)


class StepHooks:
    """Counts steps and reads clocks. Installed once in a process."""

    def __init__(self, send: Send, *, device: str = "", limit: int | None = None) -> None:
        self.send, self.device, self.limit = send, device, limit
        self.off = False
        """While somebody else's steps run: nothing is counted."""
        self.given = ""
        """What this process was told, for those that it starts."""
        self.failing: Callable[[BaseException], None] = lambda error: None
        """What is done with an error that ends a process, where somebody catches it before."""
        self._undo: list[Callable[[], None]] = []
        self.fresh()

    def fresh(self) -> None:
        """As before the first step; again in a process that was forked."""
        self.steps = 0
        self.error: BaseException | None = None
        self.seen: Any = None
        """The optimizer that stepped first."""
        self._cuda = False
        self._round: list[int] = []
        """Optimizers in the order in which they first stepped."""
        self._last: int | None = None
        """The one whose step ends a round."""
        self._ends, self._data = array("d"), 0.0
        """Ends of steps since they were told; seconds that the host waited for data meanwhile."""
        self._events: deque[tuple[int, Any]] = deque()
        self._before: tuple[int, Any] | None = None
        self._next_sample = self._next_event = self._next_look = 0.0
        self._marks: list[tuple[str, float, Any]] | None = None
        """Parts of the step under way, where it is looked at."""
        self._looked: deque[tuple[int, int, list[tuple[str, float, Any]]]] = deque()
        self._rest = 0
        self._delayed = delayed()
        self._reset = self._ran = False

    # ------------------------------------------------------------------ hooks

    def install(self) -> None:
        self.attach()
        self._limited()
        self.send(about_this())

    def attach(self) -> None:
        self._undo.append(register_optimizer_step_post_hook(self._stepped).remove)
        for owner, name, ours in self._changed():
            plain = vars(owner)[name] if isinstance(owner, type) else getattr(owner, name)
            setattr(owner, name, ours(plain))
            self._undo.append(lambda owner=owner, name=name, plain=plain: setattr(owner, name, plain))  # type: ignore[misc]

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _changed(self) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
        yield torch.autograd, "backward", self._backward
        yield dataloader._BaseDataLoaderIter, "__next__", self._read
        yield Optimizer, "__init__", self._made
        if self.given:
            from multiprocessing import popen_spawn_posix

            yield popen_spawn_posix.Popen, "_launch", self._started
            yield sys.modules["torch.multiprocessing.spawn"], "_wrap", self._wrapped

    def _started(self, plain: Any) -> Any:
        """Processes that are started anew are watched too, but for those that end with their parent, such as loaders' workers."""

        def launch(popen: Any, process: Any) -> Any:
            if not self.given or process.daemon:
                return plain(popen, process)
            before = {name: os.environ.get(name) for name in ("FORETELL_WATCH", "FORETELL_WATCH_PATH", "PYTHONPATH")}
            path = before["PYTHONPATH"]
            told = {"FORETELL_WATCH": self.given, "PYTHONPATH": os.pathsep.join(filter(None, (_BOOT, path)))}
            os.environ.update(told if path is None else {**told, "FORETELL_WATCH_PATH": path})
            try:
                return plain(popen, process)
            finally:
                for name, value in before.items():
                    if value is None:
                        os.environ.pop(name, None)
                    else:
                        os.environ[name] = value

        return launch

    def _wrapped(self, plain: Any) -> Any:
        """`torch.multiprocessing.spawn` writes down the error of a process and ends it: no hook for errors sees it."""

        @functools.wraps(plain)
        def wrap(*args: Any) -> Any:
            try:
                return plain(*args)
            except SystemExit as ended:
                with contextlib.suppress(Exception):
                    if ended.__context__ is not None:
                        self.failing(ended.__context__)
                raise

        return wrap

    def _backward(self, plain: Any) -> Any:
        def backward(*args: Any, **kwargs: Any) -> Any:
            self._ran = True
            if self._marks is None or self.off:
                return plain(*args, **kwargs)
            self._mark("forward")
            made = plain(*args, **kwargs)
            self._mark("backward")
            return made

        return backward

    def _read(self, plain: Any) -> Any:
        clock = time.perf_counter

        def following(loader: Any) -> Any:
            if self._marks is not None:
                self._mark("between")
            begun = clock()
            try:
                return plain(loader)
            finally:
                self._data += clock() - begun
                if self._marks is not None:
                    self._mark("data")
                if not self._ran:
                    self._base()

        return following

    def _made(self, plain: Any) -> Any:
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            plain(optimizer, *args, **kwargs)
            with contextlib.suppress(Exception):
                if not self.off:
                    self._base(optimizer)

        return init

    def _base(self, optimizer: Any = None) -> None:
        """What the process holds besides the model, as late as possible before its first step: what peaks are counted from."""
        if optimizer is not None:
            every = [getattr(one, "_local_tensor", one) for group in optimizer.param_groups for one in group["params"]]  # of shards: this rank's
            found = {one.untyped_storage().data_ptr(): one for one in every}
            self._weights = sum(one.untyped_storage().nbytes() for one in found.values())
            self._kind = next((one.device.type for one in found.values()), "cpu")
            self._cuda = self._kind == "cuda"
        if not hasattr(self, "_weights"):
            return
        if not self._cuda:
            self._rest = max(0, status("VmRSS") - self._weights)
            if not self._reset:
                with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
                    file.write("5")  # peaks are counted from here
                self._reset = True
        if optimizer is not None:
            name = torch.cuda.get_device_name() if self._cuda else ""
            self.send({"kind": "model", "weights": self._weights, "device": self._kind, "rest": self._rest, "name": name, **who()})

    # ------------------------------------------------------------------ a step

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.off or torch.compiler.is_compiling():  # a step that is compiled itself is not broken up for this
            return
        try:
            self._count(optimizer, time.perf_counter())
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """A mistake here is none of the script's business."""
        self.off, self._marks = True, None
        self.send({"kind": "failed", "why": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"})

    def _count(self, optimizer: Any, now: float) -> None:
        if self._last is None:
            key, self.seen = id(optimizer), self.seen or optimizer
            if key not in self._round:
                self._round.append(key)
                self.steps = 1
                if not self._cuda and any(one.is_cuda for group in optimizer.param_groups for one in group["params"][:1]):
                    self._base(optimizer)  # it was moved there after its optimizer was made
                self._ends = array("d", [now])  # a second optimizer ends the same step later
                self._marks = []
                self._mark("start")
                return
            self._last = self._round[-1]
        if id(optimizer) != self._last:
            return
        self.steps += 1
        self._ends.append(now)
        if self._marks is not None:
            self._mark("update")
            self._looked.append((self.steps, self._micros(), self._marks))
            self._marks = None
        if self._cuda and now >= self._next_event:
            self._record(now)
        if now >= self._next_sample or self.steps <= 4:
            self._after(now)

    def pause(self) -> None:
        """Something else came between two steps: no time is counted across it."""
        self._events.clear()
        self._before = None

    def _micros(self) -> int:
        return sum(name == "backward" for name, _, _ in self._marks or ())

    def _record(self, now: float) -> None:
        if len(self._events) < WAITING and not torch.cuda.is_current_stream_capturing():
            self._events.append((self.steps, _event()))
            self._next_event = now + EVENT_SECONDS

    def _mark(self, name: str) -> None:
        try:
            event = _event() if self._cuda and not torch.cuda.is_current_stream_capturing() else None
            if self._marks is not None:
                self._marks.append((name, time.perf_counter(), event))
        except Exception as error:
            self._give_up(error)

    def _after(self, now: float) -> None:
        """Now and then after a step: tell, and decide whether the next one is looked at."""
        self._tell()
        self._next_sample = now + SAMPLE_SECONDS
        look = self.steps + 1 in LOOKED_AT or (self.steps > LOOKED_AT[-1] and now >= self._next_look)
        if look:
            self._next_look = now + LOOK_SECONDS
            self._marks = []
            self._mark("start")

    # ------------------------------------------------------------------ telling

    def _tell(self) -> None:
        message: dict[str, Any] = {"kind": "steps", "step": self.steps, "ends": list(self._ends), "data": self._data}
        self._ends, self._data = array("d"), 0.0
        message["device"] = self._read_events()
        message["memory"] = memory(self._cuda)
        message["rest"] = self._rest
        message |= who()
        before, self._delayed = self._delayed, delayed()
        message["delay"] = self._delayed - before
        parts = [found for found in iter(self._parts, None) if found]
        self.send({**message, "parts": parts} if parts else message)

    def _read_events(self) -> list[tuple[int, int, float]]:
        """Steps from and to, and the device's seconds for them, of events that have passed."""
        found = []
        while self._events and self._events[0][1].query():
            step, event = self._events.popleft()
            if self._before is not None:
                found.append((self._before[0], step, self._before[1].elapsed_time(event) / 1000))
            self._before = (step, event)
        return found

    def _parts(self) -> dict[str, Any] | None:
        """Seconds of the parts of a step that was looked at, if the device is through with it; an empty one for none."""
        if not self._looked:
            return None
        step, micros, marks = self._looked[0]
        last = marks[-1][2]
        if last is not None and not last.query():
            return None
        self._looked.popleft()
        found: dict[str, Any] = {"step": step, "micro_batches": micros}
        for (_, before, first), (name, after, event) in pairwise(marks):
            seconds = first.elapsed_time(event) / 1000 if first is not None and event is not None else after - before
            found[name] = found.get(name, 0.0) + seconds
        return found

    def end(self) -> None:
        if self._cuda and self.error is None and torch.cuda.is_initialized():
            with contextlib.suppress(Exception):
                torch.cuda.synchronize()  # the script is over: nothing is held up
        with contextlib.suppress(Exception):
            self._tell()
        self.send({"kind": "end", "steps": self.steps, "error": type(self.error).__name__ if self.error is not None else ""})

    # ------------------------------------------------------------------ a limit, and errors

    def _limited(self) -> None:
        """Hold the script to so many bytes: of the device's allocator, or of this process's own memory."""
        if self.limit is None:
            return
        if self.device == "cuda":
            limit = self.limit

            def held() -> None:
                total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
                torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))

            torch.cuda._lazy_call(held)
            return
        import resource

        resident, own = status("VmRSS"), status("RssAnon")
        untouched = max(0, status("VmData") - own)  # counted by the limit, and nowhere in memory; libraries the other way round
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (max(1 << 20, self.limit + untouched - (resident - own)), hard))

    def failed(self, error: BaseException, trace: Any, pipe: Any) -> None:
        """The script ends by an error: say what was held where it is one of memory, and wait until that was explained."""
        if self.error is not None:
            return
        self.error = error
        if not is_out_of_memory(error):
            return
        held = memory(self._cuda or torch.cuda.is_initialized())
        if self.limit is not None and self.device != "cuda":
            import resource

            hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))  # to be able to tell
        with contextlib.suppress(Exception):
            self._tell()
        pipe.ask({
            "kind": "oom", "message": " ".join(str(error).split())[:400], "tried": tried_bytes(str(error)), "where": where(trace),
            "steps": self.steps, "memory": held, "rest": self._rest, "allowed": allowed(self._cuda or torch.cuda.is_initialized(), str(error)),
            **who(),
        })  # fmt: skip


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def without_hooks(trace: Any) -> Any:
    """The traceback as it would be without this file: a script's own errors are its own."""
    if trace is None:
        return None
    rest = without_hooks(trace.tb_next)
    if trace.tb_frame.f_code.co_filename == __file__:
        return rest
    return trace if rest is trace.tb_next else TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
