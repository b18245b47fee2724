"""Who asks for the updates of units, and in what order: those that are needed soonest first.

Backward leaves the last blocks first and the next forward needs the first blocks first. So units are not put into the
streams as they come: a thread asks for one at a time, never further ahead than the ring of buffers, and takes of those
whose gradients the device has computed the one that the model needs first. The model's own thread is left to launch
kernels, and is far ahead of the device: that it asked for a gradient does not mean that the gradient is there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch

from foretell.errors import ForetellError
from foretell.runtime.offload.lanes import Mark, passed
from foretell.runtime.offload.layout import OffloadUnit


class Pump:
    """Starts units; without a thread of its own when they are waited for, and no sooner."""

    def __init__(self, start: Callable[[OffloadUnit], None], order: Mapping[str, int], *, threaded: bool) -> None:
        self._start, self._order = start, order
        self._ready: dict[str, tuple[OffloadUnit, Mark]] = {}
        self._under_way: str | None = None
        self._changed = threading.Condition()
        self._failed: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="foretell-pump", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    def offer(self, unit: OffloadUnit, ready: Mark = None) -> None:
        """A unit whose gradients are there, or will be at that mark."""
        with self._changed:
            self._ready[unit.path] = (unit, ready)
            self._changed.notify_all()

    def wait(self, path: str) -> None:
        """Until a unit that was offered has been started."""
        if self._thread is None:
            if path in self._ready:
                self._start(self._ready.pop(path)[0])
            return
        with self._changed:
            self._changed.wait_for(lambda: self._failed or (path not in self._ready and self._under_way != path))
        if isinstance(self._failed, ForetellError | torch.OutOfMemoryError):
            raise self._failed  # such as of a full disk, in words that say what to do
        if self._failed is not None:
            raise RuntimeError("updating weights failed") from self._failed

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._closed)
                if not self._ready:
                    return
                there = [path for path, (_, mark) in self._ready.items() if passed(mark)]
                first = next(iter(self._ready.values()))[1]
                path = min(there, key=self._order.__getitem__, default="")
                unit, _ = self._ready.pop(path) if there else (None, None)
                self._under_way = path if there else None
            try:
                if unit is None:
                    assert first is not None
                    first.synchronize()
                    continue
                self._start(unit)
            except BaseException as error:  # raised again where the unit is waited for
                with self._changed:
                    self._failed = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._under_way = None
                self._changed.notify_all()

    def close(self) -> None:
        """What was offered and not begun stays undone."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
