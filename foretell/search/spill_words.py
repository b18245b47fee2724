"""What left the device and why, in sentences: for a plan's notes, for people, and where nothing fits, what would help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from foretell.plan.states import DISK, HOST, bytes_of, form_of
from foretell.plan.types import FORMATS, MASTER, Plan
from foretell.search.spill_found import Spilled, Tried
from foretell.units import gib

_SMALLER = (
    ("split", "split", "ties of rounding go away from zero"), ("bf16", "half", "moments have 8 bits of precision"),
    ("int8", "int8", "moments are rounded to 8 bits"), ("split-int8", "split-int8", "both of split and int8"),
)  # fmt: skip
"""State format, its form, and what it changes."""


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


def helps(found: Spilled, parameters: float, *, bf16: bool = True) -> tuple[str, ...]:
    """Where nothing fits: which changes would take less, and how much. `bf16`: whether the devices compute in it."""
    near = found.nearest
    if near is None:
        return ()
    return tuple(_helps(found, near.plan, near, parameters, bf16))


def _helps(found: Spilled, plan: Plan, near: Tried, parameters: float, bf16: bool) -> Iterator[str]:
    if near.over and near.cost.fits:
        yield f"--host {-(-near.host_bytes // 2**30)}GiB: the plan needs {near.over}"
    if plan.precision != MASTER and bf16:
        less = parameters * 2 * 2
        yield f"--precision {MASTER}: weights and gradients in bf16, {gib(less)} less on the device, 4 bytes a parameter more of states"
    elif plan.precision == MASTER and plan.state_format == "fp32":
        now = bytes_of(form_of(plan), 2)
        for name, form, changed in (one for one in _SMALLER if one[0] in FORMATS):
            less = (now - bytes_of(form, 2)) * parameters
            yield f"--state-format {name}: {gib(less)} less of states; {changed}"
    if plan.micro_batch > 1 or plan.accumulate > 1:
        yield "a smaller --micro-batch or --global-batch, or a shorter --seq"
