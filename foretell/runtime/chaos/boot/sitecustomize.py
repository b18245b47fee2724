"""Found by Python before anything runs: the wall clock of one rank jumps once a file is there. Another sitecustomize still comes."""

import contextlib
import importlib.machinery
import importlib.util
import os
import sys
import time

_HERE = os.path.dirname(os.path.abspath(__file__))


def _jump(rank: str, seconds: float, mark: str) -> None:
    """Which rank this is, is asked anew each time: ranks are forked from a process that is none."""
    real, before = time.time, [False]

    def shifted() -> float:
        before[0] = before[0] or (os.environ.get("RANK") == rank and os.path.exists(mark))
        return real() + (seconds if before[0] else 0.0)

    time.time = shifted


def _next() -> None:
    found = importlib.machinery.PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path) != _HERE])
    if found is not None and found.loader is not None:
        found.loader.exec_module(importlib.util.module_from_spec(found))


with contextlib.suppress(KeyError, ValueError):
    _rank, _seconds, _mark = os.environ["FORETELL_CHAOS_CLOCK"].split(" ", 2)
    _jump(_rank, float(_seconds), _mark)
_next()
