"""Live bytes of a trace, without an allocator. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Iterable

from foretell.trace.types import Trace


def peak_live(trace: Trace, schedules: Iterable[str]) -> int:
    """Highest sum of live storages, without an allocator: what a CPU run holds in tensors."""
    live = sum(trace.storages[number].nbytes for number in trace.resident)
    alive = set(trace.resident)
    peak = live
    for name in schedules:
        for program, times in trace.schedule[name]:
            for _ in range(times):
                for op in trace.programs[program].ops:
                    for number in op.allocates:
                        if number not in alive:
                            alive.add(number)
                            live += trace.storages[number].nbytes
                    peak = max(peak, live)
                    for number in op.frees:
                        if number in alive:
                            alive.discard(number)
                            live -= trace.storages[number].nbytes
    return peak
