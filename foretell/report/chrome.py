"""A predicted timeline in the Chrome trace format, for chrome://tracing, Perfetto and the tools that read it.

One process, one thread a resource, complete events ("ph": "X") with microseconds since the start of the step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foretell.errors import UserError
from foretell.quantities import COLLECTIVES, COMPUTE, D2H, H2D, HOST
from foretell.simulate.time.streams import Timeline

_ORDER = (HOST, COMPUTE, COLLECTIVES, H2D, D2H)


def events(timeline: Timeline, *, process: str = "predicted step") -> list[dict[str, Any]]:
    """Names of the process and its threads, then one event a task, in the order of issue."""
    used = {task.resource for task in timeline.tasks}
    lanes = [name for name in _ORDER if name in used] + sorted(used.difference(_ORDER))
    thread = {name: number for number, name in enumerate(lanes, 1)}
    found = [_named("process_name", process, 0)]
    for name, number in thread.items():
        found.append(_named("thread_name", name, number))
        found.append({"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": number, "args": {"sort_index": number}})
    for task, start, finish in zip(timeline.tasks, timeline.start, timeline.finish, strict=True):
        more = {"module": task.module, "phase": task.phase}
        found.append(
            {
                "name": task.name, "cat": task.kind or task.resource, "ph": "X",
                "ts": round(start * 1e6, 3), "dur": round((finish - start) * 1e6, 3),
                "pid": 1, "tid": thread[task.resource], "args": {key: value for key, value in more.items() if value},
            }
        )  # fmt: skip
    return found


def document(timeline: Timeline, *, process: str = "predicted step") -> dict[str, Any]:
    """What a trace file holds."""
    return {"traceEvents": events(timeline, process=process), "displayTimeUnit": "ms"}


def write(timeline: Timeline, path: str | Path, *, process: str = "predicted step") -> None:
    """Write a trace file; an unwritable path is the user's to mend."""
    try:
        Path(path).write_text(json.dumps(document(timeline, process=process)) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write the trace to {path}: {error.strerror}", "give another file") from None


def _named(what: str, name: str, thread: int) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 1, "tid": thread, "args": {"name": name}}
