"""Networks trained in turn: the traces of a workload's phases joined to one. Plain data, no torch.

Every phase has a trace of its own over the same model, with other parts of it trained. Joined, they share the weights;
the optimizer states that one phase made stay while the others train; gradients go with their phase's `zero_grad`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any

from foretell.errors import UserError
from foretell.trace.recipe import Recipe
from foretell.trace.types import BUFFER, INPUT, PARAMETER, Op, Program, Ref, Storage, Trace


def by_phase(asked: Mapping[str, Any], recipe: Recipe) -> dict[str, dict[str, Any]]:
    """A request for a trace, one for each phase where the override `phase` names several, as in a+b."""
    source = asked["source"]
    phases = str(source["overrides"].get("phase", "")).split("+")
    if len(phases) == 1:
        return {phases[0]: dict(asked)}
    if recipe.compile != "none" or recipe.shards > 1:
        raise UserError(f"phases in turn ({', '.join(phases)}) are predicted for one device, eager", "ask for each phase by itself")
    return {phase: {**asked, "source": {**source, "overrides": {**source["overrides"], "phase": phase}}} for phase in phases}


def in_turn(traces: Mapping[str, Trace]) -> Trace:
    """One step of each phase, one phase after another, as one step; programs are called `phase/program`."""
    first = next(iter(traces.values()))
    weights, inputs = _held(first, PARAMETER, BUFFER), _held(first, INPUT)
    storages: dict[int, Storage] = dict(first.storages)
    resident = list(first.resident)
    programs: dict[str, Program] = {}
    free = count(max(storages) + 1)
    for phase, trace in traces.items():
        own = _held(trace, PARAMETER, BUFFER)
        if [_looks(first, n) for n in weights] != [_looks(trace, n) for n in own]:
            raise UserError(f"phase {phase} has other weights than the phases before it", "ask for each phase by itself")
        known = dict(zip(own, weights, strict=True))
        if trace is first:
            known = {number: number for number in trace.storages}
        elif [_looks(first, n) for n in inputs] == [_looks(trace, n) for n in _held(trace, INPUT)]:
            known.update(zip(_held(trace, INPUT), inputs, strict=True))
        for number, storage in trace.storages.items():
            if number not in known:
                known[number] = next(free)
                storages[known[number]] = storage
        resident += [known[number] for number in trace.resident if known[number] not in resident]
        for name, program in trace.programs.items():
            programs[f"{phase}/{name}"] = Program(f"{phase}/{name}", tuple(_renumbered(op, known) for op in program.ops))
    runs = {
        run: tuple((f"{phase}/{name}", times) for phase, trace in traces.items() for name, times in trace.schedule[run])
        for run in first.schedule
    }
    return Trace(programs=programs, schedule=runs, storages=storages, resident=tuple(resident), meta=_meta(traces))


def _held(trace: Trace, *roles: str) -> list[int]:
    return [number for number in trace.resident if trace.storages[number].role in roles]


def _looks(trace: Trace, number: int) -> tuple[int, str, str]:
    storage = trace.storages[number]
    return storage.nbytes, storage.role, storage.module


def _renumbered(op: Op, known: Mapping[int, int]) -> Op:
    def refs(given: tuple[Ref, ...]) -> tuple[Ref, ...]:
        return tuple(Ref(known[ref.storage], ref.spec) for ref in given)

    return replace(
        op, inputs=refs(op.inputs), outputs=refs(op.outputs), allocates=tuple(known[n] for n in op.allocates),
        frees=tuple(known[n] for n in op.frees),
    )  # fmt: skip


def _meta(traces: Mapping[str, Trace]) -> dict[str, object]:
    every = [trace.meta for trace in traces.values()]
    assumed = {str(line) for meta in every for line in meta["assumed"]}  # type: ignore[attr-defined]
    trainable = sum(int(meta["trainable"]) for meta in every)  # type: ignore[call-overload]
    return {**every[0], "assumed": sorted(assumed), "trainable": trainable, "phases": list(traces)}
