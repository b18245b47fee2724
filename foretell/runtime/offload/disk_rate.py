"""How fast a disk is, for planning: a short transfer of the very kind that training would ask of it."""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor

from foretell.runtime.offload.disk import PIECE, Shelf
from foretell.units import MIB


def rate(folder: str | Path, nbytes: int = 256 * MIB, seconds: float = 2.0, *, threads: int = 4) -> tuple[float, float]:
    """Bytes per second that are read and that are written over old ones. A burst: over minutes a disk may do less."""
    pages = mmap.mmap(-1, PIECE)
    pages.write(os.urandom(PIECE))  # nothing that a file system could make smaller
    block = torch.frombuffer(pages, dtype=torch.uint8)
    with Shelf(max(nbytes, PIECE), folder, threads=threads) as shelf:

        def lap(move: Callable[[int, Tensor], Future[None]], step: int, most: int) -> tuple[int, float]:
            began, at, under_way = time.perf_counter(), 0, deque[Future[None]]()
            while at + step <= most and time.perf_counter() - began < seconds / 3:
                if len(under_way) == 2 * threads:
                    under_way.popleft().result()
                under_way.append(move(at, block[:step]))
                at += step
            for one in under_way:
                one.result()
            return at, time.perf_counter() - began

        _, first = lap(shelf.write, MIB, MIB)
        step = PIECE if first * (PIECE // MIB) * 2 * threads < seconds / 3 else MIB
        there, _ = lap(shelf.write, step, shelf.nbytes)  # the first time a file system also makes notes
        written, wrote = lap(shelf.write, step, there)
        read, took = lap(shelf.read, step, there)
    return read / took, written / wrote
