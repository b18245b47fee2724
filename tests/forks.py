"""Processes that have imported torch, for all workers of a test session: each is imported once, and forks for who asks.

    torch and the tracer ── fork ──►  what traces a step, as foretell/trace/sandbox/server.py has it
      └─ fork, and then the command line, what ranks use, transformers
           ├─ fork ──►  `Command`: `python -m foretell ...` with an environment, a folder, streams and an exit status of its own
           └─ fork, and then multiprocessing's server ── fork ──►  ranks of a `Pool`

Importing all that takes ten seconds, forking milliseconds. Everything else is as it is for a user: sessions, supervision, time
limits, signals, the folder and the environment; what traces has imported what it has imported there too. Where how such a
process itself starts or ends is what a test is about, it starts Python, or asks for a tracing server of its own: `own_server`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from foretell.runtime.process import child, launch
from foretell.runtime.process.supervise import keep, standby
from foretell.trace.sandbox import process, server

ROOT = Path(__file__).resolve().parents[1]
NAME = "FORETELL_TEST_FORKS"
"""The folder of its sockets, in the environment."""
OWN_STANDBY = "FORETELL_TEST_OWN_STANDBY"
"""In the environment of a command whose standby imports torch itself, as for a user."""
TRACES, COMMANDS, RANKS = "traces", "commands", "ranks"
MODULES = ("foretell.search.traces.child", "foretell.trace.script.child")
MORE = (
    *(f"foretell.runtime.{name}" for name in ("check.verify", "check.dry_run", "train.run")),
    *(f"foretell.runtime.parallel.{name}" for name in ("tensor.split", "tensor.special", "tensor.compile", "pipeline.stages", "pipeline.part")),
    "foretell.runtime.process.pool", "foretell.runtime.offload.attach", "foretell.runtime.box", "foretell.runtime.process.launch",
    "foretell.zoo.language.gpt", "foretell.zoo.language.llama", "pytest", "transformers.models.qwen2.modeling_qwen2",
    "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.tensor.experimental", "torch.distributed.pipelining",
    "torch._dynamo.backends.debugging", "torch._functorch.partitioners", "torch._inductor.lowering", "networkx", "pydantic", "typer._adapters",
)  # fmt: skip
"""What commands, ranks and their first compilation import; a name that is not there is left out."""
ROOMS = tuple(
    f"foretell.{name}" for name in
    ("cli", "report", "search", "price", "simulate", "lower", "plan", "api", "checkpoint", "runtime", "serve")
)  # fmt: skip
"""With all their modules: commands import them late."""
_real, _ready = process._started, server.ready
_base: list[str] = []
"""Import paths without those of requests."""


def collect_seldom(objects: int = 50_000) -> None:
    """In this process and those that are forked from it, when there are so many more objects. Nothing here lives long enough to fill
    the memory with garbage."""
    gc.set_threshold(objects, 20, 50)


def serve_forks() -> None:
    """Start it; the folder of its sockets is in the environment."""
    os.environ[NAME] = tempfile.mkdtemp(prefix="forks-")
    started = subprocess.Popen(
        [sys.executable, "-P", __file__, os.environ[NAME]], stdin=subprocess.DEVNULL, cwd="/",
        env={**server.environment(), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    atexit.register(started.kill)


def install() -> None:
    """Let foretell's tracing processes be forked by it, where there is one."""
    if NAME in os.environ:

        def forked(module: str, replies: int, more: Sequence[str]) -> server.Forked:
            with _connected(TRACES) as connection:
                return server.Forked(connection, module, replies, more)

        process._started = forked
        server.ready = lambda _: server._stopped.clear()  # one of this process' own would import torch, and nobody would ask it


@contextlib.contextmanager
def own_server() -> Iterator[None]:
    """As for a user: the server is started by this process, and ends with the block."""
    with mock.patch.object(process, "_started", _real), mock.patch.object(server, "ready", _ready), mock.patch.object(server, "_known", []):
        try:
            yield
        finally:
            for one in server._known:
                one.close()


def _opened(door: str) -> str:
    """Where one can knock; it may still be importing torch."""
    if NAME not in os.environ:
        serve_forks()
    path = Path(os.environ[NAME], door)
    for _ in range(6000):
        if path.exists():
            return str(path)
        time.sleep(0.02)
    raise RuntimeError("the process that others are forked from did not start")


def _connected(door: str) -> socket.socket:
    found = socket.socket(socket.AF_UNIX)
    found.connect(_opened(door))
    return found


def run(
    *words: str, env: Mapping[str, str], code: str = "", cwd: Path = ROOT, timeout: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """What such a command did: it is waited for."""
    command = Command(*words, env=env, code=code, cwd=cwd)
    out, err = command.communicate(timeout)
    assert command.returncode is not None
    return subprocess.CompletedProcess(list(words), command.returncode, out, err)


class Command:
    """`python -m foretell WORDS`, or the program `code` with these words, as a process that has torch: what is used of a Popen."""

    def __init__(self, *words: str, env: Mapping[str, str], code: str = "", cwd: Path = ROOT) -> None:
        self.args = [sys.executable, "-m", "foretell", *words]
        self.returncode: int | None = None
        self._door = _connected(COMMANDS)
        text = json.dumps({"words": words, "code": code, "env": dict(env), "cwd": str(cwd)}).encode()
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull, "rb") as nothing:
            socket.send_fds(self._door, [len(text).to_bytes(8, "big")], [nothing.fileno(), out.fileno(), err.fileno()])
            self._streams = [os.dup(out.fileno()), os.dup(err.fileno())]
        self._door.sendall(text)
        self.pid = int.from_bytes(server._exactly(self._door, 8), "big")

    def poll(self) -> int | None:
        with contextlib.suppress(TimeoutError):
            self._wait(0.0)
        return self.returncode

    def said(self) -> str:
        """What it has written to stdout so far."""
        return os.pread(self._streams[0], 1 << 20, 0).decode()

    def communicate(self, timeout: float = 120.0) -> tuple[str, str]:
        """Wait for it, and give what it wrote to its streams."""
        try:
            self._wait(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired(self.args, timeout) from None
        out, err = map(_content, self._streams)
        self._streams.clear()
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait(self, seconds: float) -> None:
        if self.returncode is None:
            with selectors.DefaultSelector() as ready:
                ready.register(self._door, selectors.EVENT_READ)
                if not ready.select(seconds):
                    raise TimeoutError
            self.returncode = os.waitstatus_to_exitcode(int.from_bytes(server._exactly(self._door, 8), "big"))
            self._door.close()


def _content(handle: int) -> str:
    os.lseek(handle, 0, os.SEEK_SET)
    with open(handle, encoding="utf-8") as stream:
        return stream.read()


def share_ranks() -> None:
    """Let multiprocessing fork from it, where there is one: it knows how to ask a server that another process has started."""
    from multiprocessing import forkserver

    if NAME in os.environ and sys.version_info < (3, 14):
        _opened(RANKS)
        there = forkserver._forkserver
        there._forkserver_address = str(Path(os.environ[NAME], RANKS))
        there._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # handed to who is forked, which has no use for it
        there.ensure_running = lambda: None


# --- the process ------------------------------------------------------------------------------------------------------


def main() -> None:
    process.end_with(os.getppid())
    doors = {name: Path(sys.argv[1], name) for name in (TRACES, COMMANDS, RANKS)}
    for module in MODULES:
        _base[:] = server.prepare(module)
    _trace_once()
    collect_seldom()
    gc.freeze()
    parent = os.getpid()
    if os.fork() == 0:
        process.end_with(parent)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _import_more()
        gc.freeze()
        _fork_server_of_ranks(doors[RANKS])
        install()
        from foretell.runtime.infer import pipeline as infer

        launch.subprocess = child.subprocess = standby.subprocess = infer.subprocess = SimpleNamespace(  # type: ignore[assignment]
            **{**vars(subprocess), "Popen": _Forking}
        )
        _serve_commands(_door(doors[COMMANDS]))
    with _door(doors[TRACES]) as door:
        while True:
            connection, _ = door.accept()
            with connection:
                server.answer(connection, _base, [door])


def _import_more() -> None:
    from foretell import cli
    from foretell.cli.app import COMMANDS

    below = (found.name for room in ROOMS for found in pkgutil.walk_packages(importlib.import_module(room).__path__, f"{room}."))
    for name in (*MORE, *below):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        for name in COMMANDS:
            cli.main([name, "--help"])  # its options are made
        cli.main(["fit", "nope", "--on", "H100"])


def _trace_once() -> None:
    """The first trace of a process takes twice as long as the next, and so does the first with convolutions, or of another kind of
    attention: torch reads its rules when they are asked for, and fake tensors remember what ops give."""
    from foretell.trace.load.model import Source, load
    from foretell.trace.recipe import Recipe
    from foretell.trace.record.capture import capture

    for model in ("llama-tiny", "gpt-tiny", "bert-tiny", "resnet-tiny"):
        capture(partial(load, Source(model=model, micro_batch=2)), Recipe())


def _door(path: Path) -> socket.socket:
    door, opening = socket.socket(socket.AF_UNIX), path.with_name(f"{path.name}~")
    door.bind(str(opening))
    door.listen(64)
    opening.rename(path)  # whoever sees it is heard
    return door


def _fork_server_of_ranks(path: Path) -> None:
    """Multiprocessing's own, in a process that has imported all this already. It ends when this process does."""
    from multiprocessing import forkserver

    alive, held = os.pipe()
    door = _door(path)
    if os.fork() == 0:
        os.close(held)
        forkserver.main(door.detach(), alive, [])
        os._exit(0)
    os.close(alive)
    door.close()


def _serve_commands(door: socket.socket) -> None:
    """Fork for each who asks, and tell it how that ended."""
    asked: dict[int, socket.socket] = {}
    woken, wakes = socket.socketpair()
    woken.setblocking(False)
    wakes.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno())
    with selectors.DefaultSelector() as ready:
        ready.register(door, selectors.EVENT_READ)
        ready.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fileobj is door:
                    connection, _ = door.accept()
                    asked[_forked(connection)] = connection
            with contextlib.suppress(BlockingIOError):
                woken.recv(4096)
            with contextlib.suppress(ChildProcessError):
                while (found := os.waitpid(-1, os.WNOHANG))[0]:
                    if who := asked.pop(found[0], None):
                        with who, contextlib.suppress(OSError):
                            who.sendall(found[1].to_bytes(8, "big"))


def _forked(connection: socket.socket) -> int:
    length, handles, _, _ = socket.recv_fds(connection, 8, 3)
    call = json.loads(server._exactly(connection, int.from_bytes(length, "big")))
    child = os.fork()
    if child == 0:
        become(call["words"], call["env"], handles, cwd=call["cwd"], code=call["code"])
    for handle in handles:
        os.close(handle)
    connection.sendall(child.to_bytes(8, "big"))
    return child


# --- who is forked ----------------------------------------------------------------------------------------------------


_PROGRAMS = {
    "foretell": "",
    "foretell.runtime.infer.worker": "from foretell.runtime.infer.worker import main\nmain()",
    standby.__name__: f"import runpy\nfrom {standby.__name__} import main\nmain()\nrunpy.run_module('foretell', run_name='__main__', alter_sys=True)",
}
"""What may be forked: modules that foretell starts, and what they do where they are not foretell itself."""


class _Forking(subprocess.Popen):  # type: ignore[type-arg]
    """What `foretell` starts as another `python -m foretell` or as a standby is forked, as a child of its own; anything else is started."""

    def _execute_child(self, *given: Any) -> None:
        args, _, preexec, _, kept, cwd, env, _, _, _, stdin, _, stdout, _, stderr, _, *_, session, _ = given
        code = _PROGRAMS.get(args[2]) if args[1] == "-m" else None
        if code is None or (code and OWN_STANDBY in os.environ):
            super()._execute_child(*given)  # type: ignore[misc]
            return
        self.pid = os.fork()
        if self.pid == 0:
            if session:
                os.setsid()
            if preexec is not None:
                preexec()
            streams = [mine if mine >= 0 else number for number, mine in enumerate((stdin, stdout, stderr))]
            become(args[3:], env or os.environ, streams, kept=kept, cwd=cwd or os.getcwd(), code=code)
        self._child_created = True
        for handle in {stdin, stdout, stderr} - {-1}:
            os.close(handle)


def become(
    words: Sequence[str], env: Mapping[str, str], streams: Sequence[int], *, cwd: str, kept: Sequence[int] = (), code: str = ""
) -> None:
    """What `python -m foretell WORDS` would be, and never return. Of open files it has the streams and those that are kept."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    env = dict(env)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for number, handle in enumerate([os.dup(handle) for handle in streams]):
        os.dup2(handle, number)
    for handle in map(int, os.listdir("/dev/fd")):
        if handle > 2 and handle not in kept:
            with contextlib.suppress(OSError):
                os.close(handle)
    sys.path[:] = [cwd, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *_base]
    sys.argv = ["foretell", *words]
    keep.IMPORT_ONCE = False  # ranks are forked from here, where torch is imported
    _play(code)


def _play(code: str) -> None:
    """Streams, threads and the end as Python itself has them."""
    import torch

    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    status = 0
    try:
        if code:
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__", "sys": sys})
        else:
            runpy.run_module("foretell", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
