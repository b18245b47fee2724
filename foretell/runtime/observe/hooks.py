"""Where the steps of a script end, what they wait for and what they hold; told to whoever started it, a JSON line at a time.

    optimizer.step ends    one reading of the clock; now and then an event on the stream, never a wait for the device
    DataLoader's next      two readings: what the host waits for data
    backward               read in a few steps only, to see where the time goes
    an error at the end    out of memory: what was held; told before the script's own traceback

Loaded by its path into the script's Python: the standard library and torch, nothing of foretell.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any

import torch
import torch.multiprocessing
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.data import dataloader

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
ANSWER_SECONDS = 300.0
"""That the explanation of an error may take."""
LAST_SECONDS = 20.0
"""That a script waits at its end for what it tells to be read."""
_BOOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "boot")
_NO_MEMORY = ("out of memory", "alloc_failed", "can't allocate memory", "cannot allocate memory", "not enough memory", "std::bad_alloc")
_SIZE = re.compile(r"tried to allocate ([0-9.]+) ?(bytes|[KMGT]iB)?", re.IGNORECASE)
_ALLOWED = re.compile(r"([0-9.]+) ?([KMGT]iB) allowed", re.IGNORECASE)
_AMOUNTS = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)
_UNITS = {"bytes": 0, "kib": 10, "mib": 20, "gib": 30, "tib": 40}

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


class Channel:
    """To the process that started the script. It never makes the script wait. A process that was forked has one of its own,
    once it has an optimizer: workers that load data have none."""

    def __init__(self, at: str) -> None:
        self.at = at
        self._left = bytearray()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._ended: Callable[[], None] | None = None
        self._connect()

    def _connect(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(self.at)
        self._socket.setblocking(False)

    def leave(self, ended: Callable[[], None]) -> None:
        """In a process that was forked: its parent's connection is none of its own. `ended` is for when it ends."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self._ended = None, ended
        self._left, self._lock = bytearray(), threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        with self._lock:
            if self._ended is not None and (message["kind"] == "model" or message.get("step")):
                ended, self._ended = self._ended, None
                with contextlib.suppress(OSError):
                    self._connect()
                    self._left += json.dumps(about_this()).encode() + b"\n"
                    Finalize(None, ended, exitpriority=100)  # such a process ends without `atexit`
            if self._socket is None:
                return
            if len(self._left) < 1 << 20:
                self._left += json.dumps(message).encode() + b"\n"
            self._push()

    def _push(self) -> None:
        try:
            while self._left and self._socket is not None:
                del self._left[: self._socket.send(self._left)]
        except BlockingIOError:
            pass
        except OSError:
            self._socket = None

    def ask(self, message: dict[str, Any]) -> None:
        """Send, and wait until it was answered: the other side prints first."""
        self.send(message)
        self._whole(ANSWER_SECONDS)
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.recv(4096)

    def close(self) -> None:
        self._whole(LAST_SECONDS)
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _whole(self, seconds: float) -> None:
        """What is left goes out; whoever does not read for so long gets nothing more."""
        with self._lock:
            if self._socket is not None:
                self._socket.settimeout(seconds)
                self._push()


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
            self._rest = max(0, _status("VmRSS") - self._weights)
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

        resident, own = _status("VmRSS"), _status("RssAnon")
        untouched = max(0, _status("VmData") - own)  # counted by the limit, and nowhere in memory; libraries the other way round
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


def who() -> dict[str, int]:
    """Which of how many processes this is, and how many of them run here: as its group says, or its launcher."""
    told = {name: int(os.environ.get(key) or 0) for name, key in (("rank", "RANK"), ("world", "WORLD_SIZE"), ("local", "LOCAL_WORLD_SIZE"))}
    group = torch.distributed
    if group.is_available() and group.is_initialized():
        told |= {"rank": group.get_rank(), "world": group.get_world_size()}
    return told


def about_this() -> dict[str, Any]:
    return {"kind": "begin", "pid": os.getpid(), "torch": torch.__version__, "python": sys.version.split()[0],
            "threads": torch.get_num_threads(), **who()}  # fmt: skip


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _NO_MEMORY)


def tried_bytes(text: str) -> int | None:
    """What the allocation that failed was for."""
    found = _SIZE.search(text)
    return int(float(found[1].rstrip(".")) * 2 ** _UNITS[(found[2] or "bytes").lower()]) if found else None


def without_hooks(trace: Any) -> Any:
    """The traceback as it would be without this file: a script's own errors are its own."""
    if trace is None:
        return None
    rest = without_hooks(trace.tb_next)
    if trace.tb_frame.f_code.co_filename == __file__:
        return rest
    return trace if rest is trace.tb_next else TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def where(trace: Any) -> dict[str, str]:
    """The innermost module that ran, and the innermost line that no installed package holds."""
    found = {"module": "", "line": ""}
    for frame, number in traceback.walk_tb(trace):
        file, owner = frame.f_code.co_filename, frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            found["module"] = type(owner).__name__
        if "site-packages" not in file and not file.startswith("<") and "/lib/python" not in file:
            found["line"] = f"{os.path.basename(file)}:{number}"
    return found


def memory(cuda: bool) -> dict[str, int]:
    """Bytes now and at the peak: of CUDA's allocator, and of this process."""
    process = _statuses()
    found = {"rss": process.get("VmRSS", 0), "rss_peak": process.get("VmHWM", 0)}
    if cuda and torch.cuda.is_initialized():
        stats = torch.cuda.memory_stats()
        for name, key in (("allocated", "allocated_bytes"), ("reserved", "reserved_bytes")):
            found[name] = int(stats.get(f"{key}.all.current", 0))
            found[f"{name}_peak"] = int(stats.get(f"{key}.all.peak", 0))
        found["retries"] = int(stats.get("num_alloc_retries", 0))
    return found


def allowed(cuda: bool, text: str = "") -> dict[str, int]:
    """What the device has, is free of it, and what this process may take: as its error says, or the allocator."""
    if not cuda or not torch.cuda.is_initialized():
        return {}
    free, total = torch.cuda.mem_get_info()
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda: 1.0)()
    said = _ALLOWED.search(text)
    most = int(float(said[1]) * 2 ** _UNITS[said[2].lower()]) if said else int(share * total)
    return {"free": int(free), "total": int(total), "allowed": min(most, int(total))}


def _statuses() -> dict[str, int]:
    """What /proc/self/status says of memory, in bytes; nothing where there is no such file."""
    try:
        with open("/proc/self/status") as file:
            return {name: int(amount) * 1024 for name, amount in _AMOUNTS.findall(file.read())}
    except OSError:
        return {}


def delayed() -> float:
    """Seconds that this thread was ready to run and others had the cores; 0 where nobody counts them."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _status(name: str) -> int:
    return _statuses().get(name, 0)
