"""Something done in a process of its own, so that what it imports takes no memory here: this one may live for weeks."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Callable


def apart(work: Callable[[], None]) -> None:
    """Do it in a fork of this process, and raise here what it raises; where there is no fork, or another thread that it would cut
    off, here."""
    if not hasattr(os, "fork") or threading.active_count() > 1:
        work()
        return
    here, there = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(here)
        _tell(work, there)
    os.close(there)
    with open(here, "rb") as stream:
        said = stream.read()
    os.waitpid(child, 0)
    if not said:  # it was ended
        work()
        return
    error = pickle.loads(said)  # by this program, a moment ago
    if error is not None:
        raise error


def _tell(work: Callable[[], None], there: int) -> None:
    try:
        error = None
        try:
            work()
        except Exception as failed:
            error = failed
        with open(there, "wb") as stream:
            stream.write(pickle.dumps(error))
    finally:
        os._exit(0)
