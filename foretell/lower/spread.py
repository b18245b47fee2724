"""What a script itself spreads over ranks, as its trace says: DistributedDataParallel, fully_shard, or nothing.

    meta["spread"] = {"kind": "ddp", "world": 8, "replicate": 8, "shards": 1, "how": {...}}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from foretell.lower.ddp import Replicas, replicated
from foretell.lower.fsdp.sharded import shard, wide_of
from foretell.lower.fsdp.units import FIRST, rows
from foretell.plan.types import Mesh
from foretell.trace.types import GRADIENT, PARAMETER, Op, Program, TensorSpec, Trace

SPREAD = "spread"
DDP, FSDP, COPIES = "ddp", "fsdp", "copies"
"""Kinds; copies: every rank trains for itself, and sends what its script sends."""


def spread_of(trace: Trace) -> Mapping[str, Any] | None:
    found = trace.meta.get(SPREAD)
    assert found is None or isinstance(found, Mapping)
    return found


def mesh_told(trace: Trace) -> dict[str, Any]:
    """Mesh, and what the links depend on, of a plan for a trace that says how it is spread; nothing for others."""
    told = spread_of(trace)
    if told is None:
        return {}
    spread_over = {one for one in told["how"].get("reshard", {}).values() if not isinstance(one, bool)}
    return {"mesh": Mesh(dp_replicate=told["replicate"], dp_shard=told["shards"]), "reshard": max(spread_over, default=True)}


def spread(trace: Trace, told: Mapping[str, Any]) -> Trace:
    """The program of one rank."""
    lowered = _spread(trace, told)
    return _held(lowered) if told.get("held") else lowered


def _held(trace: Trace) -> Trace:
    """Gradients go when the forward of the next step is over, as in scripts that call zero_grad() right before backward()."""
    ops, clear = trace.programs[FIRST].ops, trace.programs["zero_grad"].ops
    turn = next((place for place, op in enumerate(ops) if op.phase != "forward"), len(ops))
    again = Program("again", (*ops[:turn], *clear, *ops[turn:]))
    schedule = dict(trace.schedule)
    for run, first in (("first_step", FIRST), ("steady_step", "again")):
        schedule[run] = tuple((first if name == FIRST else name, count) for name, count in trace.schedule[run] if name != "zero_grad")
    return replace(trace, programs={**trace.programs, "again": again}, schedule=schedule)


def _spread(trace: Trace, told: Mapping[str, Any]) -> Trace:
    how = told["how"]
    if told["kind"] == DDP:
        return replicated(trace, Replicas(**{**how, "paths": tuple(how["paths"])}, ranks=told["world"]))
    if told["kind"] == FSDP:
        joined = _shrunk(_joined(trace, how["units"]), how.get("derived", {}), told["shards"])
        return shard(
            joined, told["shards"], replicate=told["replicate"], reduce=how["reduce"], left=how["left"],
            beside=[paths[0] for paths in how["units"]], apart=how["reshard"],
        )  # fmt: skip
    return replace(trace, meta={**trace.meta, "ranks": told["world"]})


def _shrunk(trace: Trace, derived: Mapping[str, Any], ranks: int) -> Trace:
    """With what was made of parameters before the step in shards, in the format of theirs."""
    storages, wide = dict(trace.storages), wide_of(trace)
    for key, (shape, dtype) in derived.items():
        old = storages.get(int(key))
        if old is not None and old.role not in (PARAMETER, GRADIENT):
            part = TensorSpec(rows(tuple(shape), ranks), wide.get(dtype, dtype))
            storages[int(key)] = old._replace(nbytes=part.nbytes)
    return replace(trace, storages=storages)


def _joined(trace: Trace, units: list[list[str]]) -> Trace:
    """Modules that are sharded together lie, by name, in the first of them."""
    inside = {path: f"{first}.{path.replace('.', '_')}" for first, *others in units for path in others}
    if not inside:
        return trace
    known: dict[str, str] = {}

    def moved(module: str) -> str:
        if module not in known:
            found = next((one for one in inside if module == one or module.startswith(f"{one}.")), None)
            known[module] = module if found is None else inside[found] + module[len(found) :]
        return known[module]

    def op(one: Op) -> Op:
        return one if moved(one.module) == one.module else replace(one, module=moved(one.module))

    programs = {name: Program(name, tuple(map(op, program.ops))) for name, program in trace.programs.items()}
    storages = {number: one._replace(module=moved(one.module)) for number, one in trace.storages.items()}
    return replace(trace, programs=programs, storages=storages)
