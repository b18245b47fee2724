"""Who asks for the updates of units, and in what order: those that are needed soonest first.

Backward leaves the last blocks first and the next forward needs the first blocks first. So units are not put into the
streams as they come: a thread asks for one at a time, never further ahead than the ring of buffers, and takes of those
that are ready the one that the model needs first. The model's own thread is left to launch kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from foretell.runtime.offload.layout import Unit


class Pump:
    """Starts units; without a thread of its own when they are waited for, and no sooner."""

    def __init__(self, start: Callable[[Unit], None], order: Mapping[str, int], *, threaded: bool) -> None:
        self._start, self._order = start, order
        self._ready: dict[str, Unit] = {}
        self._under_way: str | None = None
        self._changed = threading.Condition()
        self._failed: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="foretell-pump", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    def offer(self, unit: Unit) -> None:
        """A unit whose gradients are there."""
        with self._changed:
            self._ready[unit.path] = unit
            self._changed.notify_all()

    def wait(self, path: str) -> None:
        """Until a unit that was offered has been started."""
        if self._thread is None:
            if path in self._ready:
                self._start(self._ready.pop(path))
            return
        with self._changed:
            self._changed.wait_for(lambda: self._failed or (path not in self._ready and self._under_way != path))
        if self._failed is not None:
            raise RuntimeError("updating weights failed") from self._failed

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._closed)
                if not self._ready:
                    return
                path = min(self._ready, key=self._order.__getitem__)
                unit = self._ready.pop(path)
                self._under_way = path
            try:
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
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
