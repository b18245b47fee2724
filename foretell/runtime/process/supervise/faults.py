"""What ended a run, and whether to start it again may mend it."""

from __future__ import annotations

from dataclasses import dataclass

from foretell.runtime.process.launch import CRASHED, HUNG, KILLED, LOST, MEMORY, RunEnded

RESTARTED = (KILLED, HUNG, CRASHED, LOST, MEMORY)
"""Faults of machines, networks and the system. What code or data raises would come again; what asks to stop is no fault. After
MEMORY the plan is another one."""


@dataclass(frozen=True, kw_only=True)
class RunFault:
    """One that ended a run."""

    kind: str
    words: str
    ranks: tuple[int, ...]
    noticed: float
    """By the monotonic clock."""
    step: int
    """Updates done by then, as far as ranks had said."""


def fault_of(ended: RunEnded, *, out_of_memory: bool = False) -> RunFault | None:
    """The fault that a run ended of, where it is worth another start; None where it is not. Every verdict comes in here."""
    if ended.fault not in RESTARTED:
        return None
    words = ended.cause or ended.problem.removesuffix("; all ranks stopped") or "the ranks lost each other in a collective"
    if ended.fault == KILLED and out_of_memory:
        words += ", by the kernel since the memory of its control group was used up"
    return RunFault(kind=ended.fault, words=words, ranks=ended.ranks, noticed=ended.noticed, step=ended.step)


def kills_for_memory() -> int:
    """How often the kernel ended a process of this control group because its memory was used up; 0 where it does not tell."""
    try:
        with open("/sys/fs/cgroup/memory.events") as stream:
            return next((int(line.split()[1]) for line in stream if line.startswith("oom_kill ")), 0)
    except (OSError, ValueError):
        return 0
