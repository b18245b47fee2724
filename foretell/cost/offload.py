"""A step whose optimizer states are elsewhere: what the device holds then, and how long states take to come and go.

The update leaves the step's own stream. A unit (a block, or what is in none) keeps its gradients until its update, just
before its next forward; states that stay on the device, and the ring of buffers through which the others pass, are there
from the start. With clipping, states move between the norm of all gradients and the next forward of their unit; without,
during the whole step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from foretell.cost.memory import MOVED
from foretell.cost.plan_blocks import blocks_of
from foretell.cost.shapes import short
from foretell.cost.streams import D2H, H2D, Task
from foretell.hardware.profile import Profile
from foretell.hardware.types import Device
from foretell.plan.states import ALIGN, CHUNK, HOST, SLOTS, bytes_of, form_of, tiers, width_of_weights
from foretell.plan.types import MASTER, Plan
from foretell.trace import types
from foretell.trace.types import Op, Program, Storage, Trace

NEED = "foretell.need"
"""Where a unit waits for its update; gradients of the update before die there."""
WORK = "update"
"""The stream of updates."""
TOUCHED = 34
"""Bytes of device memory that an update moves for each element: states there and back, the gradient, and fp32 copies."""
REACHED = 0.8
"""Of a device's memory bandwidth by an update."""
ENDS_NORM = ("_foreach_mul_", "_record_function_enter_new", "zeros", "_foreach_add_", "_fused_adamw_", "_fused_adam_")


@dataclass(frozen=True)
class Unit:
    """What is updated together."""

    path: str
    elements: int
    on_host: bool
    gradients: tuple[int, ...]


def units_of(trace: Trace, plan: Plan) -> tuple[Unit, ...]:
    """In the order that forward needs them."""
    blocks = blocks_of(trace)
    where, width = tiers(plan, blocks), width_of_weights(plan)
    held: dict[str, list[int]] = {"": [], **{block: [] for block in blocks}}
    for number, storage in trace.storages.items():
        if storage.role == types.GRADIENT:
            held[_owner(storage.module, blocks)].append(number)
    return tuple(
        Unit(path, sum(-(-trace.storages[n].nbytes // width // ALIGN) * ALIGN for n in numbers), where[path] == HOST, tuple(numbers))
        for path, numbers in held.items()
        if numbers
    )


def _owner(module: str, blocks: Sequence[str]) -> str:
    return next((block for block in blocks if module == block or module.startswith(f"{block}.")), "")


def host_bytes(trace: Trace, plan: Plan) -> int:
    """Of states in host memory, and of gradients on their way to the CPU."""
    moved = sum(unit.elements for unit in units_of(trace, plan) if unit.on_host)
    each = bytes_of(form_of(plan), width_of_weights(plan)) + plan.cpu_share * width_of_weights(plan)
    return int(moved * each)


def moved(trace: Trace, plan: Plan) -> Trace:
    """The trace of the same step with its states where the plan has them."""
    units = units_of(trace, plan)
    storages = dict(trace.storages)
    resident = [*trace.resident, *_kept(units, plan, storages)]
    programs = dict(trace.programs)
    for name, program in trace.programs.items():
        if name.startswith("update"):
            programs[name] = Program(name, _until_norm(program.ops))
        elif name == "micro_first":
            programs[name] = Program(name, tuple(_waiting(program.ops, units, blocks_of(trace))))
    schedule = {name: tuple(one for one in run if one[0] != "zero_grad") for name, run in trace.schedule.items()}
    return replace(trace, programs=programs, schedule=schedule, storages=storages, resident=tuple(resident),
                   meta={**trace.meta, MOVED: True})  # fmt: skip


def _kept(units: Iterable[Unit], plan: Plan, storages: dict[int, Storage]) -> list[int]:
    """States that stay, the ring, and what an update needs for itself."""
    form, weight = form_of(plan), width_of_weights(plan)
    each, units = bytes_of(form, weight), tuple(units)
    longest = max((min(CHUNK, unit.elements) for unit in units), default=0)
    sizes = [unit.elements * each for unit in units if not unit.on_host]
    if any(unit.on_host for unit in units) and plan.cpu_share < 1:
        sizes += [longest * each] * SLOTS
    if plan.precision == MASTER:
        sizes.append(longest * 4)
    sizes += {"split": [longest * 4] * 4, "half": [longest * 4] * 2}.get(form, [])
    number = max(storages, default=0)
    found = []
    for size in sizes:
        number += 1
        storages[number] = Storage(nbytes=size, role=types.OPTIMIZER, module="")
        found.append(number)
    return found


def _until_norm(ops: Sequence[Op]) -> tuple[Op, ...]:
    """The norm of the gradients; what it made dies with it."""
    end = next((at for at, op in enumerate(ops) if short(op.name) in ENDS_NORM), len(ops))
    kept = list(ops[:end])
    made = {number for op in kept for number in op.allocates} - {number for op in kept for number in op.frees}
    if kept and made:
        kept[-1] = replace(kept[-1], frees=(*kept[-1].frees, *sorted(made)))
    return tuple(kept)


def _waiting(ops: Sequence[Op], units: Sequence[Unit], blocks: Sequence[str]) -> Iterable[Op]:
    left = {unit.path: unit for unit in units}
    for op in ops:
        if op.phase == "forward":
            for path in ("", _owner(op.module, blocks)):
                unit = left.pop(path, None)
                if unit is not None:
                    yield Op(name=NEED, inputs=(), outputs=(), module=path, phase="forward", flops=0, frees=unit.gradients)
        yield op


# ---------------------------------------------------------------------- seconds


@dataclass(frozen=True)
class Rates:
    """Of moving and updating states."""

    up: float
    down: float
    """Bytes a second each way while both are busy."""
    device: float
    """Bytes of device memory a second."""


def rates(profile: Profile, device: Device) -> Rates | None:
    """From what the probe measured; None where it did not."""
    both = max((copy for copy in profile.copies if copy["name"] == "duplex"), key=lambda copy: copy["bytes"], default=None)
    if both is None:
        return None
    each = both["bytes"] / 2 / both["seconds"]
    return Rates(up=each, down=each, device=REACHED * device.memory_bandwidth_bytes_per_second)


def with_states(tasks: Sequence[Task], units: Sequence[Unit], plan: Plan, how: Rates) -> list[Task]:
    """The tasks of a step with those of its states: they come first, since the norm that they wait for ends the step before."""
    form, weight = form_of(plan), width_of_weights(plan)
    each = bytes_of(form, weight)
    found: list[Task] = []
    done: dict[str, int] = {}
    for unit in units:
        share = 1 - plan.cpu_share if unit.on_host else 1.0
        left = int(unit.elements * share)
        while left > 0:
            elements = min(CHUNK, left)
            left -= elements
            after: tuple[int, ...] = ()
            if unit.on_host:
                ring = SLOTS * 3
                before = (len(found) - ring + 2,) if len(found) >= ring and found[len(found) - ring + 2].resource == D2H else ()
                found.append(Task("up", H2D, elements * each / how.up, before, 0.0, "copy", unit.path, "update"))
                after = (len(found) - 1,)
            found.append(Task("update", WORK, elements * TOUCHED / how.device, after, 0.0, "memory", unit.path, "update"))
            done[unit.path] = len(found) - 1
            if unit.on_host:
                found.append(Task("down", D2H, elements * each / how.down, (len(found) - 1,), 0.0, "copy", unit.path, "update"))
    shift = len(found)
    for task in tasks:
        after = tuple(number + shift for number in task.after)
        if task.name == NEED and task.module in done:
            after = (*after, done[task.module])
        found.append(task._replace(after=after))
    return found


def beside(units: Sequence[Unit], plan: Plan, how: Rates) -> float:
    """Seconds that the link is busy in a step."""
    each = bytes_of(form_of(plan), width_of_weights(plan))
    return sum(unit.elements for unit in units if unit.on_host) * (1 - plan.cpu_share) * each / min(how.up, how.down)
