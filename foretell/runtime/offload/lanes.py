"""Streams that work beside the compute stream, and marks to wait for; on a CPU everything happens where it is asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TypeAlias

import torch

Mark: TypeAlias = torch.cuda.Event | None
"""A point in a stream; None: long past."""


_INSIDE = threading.local()
"""Whether this thread is in a lane's `here`, where the current stream is not the model's own."""


class Lane:
    """One stream, in which things happen in the order they were put in. The model's own is whichever is current, and so may only
    be asked for outside every other's `here`."""

    def __init__(self, device: torch.device, *, compute: bool = False, urgent: bool = False) -> None:
        self._cuda = device.type == "cuda"
        self._compute = compute
        self._stream = torch.cuda.Stream(device, priority=-1 if urgent else 0) if self._cuda and not compute else None

    @property
    def stream(self) -> torch.cuda.Stream | None:
        assert not (self._compute and getattr(_INSIDE, "lane", None)), "the compute stream was asked for inside another's"
        return torch.cuda.current_stream() if self._cuda and self._compute else self._stream

    @contextmanager
    def here(self) -> Iterator[None]:
        """What is asked for inside goes into this lane."""
        before, _INSIDE.lane = getattr(_INSIDE, "lane", None), self
        try:
            with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
                yield
        finally:
            _INSIDE.lane = before

    def mark(self) -> Mark:
        stream = self.stream
        return stream.record_event() if stream is not None else None

    def wait(self, mark: Mark) -> None:
        stream = self.stream
        if stream is not None and mark is not None:
            stream.wait_event(mark)


def passed(mark: Mark) -> bool:
    return mark is None or mark.query()


class Lanes:
    """compute: the model's own; up and down: copies to and from the device; work: updates of states that come and go, which wait
    for these; home: updates of states that stay, which wait for nothing; fresh: weights the CPU updated."""

    def __init__(self, device: torch.device) -> None:
        self.compute = Lane(device, compute=True)
        self.up, self.down, self.fresh = Lane(device), Lane(device), Lane(device)
        self.work, self.home = Lane(device, urgent=True), Lane(device, urgent=True)
