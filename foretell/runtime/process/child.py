"""Another `foretell` command in a process of its own, ended in order with this one. No torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from foretell.runtime.process.launch import SignalForwarder, end_with_parent
from foretell.trace.sandbox.process import package_parent


def command(words: Sequence[str]) -> int:
    """Run `foretell WORDS` and wait for it; its exit status. What it says on stderr is seen, its stdout is not.

    Ctrl-C and SIGTERM are passed on once, so that it can save; a second one ends it.
    """
    children: list[subprocess.Popen[bytes]] = []
    forward = SignalForwarder(children)
    listens = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)} if listens else {}
    paths = [package_parent(), os.environ.get("PYTHONPATH")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    try:
        children.append(
            subprocess.Popen(
                [sys.executable, "-m", "foretell", *words], env=environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, start_new_session=True, preexec_fn=end_with_parent(os.getpid()),
            )
        )  # fmt: skip
        return children[0].wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()
