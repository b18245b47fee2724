"""Ctrl-C and SIGTERM, answered between two steps. No torch."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

SECOND_AFTER_SECONDS = 0.5
"""A launcher may pass on the same signal that the terminal sent; only a later one is a second one."""


class Signals:
    """Ctrl-C and SIGTERM are remembered and answered between two steps; a second one ends the process at once."""

    def __init__(self, tell: Callable[[str], None] = lambda _: None) -> None:
        self.asked, self.tell, self._since = "", tell, 0.0

    def __enter__(self) -> Signals:
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _note(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self.asked and now - self._since > SECOND_AFTER_SECONDS:
            os._exit(128 + number)
        if not self.asked:
            self.asked, self._since = signal.Signals(number).name, now
            with contextlib.suppress(RuntimeError):  # the signal may have come in the middle of a line
                self.tell(f"{self.asked}: stopping after this step, then saving; once more ends at once")
