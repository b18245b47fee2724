"""A process that has imported torch and the tracer, and forks for each request: torch is imported once for all of them.

    foretell ── a socket: module, environment, folder; three pipes ──►  server ── fork ──►  what `python -m MODULE` would be
             ◄── its pid ──────────────────────────────────────────────┘

The server runs no code of the user's; whom it forks do, each in a session of its own (see `trace.sandbox.process`). It ends with
foretell, however that ended, and when nothing was asked for a while.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

IDLE_SECONDS = 120.0
"""After which a server that nobody asks ends."""
_COUNT = 8
"""Bytes of a number on the socket."""


def environment() -> dict[str, str]:
    """Of processes that trace: they see no GPU."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}


def import_paths() -> list[str]:
    return [str(Path(__file__).resolve().parents[3]), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]


class Forked:
    """What `trace.sandbox.process` uses of a Popen."""

    def __init__(
        self, server: socket.socket, module: str, replies: int, more: Sequence[str], env: Mapping[str, str] | None = None
    ) -> None:
        env = environment() if env is None else env
        call = {"module": module, "words": list(more), "cwd": os.getcwd(), "env": dict(env), "paths": import_paths()}
        text = json.dumps(call).encode()
        taken, given = os.pipe()
        heard, said = os.pipe()
        self.stdin, self.stdout = io.FileIO(given, "wb"), io.FileIO(heard, "rb")
        try:
            socket.send_fds(server, [len(text).to_bytes(_COUNT, "big")], [taken, said, replies])
            server.sendall(text)
            self.pid = int.from_bytes(_exactly(server, _COUNT), "big")
        except BaseException:
            self.stdin.close()
            self.stdout.close()
            raise
        finally:
            os.close(taken)
            os.close(said)

    def wait(self) -> int:
        """Until it is gone; how it ended only the server knew."""
        while True:
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return -signal.SIGKILL
            time.sleep(0.002)


class Server:
    """A server of this process."""

    def __init__(self, module: str, more: Mapping[str, str] | None = None) -> None:
        self.socket, there = socket.socketpair()
        with there:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "foretell.trace.sandbox.server", module, str(there.fileno())], pass_fds=(there.fileno(),),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
                env={**environment(), **(more or {}), "PYTHONPATH": os.pathsep.join(import_paths())},
            )  # fmt: skip
        self.owner = os.getpid()

    def close(self) -> None:
        self.socket.close()
        if self.owner == os.getpid():
            self.process.wait()


_known: list[Server] = []
_turns = threading.Lock()
_stopped = threading.Event()


def ready(module: str) -> None:
    """Start this process' server from the thread that asks: it ends with that thread at the latest."""
    _stopped.clear()
    with contextlib.suppress(OSError), _turns:
        _own(module)


def stop() -> None:
    """Whoever waits for the server need not wait any longer, and gets none until `ready`."""
    _stopped.set()
    for server in _known:
        server.process.kill()


def forked(module: str, replies: int, more: Sequence[str]) -> Forked:
    """A process for a request, from this process' server; raises OSError where there is none to be had."""
    with _turns:
        return _forked(module, replies, more)


def _forked(module: str, replies: int, more: Sequence[str]) -> Forked:
    for _ in range(2):
        if _stopped.is_set():
            break
        server = _own(module)
        try:
            return Forked(server.socket, module, replies, more)
        except OSError:  # it ended: nobody asked for long, or somebody killed it
            _known.clear()
            server.close()
    raise ConnectionError("the process that forks tracing processes was ended, or ends at once")


def _own(module: str) -> Server:
    if _known and _known[0].owner != os.getpid():  # the server of whom this process was forked from
        _known.pop().socket.close()
    if not _known:
        _known.append(Server(module))
    return _known[0]


def _exactly(connection: socket.socket, count: int) -> bytes:
    content = b""
    while len(content) < count:
        more = connection.recv(count - len(content))
        if not more:
            raise ConnectionError("the other side is gone")
        content += more
    return content


# --- the server ------------------------------------------------------------------------------------------------------


def answer(connection: socket.socket, base: Sequence[str], close: Sequence[socket.socket] = ()) -> bool:
    """Fork for one request; whether there was one. `base` are the import paths without those of requests; what is to be
    `close`d in who is forked besides."""
    length, handles, _, _ = socket.recv_fds(connection, _COUNT, 3)
    if not length:
        return False
    if len(length) < _COUNT:
        length += _exactly(connection, _COUNT - len(length))
    call = json.loads(_exactly(connection, int.from_bytes(length, "big")))
    child = os.fork()
    if child == 0:
        for one in (connection, *close):
            one.close()
        _become(call, handles, base)
    for handle in handles:
        os.close(handle)
    connection.sendall(child.to_bytes(_COUNT, "big"))
    return True


def _become(call: dict[str, Any], handles: Sequence[int], base: Sequence[str]) -> None:
    """What `python -P -m MODULE` would be, and never return."""
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update({**call["env"], "PYTHONPATH": os.pathsep.join(call["paths"])})
        os.chdir(call["cwd"])
        taken, said, replies = handles
        for handle, number in ((taken, 0), (said, 1), (said, 2)):
            os.dup2(handle, number)
        os.close(taken)
        os.close(said)
        sys.path[:] = [*call["paths"], *base]
        sys.argv = [call["module"], str(replies), *call["words"]]
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
        importlib.import_module(call["module"]).main()
        status = 0
    except BaseException:
        import traceback

        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def prepare(module: str) -> list[str]:
    """Import a module and what it says it will need (`PRELOAD`); the paths that are Python's own."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who ends is gone at once
    given = set(import_paths())
    base = [path for path in sys.path if path not in given]
    for name in getattr(importlib.import_module(module), "PRELOAD", ()):
        importlib.import_module(name)
    return base


def main() -> None:
    from foretell.trace.sandbox.parent import end_with

    end_with(os.getppid())
    with socket.socket(fileno=int(sys.argv[2])) as connection:
        base = prepare(sys.argv[1])
        connection.settimeout(IDLE_SECONDS)
        with contextlib.suppress(OSError):
            while answer(connection, base):
                pass


if __name__ == "__main__":
    main()
