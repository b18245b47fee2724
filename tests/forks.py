"""One process that has imported torch and the tracer, for all workers of a test session: see foretell/trace/server.py.

Everything else is as it is for a user: sessions, supervision, time limits, signals, the folder and the environment. Where
how such a process itself starts or ends is what a test is about, `real` has a server of its own.
"""

from __future__ import annotations

import atexit
import gc
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from foretell.trace import process, server

ROOT = Path(__file__).resolve().parents[1]
NAME = "FORETELL_TEST_FORKS"
MODULE = "foretell.search.child"
real = process._started


def collect_seldom() -> None:
    """In this process and those that are forked from it. Nothing here lives long enough to fill the memory with garbage."""
    gc.set_threshold(50_000, 20, 50)


def serve_forks() -> None:
    """Start it; the name of its socket is in the environment."""
    folder = tempfile.mkdtemp(prefix="forks-")
    os.environ[NAME] = str(Path(folder, "socket"))
    started = subprocess.Popen(
        [sys.executable, "-P", __file__, os.environ[NAME]], stdin=subprocess.DEVNULL, cwd="/",
        env={**server.environment(), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    atexit.register(started.kill)


def install() -> None:
    """Let foretell's tracing processes be forked by it, where there is one."""
    if path := os.environ.get(NAME):

        def forked(module: str, replies: int, more: Sequence[str]) -> server.Forked:
            with _connected(path) as connection:
                return server.Forked(connection, module, replies, more)

        process._started = forked


def _connected(path: str) -> socket.socket:
    """It may still be importing torch."""
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


def main() -> None:
    process.end_with(os.getppid())
    base = server.prepare(MODULE)
    collect_seldom()
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(sys.argv[1])
        door.listen(64)
        while True:
            connection, _ = door.accept()
            with connection:
                server.answer(connection, base, [door])


if __name__ == "__main__":
    main()
