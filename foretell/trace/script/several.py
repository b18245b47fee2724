"""A script's first and last rank, each followed in a process of its own: what they do must be one step. No torch.

    rank 0      model, forward, backward, step     the answer, unless
    rank 7      model, forward, backward, step     this one needs more: then it is this one's, and that is said
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from foretell.errors import ModelError, UserError
from foretell.trace.sandbox.process import TIME_LIMIT, Progress
from foretell.trace.script.child import request
from foretell.trace.script.kept import Kept, followed
from foretell.trace.script.words import AFTER, ScriptCommand


def follow_ranks(
    script: ScriptCommand, capability: tuple[int, int] | None, hints: Mapping[str, float], keep_writes: bool, *, devices: int | None, name: str,
    cache: bool = True, time_limit: float = TIME_LIMIT, progress: Progress = lambda _: None, change: Mapping[str, Any] | None = None,
) -> list[Kept]:  # fmt: skip
    """The trace and the rest of the reply, of rank 0 and of the last one where there are several.

    `devices` of this `name` are there: more ranks than that are refused, and several devices for one rank. None: whoever asks looks at that.
    """

    def follow(rank: int, seconds: float) -> Kept:
        return followed(request(script, capability, hints, keep_writes, rank, change), cache=cache, time_limit=seconds, progress=progress)

    began = time.monotonic()
    found = [follow(0, time_limit)]
    world = int(found[0][1]["world"])
    if devices is not None:
        _refuse(script, world, devices, name)
    if world == 1:
        return found
    progress(f"following rank {world - 1}")
    last = _other(script, found[0][1], world - 1, lambda: follow(world - 1, max(1.0, time_limit - (time.monotonic() - began))))
    return found if last is None else [*found, last]


def _refuse(script: ScriptCommand, world: int, devices: int, name: str) -> None:
    if world > devices:
        found = f"{script.name} forms a group of {world} processes, and {name} is there {devices} times"
        raise UserError(found, f"--on {name}:{world}, or fewer processes")
    if world == 1 and devices > 1:
        many = f"-- torchrun --nproc-per-node {devices} {script.name}"
        found = f"{script.name} runs as one process, and {name} is there {devices} times"
        raise UserError(found, f"--on {name}; or, if it is meant for several, {many}")


def _other(script: ScriptCommand, first: dict[str, Any], rank: int, follow: Callable[[], Kept]) -> Kept | None:
    """The other rank, told of with its number where it fails; None where it needs what rank 0 would have sent it."""
    try:
        found = follow()
    except ModelError as error:
        if AFTER in error.problem:
            first["notes"].append(f"rank {rank} is not followed: it needs what another rank sends at {error.problem.rpartition(AFTER)[2].strip()}")
            return None
        raise ModelError(f"rank {rank}: {error.problem}, while rank 0 steps at {first['stepped']}", error.remedy, error.detail) from error
    if found[1]["world"] != first["world"]:
        raise ModelError(f"rank 0 is in a group of {first['world']}, rank {rank} in one of {found[1]['world']}", "one group for all ranks")
    return found
