"""Which link is slow: every rank sends to every other between two steps, and what each message took makes a matrix.

A collective over several links cannot tell which of them held it up. So once when the run begins, and again where transfers have become
slow, all ranks stop for some milliseconds after the same step and send in pairs; what each pair takes is held against what it took at
the beginning.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from foretell.runtime.detect.links import MatrixReading, read_matrix
from foretell.runtime.process.control import Control

MESSAGE_BYTES = 2**18
TIMES = 4
"""Messages between each pair; the quickest counts: a busy machine makes them longer, never shorter."""
MOST_RANKS = 32
FIRST_STEPS = 12
"""After so many steps of the processes the first probe is made."""


def probe(control: Control) -> np.ndarray:
    """`seconds[s, r]` from rank s to rank r; every rank calls this, and all get the same."""
    world, rank, group = control.ranks.world, control.ranks.rank, control.group
    mine, theirs = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8), torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
    took = [0.0] * world
    for distance in range(1, world):
        to, source = (rank + distance) % world, (rank - distance) % world
        quickest = np.inf
        for _ in range(TIMES):
            dist.all_reduce(torch.zeros(1), group=group)  # all begin together
            began = time.perf_counter()
            sent = dist.isend(mine, dst=to, group=group)
            dist.recv(theirs, src=source, group=group)
            quickest = min(quickest, time.perf_counter() - began)
            if sent is not None:
                sent.wait()
        took[source] = quickest
    rows = control.gather(took)
    return np.array(rows, dtype=float).T


class LinkProbe:
    """Called after every update, on every rank; probes where all ranks have agreed to."""

    def __init__(self, control: Control, give: Callable[[MatrixReading], None] | None) -> None:
        """`give` takes what a later probe shows, on the rank that tells."""
        self.control, self.give = control, give
        self.before: np.ndarray | None = None
        self._steps = self._done = 0

    @property
    def works(self) -> bool:
        return self.control.group is not None and 2 <= self.control.ranks.world <= MOST_RANKS

    def ask(self) -> None:
        """From any thread of one rank: probe soon."""
        self.control.wish = self._done + 1

    def stepped(self, _: int) -> None:
        self._steps += 1
        if self._steps == FIRST_STEPS:
            self.before = probe(self.control)
        elif self.before is not None and self.control.granted > self._done:
            self._done = self.control.granted
            found = read_matrix(probe(self.control) / np.maximum(self.before, 1e-9), usual=1.0)
            if self.give is not None:
                self.give(found)
