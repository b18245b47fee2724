"""A step of several micro-batches from the trace of one: the later ones add to the gradients that are there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from foretell.trace import types
from foretell.trace.types import Op, Program, Ref, Storage, Trace

FIRST, NEXT = "micro_first", "micro_next"
_KEPT = "aten.detach.default"
"""What autograd does with the first gradient of a parameter: it keeps it."""


def whole_step(trace: Trace, accumulate: int) -> Trace:
    """A whole step: the trace itself where it has all micro-batches already, or is no training step of its own."""
    return repeated(trace, accumulate) if FIRST in trace.programs and NEXT not in trace.programs else trace


def repeated(trace: Trace, accumulate: int) -> Trace:
    """The trace with so many micro-batches a step; what the later ones do is derived where it was not traced.

    All of them are on the device before the first is computed.
    """
    if accumulate > 1:
        trace = _with_batches(trace if NEXT in trace.programs else _with_next(trace), accumulate)

    def times(run: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
        found: list[tuple[str, int]] = []
        for name, count in run:
            if name == FIRST:
                found += [(FIRST, 1), (NEXT, accumulate - 1)]
            elif name != NEXT:
                found.append((name, count))
        return tuple((name, count) for name, count in found if count > 0)

    steps = {name: times(run) if any(part == FIRST for part, _ in run) else run for name, run in trace.schedule.items()}
    return replace(trace, schedule=steps)


def _with_batches(trace: Trace, accumulate: int) -> Trace:
    inputs = [number for number in trace.resident if trace.storages[number].role == types.INPUT]
    copies = [trace.storages[number] for number in inputs for _ in range(accumulate - 1)]
    more = dict(enumerate(copies, max(trace.storages) + 1))
    return replace(trace, storages={**trace.storages, **more}, resident=(*trace.resident, *more))


def _with_next(trace: Trace) -> Trace:
    storages = dict(trace.storages)
    program = Program(NEXT, tuple(adding(trace.programs[FIRST].ops, storages)))
    return replace(trace, programs={**trace.programs, NEXT: program}, storages=storages)


def adding(ops: Sequence[Op], storages: dict[int, Storage]) -> list[Op]:
    """The same ops on gradients of their own, each added to the one that is there, and then gone."""
    born = {number for op in ops for number in op.allocates}
    gone = {number for op in ops for number in op.frees}
    mine = [number for number in sorted(born - gone) if storages[number].role == types.GRADIENT]
    twins = dict(zip(mine, itertools.count(max(storages, default=-1) + 1)))
    storages.update((twin, storages[number]._replace(role=types.TEMPORARY)) for number, twin in twins.items())
    last = {ref.storage: position for position, op in enumerate(ops) for ref in (*op.inputs, *op.outputs) if ref.storage in twins}
    dies: dict[int, list[int]] = {}
    for number, twin in twins.items():
        if number in last:
            dies.setdefault(last[number], []).append(twin)

    def own(refs: tuple[Ref, ...]) -> tuple[Ref, ...]:
        if not any(ref.storage in twins for ref in refs):
            return refs
        return tuple(Ref(twins.get(ref.storage, ref.storage), ref.spec) for ref in refs)

    done: list[Op] = []
    for position, op in enumerate(ops):
        dying = dies.get(position, ())
        if op.name == _KEPT and op.phase == "backward" and op.inputs and op.inputs[0].storage in twins:
            late = (*op.frees, *dying)
            for place, there in enumerate(op.inputs, 1):  # several where the op stands for those of several gradients
                frees = late if place == len(op.inputs) else ()
                done.append(replace(op, name="aten.add_.Tensor", inputs=(there, *own((there,))), outputs=(there,), frees=frees))
            continue
        inputs, outputs = own(op.inputs), own(op.outputs)
        if inputs is op.inputs and outputs is op.outputs and not dying and twins.keys().isdisjoint(op.allocates):
            done.append(op)
            continue
        allocates = tuple(twins.get(number, number) for number in op.allocates)
        done.append(replace(op, inputs=inputs, outputs=outputs, allocates=allocates, frees=(*op.frees, *dying)))
    return done


def with_evaluation(trace: Trace) -> Trace:
    """The trace with one more schedule, `evaluation`: its forward without gradients, derived rather than traced.

    What autograd would keep dies at its last use in forward; the rest dies where it died.
    """
    if "micro_first" not in trace.programs or "evaluation" in trace.schedule:
        return trace
    ops = [op for op in trace.programs["micro_first"].ops if op.phase == "forward"]
    born = {number for op in ops for number in op.allocates}
    freed = {number for op in ops for number in op.frees}
    last: dict[int, int] = {}
    for position, op in enumerate(ops):
        for number in (*op.allocates, *(ref.storage for ref in op.inputs), *(ref.storage for ref in op.outputs)):
            if number in born and number not in freed:
                last[number] = position
    dying: dict[int, list[int]] = {}
    for number, position in last.items():
        dying.setdefault(position, []).append(number)
    program = Program(
        "evaluation",
        tuple(
            replace(op, frees=(*(n for n in op.frees if n in born), *dying.get(position, ())))
            for position, op in enumerate(ops)
        ),
    )
    return replace(
        trace,
        programs={**trace.programs, "evaluation": program},
        schedule={**trace.schedule, "evaluation": (("evaluation", 1),)},
    )
