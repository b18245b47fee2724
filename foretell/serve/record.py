"""What a server did, step by step and request by request, in a folder that stays small.

    serve.json        what was served and how; at the end, predicted beside measured
    steps.jsonl       of each step: when, seconds, its shape, pages, who runs and waits
    requests.jsonl    of each request: when it came, tokens, its first and its last

Of long runs fewer and fewer rows are kept: all of the first `MOST_ROWS`, every second of as many again, every fourth, ...
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from foretell.errors import UserError
from foretell.files import write_atomically
from foretell.lower.serving import StepShape
from foretell.serve.engine import Completion, ServingEngine, TokenEvent
from foretell.simulate.serving.run import shape_of
from foretell.simulate.serving.scheduler import Step

ABOUT, STEPS, REQUESTS = "serve.json", "steps.jsonl", "requests.jsonl"
MOST_ROWS = 20_000
MOST_REMEMBERED = 5_000
"""Requests that are held for the comparison at the end: the first ones."""
FLUSH_SECONDS = 1.0


class ThinnedRows:
    """A file of rows; the longer it gets, the fewer of them."""

    def __init__(self, path: Path | None) -> None:
        self._file: TextIO | None = None if path is None else path.open("w", encoding="utf-8")
        self._count = self._written = 0
        self._every = 1
        self._flushed = time.monotonic()

    def add(self, row: Mapping[str, Any]) -> None:
        self._count += 1
        if self._file is None or self._count % self._every:
            return
        try:
            self._file.write(json.dumps({**row, "every": self._every} if self._every > 1 else row) + "\n")
            self._written += 1
            if self._written % MOST_ROWS == 0:
                self._every *= 2
            if time.monotonic() - self._flushed > FLUSH_SECONDS:
                self.flush()
        except OSError:  # a full disk ends the record, not the server
            self.close()

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


@dataclass
class RequestRow:
    """One request; times in seconds since the server began."""

    came: float
    prompt: int
    wanted: int
    output: int = 0
    first: float = 0.0
    last: float = 0.0
    ended: str = ""


class ServeRecord:
    """Of one server. All calls but the first and the last are of the engine's thread."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        if folder is not None:
            if (folder / ABOUT).exists():
                raise UserError(f"{folder} has the record of another server", "another --out")
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"--out {folder}: {error.strerror or error}", "a folder that can be made") from error
        self._steps, self._requests = (ThinnedRows(None if folder is None else folder / name) for name in (STEPS, REQUESTS))
        self._began = time.perf_counter()
        self._pending: deque[StepShape] = deque()
        self._launched = False
        self._open: dict[Completion, RequestRow] = {}
        self.requests: list[RequestRow] = []
        """The first ones, ended ones and others."""
        self.steps = 0

    def about(self, content: Mapping[str, Any]) -> None:
        """Written when the server is ready, and anew at its end."""
        if self.folder is not None:
            write_atomically(self.folder / ABOUT, json.dumps(content, indent=1) + "\n")

    # ------------------------------------------------------------------ steps

    def watch(self, step: Step) -> None:
        """A step was decided."""
        self._pending.append(shape_of(step))
        self._launched = True

    def stepped(self, began: float, ended: float, engine: ServingEngine) -> None:
        """A call of the engine is over, which began then: the oldest step under way is done, unless it was only just launched."""
        launched, self._launched = self._launched, False
        if not self._pending or (engine.runner.ahead and launched and len(self._pending) == 1):
            return
        shape, scheduler = self._pending.popleft(), engine.scheduler
        self.steps += 1
        self._steps.add({
            "at": round(began - self._began, 6), "seconds": round(ended - began, 7), "generating": shape.generating,
            "attended": shape.attended, "chunks": shape.chunks, "samples": shape.samples, "pages": scheduler.pages.held,
            "running": len(scheduler.running), "waiting": len(scheduler.waiting),
        })  # fmt: skip

    def gave_up(self) -> None:
        """A step failed."""
        self._pending.clear()

    # ------------------------------------------------------------------ requests

    def came(self, one: Completion) -> None:
        row = RequestRow(time.perf_counter() - self._began, len(one.prompt), one.how.most)
        self._open[one] = row
        if len(self.requests) < MOST_REMEMBERED:
            self.requests.append(row)

    def told(self, event: TokenEvent) -> None:
        """A token came, or the end."""
        row = self._open.get(event.generation)
        if row is None:
            return
        if event.token is not None:
            row.last = time.perf_counter() - self._began
            row.first = row.first or row.last
            row.output += 1
        if event.ended:
            self.left(event.generation, event.ended)

    def left(self, one: Completion, why: str) -> None:
        row = self._open.pop(one, None)
        if row is not None:
            row.ended = why
            self._requests.add({
                "at": round(row.came, 6), "in": row.prompt, "out": row.output, "first": round(row.first, 6), "last": round(row.last, 6),
                "ended": why[:200],
            })  # fmt: skip

    def close(self) -> None:
        self._steps.close()
        self._requests.close()
