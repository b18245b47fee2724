"""A step whose optimizer states are elsewhere, and perhaps weights: what device and host hold then, and for how long.

The update leaves the step's own stream. A unit (a block, or what is in none) keeps its gradients until its update, just
before its next forward; states that stay on the device, and the ring of buffers through which the others pass, are there
from the start. With clipping, states move between the norm of all gradients and the next forward of their unit; without,
from when backward has left it (`timing`). Weights that are elsewhere are on the device while their block computes,
with that before and that after it, and their gradients go down once backward has left them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from foretell.lower.blocks import blocks_of
from foretell.lower.fsdp.units import REDUCE_STREAM
from foretell.plan import states
from foretell.plan.states import ALIGN, CHUNK, DEVICE, HOST, SLOTS, bytes_of, form_of, streamed, tiers, width_of_weights
from foretell.plan.types import MASTER, Plan
from foretell.trace import types
from foretell.trace.types import Op, Program, Storage, Trace

MOVED = "moved"
"""In a trace's meta: part of what it needs is elsewhere."""
NEED = "foretell.need"
"""Where a unit waits for its update; gradients of the update before die there."""
SHARDS = "shards"
"""In what is known of a trace: over how many ranks its parameters are spread."""
FETCH = "foretell.fetch"
"""Where gradients that went down come up again, to be added to."""
SCRATCH = {"split": 1, "half": 2, "int8": 2, "split-int8": 3}
"""Form → arrays of fp32, as long as a chunk, that an update needs besides its gradient."""
AT_HAND = 2
"""Blocks on the device of those whose weights are elsewhere: one computes, another comes where one has gone."""
ENDS_NORM = ("_foreach_mul_", "_record_function_enter_new", "zeros", "_foreach_add_", "_fused_adamw_", "_fused_adam_")


@dataclass(frozen=True)
class StateUnit:
    """What is updated together."""

    path: str
    elements: int
    tier: str = DEVICE
    """Where its states are."""
    gradients: tuple[int, ...] = ()
    weights: str = DEVICE
    """Where its weights are between uses."""

    @property
    def away(self) -> bool:
        return self.tier != DEVICE

    @property
    def on_host(self) -> bool:
        return self.tier == HOST

    @property
    def streamed(self) -> bool:
        return self.weights != DEVICE


def units_of(trace: Trace, plan: Plan) -> tuple[StateUnit, ...]:
    """In the order that forward needs them."""
    blocks = blocks_of(trace)
    where, gone, width = tiers(plan, blocks), streamed(plan, blocks), width_of_weights(plan)
    gradients = _by_owner(trace, blocks, _gradients(trace))
    sizes = _by_owner(trace, blocks, _shards(trace)) if SHARDS in trace.meta else gradients
    return tuple(
        StateUnit(path, sum(-(-trace.storages[n].nbytes // width // ALIGN) * ALIGN for n in sizes[path]), where[path], tuple(numbers),
             HOST if path in gone else DEVICE)
        for path, numbers in gradients.items()
        if numbers
    )  # fmt: skip


def _by_owner(trace: Trace, blocks: Sequence[str], numbers: Iterable[int]) -> dict[str, list[int]]:
    held: dict[str, list[int]] = {"": [], **{block: [] for block in blocks}}
    for number in numbers:
        held[_owner(trace.storages[number].module, blocks)].append(number)
    return held


def _gradients(trace: Trace) -> Iterable[int]:
    """Those that are kept until the update: of sharded parameters what was scattered, not the whole ones before."""
    kept = [number for number, storage in trace.storages.items() if storage.role == types.GRADIENT]
    return [number for number in kept if trace.storages[number].stream == REDUCE_STREAM] if SHARDS in trace.meta else kept


def _shards(trace: Trace) -> Iterable[int]:
    """This rank's pieces of trained parameters."""
    updated = {ref.storage for name, program in trace.programs.items() if name.startswith("update") for op in program.ops for ref in op.inputs}
    return [number for number in trace.resident if number in updated and trace.storages[number].role == types.PARAMETER]


def _owner(module: str, blocks: Sequence[str]) -> str:
    return next((block for block in blocks if module == block or module.startswith(f"{block}.")), "")


def host_bytes(trace: Trace, plan: Plan) -> int:
    """Of states and weights in host memory, of states on their way from and to the disk, and of gradients on theirs."""
    units, width = units_of(trace, plan), width_of_weights(plan)
    form = form_of(plan)
    each = bytes_of(form, width)
    resting = sum(unit.elements for unit in units if unit.on_host) * each
    beside = 1 if "master" in states.KEPT[form] else 2  # where masters are not whole, the CPU keeps the weights as well
    by_cpu = plan.cpu_share * sum(unit.elements for unit in units if unit.on_host and not unit.streamed) * beside * width
    longest = max((min(CHUNK, unit.elements) for unit in units if unit.away and not unit.on_host), default=0)
    gone = sum(unit.elements for unit in units if unit.streamed) * 2 * width
    return int(resting + by_cpu + longest * states.BUFFERS * each + gone)


def disk_bytes(trace: Trace, plan: Plan) -> int:
    """Of states on the disk."""
    each = bytes_of(form_of(plan), width_of_weights(plan))
    return int(sum(unit.elements for unit in units_of(trace, plan) if unit.away and not unit.on_host) * each)


def moved(trace: Trace, plan: Plan) -> Trace:
    """The trace of the same step with its states and weights where the plan has them."""
    units, blocks = units_of(trace, plan), blocks_of(trace)
    storages = dict(trace.storages)
    gone = {unit.path for unit in units if unit.streamed}
    away = [n for n in trace.resident if storages[n].role == types.PARAMETER and _owner(storages[n].module, blocks) in gone]
    resident = [number for number in trace.resident if number not in set(away)]
    resident += _kept(units, plan, storages)
    programs = dict(trace.programs)
    leaving = {unit.path: unit for unit in units if unit.streamed}
    for name, program in trace.programs.items():
        if name.startswith("update"):
            programs[name] = Program(name, _until_norm(program.ops))
        elif name == "micro_first":
            programs[name] = Program(name, _left(tuple(_waiting(program.ops, units, blocks)), leaving, blocks))
        elif name == "micro_next":
            programs[name] = Program(name, _left(tuple(_fetching(program.ops, leaving, blocks)), leaving, blocks))
    schedule = {name: tuple(one for one in run if one[0] != "zero_grad") for name, run in trace.schedule.items()}
    return replace(trace, programs=programs, schedule=schedule, storages=storages, resident=tuple(resident),
                   meta={**trace.meta, MOVED: True})  # fmt: skip


def _kept(units: Sequence[StateUnit], plan: Plan, storages: dict[int, Storage]) -> list[int]:
    """States that stay, the ring, what an update needs for itself, and blocks that are at hand."""
    form, weight = form_of(plan), width_of_weights(plan)
    each = bytes_of(form, weight)
    sizes: list[tuple[float, str]] = [(unit.elements * each, types.OPTIMIZER) for unit in units if not unit.away]
    gone = [unit.elements * weight for unit in units if unit.streamed]
    comes = max((min(CHUNK, unit.elements) for unit in units if unit.away and plan.cpu_share < 1), default=0)
    stays = max((min(CHUNK, unit.elements) for unit in units if not unit.away), default=0)
    sizes += [(comes * (each + (2 * weight if gone else 0)), types.OPTIMIZER)] * (SLOTS if comes else 0)
    for longest in filter(None, (comes, stays)):
        sizes += [(longest * 4, types.OPTIMIZER)] * (SCRATCH.get(form, 0) + (plan.precision == MASTER))
    sizes += [(max(gone, default=0), types.PARAMETER)] * min(AT_HAND, len(gone))
    number = max(storages, default=0)
    found = []
    for size, role in sizes:
        number += 1
        storages[number] = Storage(nbytes=int(size), role=role, module="")
        found.append(number)
    return found


def _until_norm(ops: Sequence[Op]) -> tuple[Op, ...]:
    """The norm of the gradients; what it made dies with it."""
    end = next((at for at, op in enumerate(ops) if op.name.split(".")[1] in ENDS_NORM), len(ops))
    kept = list(ops[:end])
    made = {number for op in kept for number in op.allocates} - {number for op in kept for number in op.frees}
    if kept and made:
        kept[-1] = replace(kept[-1], frees=(*kept[-1].frees, *sorted(made)))
    return tuple(kept)


def _waiting(ops: Sequence[Op], units: Sequence[StateUnit], blocks: Sequence[str]) -> Iterable[Op]:
    left = {unit.path: unit for unit in units}
    for op in ops:
        if op.phase == "forward":
            for path in ("", _owner(op.module, blocks)):
                unit = left.pop(path, None)
                if unit is not None:
                    dies = () if unit.streamed else unit.gradients
                    yield Op(name=NEED, inputs=(), outputs=(), module=path, phase="forward", flops=0, frees=dies)
        yield op


def _fetching(ops: Sequence[Op], leaving: Mapping[str, StateUnit], blocks: Sequence[str]) -> Iterable[Op]:
    left = dict(leaving)
    for op in ops:
        unit = left.pop(_owner(op.module, blocks), None) if op.phase != "forward" else None
        if unit is not None:
            yield Op(name=FETCH, inputs=(), outputs=(), module=unit.path, phase="backward", flops=0, allocates=unit.gradients)
        yield op


def _left(ops: Sequence[Op], leaving: Mapping[str, StateUnit], blocks: Sequence[str]) -> tuple[Op, ...]:
    """Gradients that go down: they are forgotten when those of the block before theirs go, or at the end."""
    last: dict[str, int] = {}
    for at, op in enumerate(ops):
        if op.phase != "forward":
            last[_owner(op.module, blocks)] = at
    found = list(ops)
    for path, unit in leaving.items():
        before = blocks[blocks.index(path) - 1] if blocks.index(path) else ""
        at = last.get(before, len(ops) - 1) if before in leaving else len(ops) - 1
        found[at] = replace(found[at], frees=(*found[at].frees, *unit.gradients))
    return tuple(found)
