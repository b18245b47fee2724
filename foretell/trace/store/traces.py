"""Traces kept on disk: read whole and checked, else made in a child process and kept. No torch here."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretell.decode import value_of
from foretell.errors import ForetellError
from foretell.trace.sandbox.child import TIME_LIMIT, WORKERS, trace_in_child, trace_in_children
from foretell.trace.store import cache as store
from foretell.trace.store.check import whole
from foretell.trace.store.file import loads
from foretell.trace.types import Trace

KIND = "traces"


@dataclass(frozen=True, kw_only=True)
class TraceEntry:
    """What is kept of one traced step besides the trace itself."""

    trace: str
    """The text of a trace file."""
    files: Mapping[str, str] = field(default_factory=dict)
    """User file → its hash."""
    notes: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[tuple[int, ...], str]] | None = None
    """Parameter → shape and dtype, where it was asked for."""
    tied: tuple[tuple[str, ...], ...] = ()


Stored = tuple[Trace, TraceEntry]


def parsed(content: Mapping[str, Any]) -> Stored:
    """The trace of an entry and what stands beside it; anything wrong raises what `cache.read` drops an entry for."""
    entry: TraceEntry = value_of(TraceEntry, content)
    return whole(loads(entry.trace)), entry


def known(asked: Mapping[str, Any]) -> Stored | None:
    """The stored answer to a request."""
    return store.read(KIND, store.key_of({"trace": asked}), parsed)


def keep(asked: Mapping[str, Any], text: str, reply: Mapping[str, Any]) -> None:
    """Store a new trace with the child's reply."""
    entry = {name: reply[name] for name in ("notes", "shapes", "tied") if name in reply}
    store.write(KIND, store.key_of({"trace": asked}), {"trace": text, **entry}, reply["files"])


def traced(asked: Mapping[str, Any], *, cache: bool = True, time_limit: float = TIME_LIMIT) -> Stored:
    """The answer to a request, stored or made now."""
    found = known(asked) if cache else None
    if found is not None:
        return found
    text, reply = trace_in_child(asked, time_limit=time_limit)
    if cache:
        keep(asked, text, reply)
    return parsed({"trace": text, **{name: reply[name] for name in ("files", "notes")}})


def keep_all(requests: Sequence[Mapping[str, Any]], *, seconds: float, time_limit: float = TIME_LIMIT) -> None:
    """Make and store what is not there yet, side by side as far as there are cores, none begun after so many seconds; what fails is left
    to `traced`, which says why."""
    until = time.monotonic() + seconds
    missing = [asked for place, asked in enumerate(requests) if asked not in requests[:place] and known(asked) is None]
    together = min(WORKERS, os.cpu_count() or 1)
    if together < 2 or len(missing) < 2:
        return
    for first in range(0, len(missing), together):
        if time.monotonic() > until:
            return
        pair = missing[first : first + together]
        with contextlib.suppress(ForetellError):
            for asked, (text, reply) in zip(pair, trace_in_children(pair, time_limit=time_limit), strict=True):
                keep(asked, text, reply)
