"""What left the device and why, in sentences: for a plan's notes, for people, and where nothing fits, what would help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from foretell.plan.states import DISK, HOST
from foretell.plan.types import MASTER
from foretell.search.offload.found import Spilled, Tried
from foretell.search.space.constraints import SearchConstraints
from foretell.units import GIB, gib

_SMALLER = (
    ("split", "ties of rounding go away from zero"), ("bf16", "moments have 8 bits of precision"),
    ("int8", "moments are rounded to 8 bits"), ("split-int8", "both of split and int8"),
)
"""State format, and what it changes."""


def lines(found: Spilled) -> tuple[str, ...]:
    """Of the best plan: what is where, what that costs, and what becomes of activations."""
    best = found.best
    if best is None:
        return ()
    return (*_where(found, best), *_activations(found, best))


def _where(found: Spilled, best: Tried) -> Iterator[str]:
    plan, memory = best.plan, best.cost.worst.memory
    if not best.moved_bytes:
        yield f"everything is on the device: {gib(memory.device_bytes)} of {gib(memory.capacity_bytes)}"
        return
    places = [f"optimizer states of {_named(plan.states, HOST)} are in host memory"] if HOST in plan.states.values() else []
    places += [f"those of {_named(plan.states, DISK)} on the disk"] if DISK in plan.states.values() else []
    places += [f"weights of {_named(plan.weights, HOST)} come up when they are used"] if plan.weights else []
    link = f"; the link is busy {_seconds(found.link_seconds)} a step" if found.link_seconds is not None else ""
    by_cpu = f"; the CPU updates {plan.cpu_share:.0%} of them" if plan.cpu_share else ""
    each = " on each rank" if plan.mesh.world > 1 else ""
    yield f"{', '.join(places)}: {gib(best.moved_bytes)}{each}{link}{by_cpu}"
    bare = found.resident
    if bare is not None:
        short = bare.cost.worst.memory.device_bytes - memory.capacity_bytes
        words = f"with everything on the device {gib(short)} would be missing" if not bare.cost.fits else "everything fits on the device"
        if bare.cost.time is not None and best.cost.time is not None:
            ours, theirs = best.cost.time.step_seconds, bare.cost.time.step_seconds
            words += f"; a step would take {_seconds(theirs)}, this one takes {_seconds(ours)} ({ours / theirs:.2f} times as long)"
        yield words


def _named(patterns: Mapping[str, str], tier: str) -> str:
    return ", ".join(pattern for pattern, where in patterns.items() if where == tier)


def _activations(found: Spilled, best: Tried) -> Iterator[str]:
    """Kept, recomputed or moved, with what each would take."""
    kept, bare, time = found.kept, found.resident, best.cost.time
    modes = {one.mode for one in best.plan.blocks.values()}
    if kept is None or bare is None or time is None or not modes:
        return
    held = (kept.cost.worst.memory.allocated_bytes - bare.cost.worst.memory.allocated_bytes) * best.plan.accumulate
    again = time.phases.get("recompute", 0.0)
    moving = f"moving {gib(held)} of them would keep the link busy {_seconds(held / found.link_rate)} more" if found.link_rate else ""
    if HOST in modes:
        yield f"activations are moved: {moving}" if moving else "activations are moved"
    elif held > 0:
        why = f": {moving}" if moving else ""
        busy = "" if not found.link_seconds else ", and states keep it busy already"
        yield f"activations of {', '.join(best.plan.blocks)} are computed again, {_seconds(again)} a step, and not moved{why}{busy}"


def _seconds(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f} s" if value >= 0.1 else f"{value * 1e3:.0f} ms"


def helps(found: Spilled, wishes: SearchConstraints, *, bf16: bool = True) -> Iterator[tuple[str, SearchConstraints, str]]:
    """Where nothing fits: options that take less, the wishes with them, and what they change; to be tried, not
    promised. `bf16`: whether the devices compute in it."""
    near = found.nearest
    if near is None:
        return
    if near.over and near.cost.fits and near.host_bytes:
        host = -(-near.host_bytes // GIB)
        yield f"--host {host}GiB", replace(wishes, host=host * GIB), f"{host} GiB of host memory"
    if near.plan.precision != MASTER and not bf16:
        return
    if near.plan.precision != MASTER:
        master = replace(wishes, precision=MASTER, deadline_seconds=None, budget=None)
        yield f"--precision {MASTER}", master, "weights and gradients in bf16, with a master copy"
        wishes = master
    start = "" if near.plan.precision == MASTER else f"--precision {MASTER} "
    for name, changed in _SMALLER if near.plan.state_format == "fp32" else ():
        yield f"{start}--state-format {name}", replace(wishes, state_format=name), changed
