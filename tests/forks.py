"""Tracing processes forked from one that has imported torch and the tracer: the import is paid once, not each time.

    test ── a socket: module, environment, folder, three pipes ──►  server ── fork ──►  `python -m MODULE`, as if just started

Everything else is as it is for a user: sessions, supervision, time limits, signals, the folder and the environment. Where
how such a process itself starts or ends is what a test is about, `real` starts Python.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foretell.trace import process

ROOT = Path(__file__).resolve().parents[1]
NAME = "FORETELL_TEST_FORKS"
real = process._started


def serve_forks() -> None:
    """Start the server, once for all workers of a test session; its socket's name is in the environment."""
    folder = tempfile.mkdtemp(prefix="forks-")
    os.environ[NAME] = str(Path(folder, "socket"))
    server = subprocess.Popen(
        [sys.executable, "-P", __file__, os.environ[NAME]], stdin=subprocess.PIPE, cwd="/",
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"},
    )  # fmt: skip
    atexit.register(server.kill)


def install() -> None:
    """Let foretell's tracing processes be forked, where there is a server."""
    if path := os.environ.get(NAME):
        process._started = lambda module, replies, more: _Forked(path, module, replies, more)  # type: ignore[return-value]


class _Forked:
    """What `process` uses of a Popen."""

    def __init__(self, path: str, module: str, replies: int, more: Sequence[str]) -> None:
        taken, given = os.pipe()
        heard, said = os.pipe()
        paths = [process.package_parent(), os.environ.get("PYTHONPATH")]
        call = {
            "module": module, "words": list(more), "cwd": os.getcwd(), "paths": list(filter(None, paths)),
            "env": {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"},
        }  # fmt: skip
        with _connected(path) as server:
            text = json.dumps(call).encode()
            socket.send_fds(server, [len(text).to_bytes(4, "big")], [taken, said, replies])
            server.sendall(text)
            self.pid = int.from_bytes(_exactly(server, 4), "big")
        for handle in (taken, said):
            os.close(handle)
        self.stdin, self.stdout = io.FileIO(given, "wb"), io.FileIO(heard, "rb")

    def wait(self) -> int:
        """Until it is gone; how it ended is not known here."""
        while True:
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return -signal.SIGKILL
            time.sleep(0.002)


def _connected(path: str) -> socket.socket:
    """The server may still be importing torch."""
    for _ in range(3000):
        found = socket.socket(socket.AF_UNIX)
        try:
            found.connect(path)
        except OSError:
            found.close()
            time.sleep(0.02)
        else:
            return found
    raise RuntimeError("the process that forks tracing processes did not start")


def _exactly(connection: socket.socket, count: int) -> bytes:
    content = b""
    while len(content) < count:
        more = connection.recv(count - len(content))
        if not more:
            raise RuntimeError("the process that forks tracing processes is gone")
        content += more
    return content


# --- the server ------------------------------------------------------------------------------------------------------


def _import_what_tracing_imports() -> None:
    """Names come from a process that traced something; only modules are shared, nothing that tracing leaves behind."""
    import importlib

    here, there = os.pipe()
    if os.fork() == 0:
        with contextlib.suppress(BaseException):
            _trace_something()
        with open(there, "w") as out:
            json.dump(sorted(sys.modules), out)
        os._exit(0)
    os.close(there)
    with open(here) as names:
        for name in json.load(names):
            if name.split(".")[0] in ("torch", "foretell", "numpy", "sympy", "networkx") and name not in sys.modules:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
    os.wait()


def _trace_something() -> None:
    from foretell.search.child import answer
    from foretell.trace.child import request
    from foretell.trace.load import Source
    from foretell.trace.recipe import Recipe

    asked = request(Source(model="gpt2", overrides={"layers": 2}, seq=64), Recipe(), (9, 0), {})
    answer(asked)
    answer({**asked, "tp": {"ranks": 2}})


def _become(call: dict[str, Any], taken: int, said: int, replies: int, base: list[str]) -> None:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update({**call["env"], "PYTHONPATH": os.pathsep.join(call["paths"])})
    os.chdir(call["cwd"])
    for handle, number in ((taken, 0), (said, 1), (said, 2)):
        os.dup2(handle, number)
    os.close(taken)
    os.close(said)
    sys.path[:] = [*call["paths"], *base]
    sys.argv = [call["module"], str(replies), *call["words"]]


def main() -> None:
    process._end_with(os.getppid())
    base = [path for path in sys.path if path != str(ROOT)]
    _import_what_tracing_imports()
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(sys.argv[1] + ".new")
        door.listen(64)
        os.rename(sys.argv[1] + ".new", sys.argv[1])
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who ends is gone at once
        while True:
            connection, _ = door.accept()
            with connection:
                length, handles, _, _ = socket.recv_fds(connection, 4, 3)
                call = json.loads(_exactly(connection, int.from_bytes(length, "big")))
                child = os.fork()
                if child == 0:
                    door.close()
                    connection.close()
                    _become(call, *handles, base)
                    import importlib

                    importlib.import_module(call["module"]).main()
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(0)
                connection.sendall(child.to_bytes(4, "big"))
                for handle in handles:
                    os.close(handle)


if __name__ == "__main__":
    main()
