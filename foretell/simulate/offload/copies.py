"""Activations that leave a device and come back, as copies on the timeline of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from foretell.lower.offload.activations import COPIES, DOWN, LAND, UP, WAIT
from foretell.price.offload import CopyRates
from foretell.quantities import D2H, H2D, Task, Time
from foretell.trace.types import Trace


def with_copies(tasks: Sequence[Task], trace: Trace, how: CopyRates | None) -> list[Task]:
    """The tasks of a step with the copies that its marks stand for."""
    if COPIES not in trace.meta or how is None:
        return list(tasks)
    found: list[Task] = []
    place: list[int] = []
    down: dict[str, int] = {}
    up: dict[str, int] = {}
    for task in tasks:
        name, _, number = task.name.partition(":")
        waits = {LAND: down, WAIT: up}.get(name, {})
        after = (*(place[before] for before in task.after), *([waits[number]] if number in waits else []))
        place.append(len(found))
        found.append(task._replace(after=after))
        if name in (DOWN, UP):
            seconds = trace.storages[int(number)].nbytes / (how.down if name == DOWN else how.up)
            known = (down if name == DOWN else up)
            before = (place[-1], *([down[number]] if name == UP and number in down else []))
            known[number] = len(found)
            found.append(Task(name, D2H if name == DOWN else H2D, seconds, before, 0.0, "copy", task.module, task.phase))
    return found


def told(time: Time, without: Time) -> Time:
    """The time of a step with copies, beside that of the same step if they took no time."""
    late = max(0.0, time.step_seconds - without.step_seconds)
    breakdown = {**time.breakdown, "waiting_for_copies": late}
    breakdown["waiting_for_host"] = max(0.0, time.breakdown.get("waiting_for_host", 0.0) - late)
    return replace(time, breakdown=breakdown, binds="link" if late > 0.25 * time.step_seconds else time.binds)
