"""The cost of a plan against the plan itself, applied in one process with a process group whose messages go nowhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from foretell import zoo
from foretell.cost.pipeline_rank import rank_traces
from foretell.cost.plan import repeated, sharded
from foretell.cost.plan_blocks import blocks_of
from foretell.plan.blocks import even_cuts
from foretell.plan.mesh import rank_at
from foretell.plan.recipe import recipe_of
from foretell.plan.types import Mesh, Pipeline, Plan, Split
from foretell.search.split_trace import capture_split
from foretell.trace.capture import capture
from foretell.trace.step import Workload
from foretell.trace.types import Trace
from tests.pure import dry

SCALARS = 1024
"""Bytes of losses, norms and the like, which the runtime keeps and the cost does not count."""
NAME, MICRO_BATCH = "gpt-tiny", 2


def build() -> Workload:
    entry = zoo.get(NAME)
    module = zoo.load(entry)
    model = module.build(**entry.config)
    return Workload(model, module.batch(model, MICRO_BATCH, entry.seq, entry.image), module.loss)


def plan_of(mesh: Mesh, **more: Any) -> Plan:
    return Plan(model={"model": NAME}, hardware="auto", mesh=mesh, micro_batch=MICRO_BATCH, **more)


def peaks(trace: Trace) -> dict[str, int]:
    """Highest bytes alive in a steady step, while it computes and while it updates."""
    sizes, alive = {number: storage.nbytes for number, storage in trace.storages.items()}, set(trace.resident)
    for run in ("first_step", "steady_step"):
        found: dict[str, int] = {}
        for name, times in trace.schedule[run]:
            for _ in range(times):
                rows: Any = [
                    SimpleNamespace(
                        phase="update" if op.phase == "update" else "compute", allocates=op.allocates, frees=op.frees
                    )
                    for op in trace.programs[name].ops
                ]
                for phase, value in dry.highest(rows, alive, sizes).items():
                    found[phase] = max(found.get(phase, 0), value)
    return found


def messages(trace: Trace) -> dict[tuple[str, int, int], int]:
    """(kind, ranks where the kind tells them, bytes) → how often in a steady step."""
    found: dict[tuple[str, int, int], int] = {}
    for name, times in trace.schedule["steady_step"]:
        for op in trace.programs[name].ops:
            kind = op.name.removeprefix("foretell.")
            if kind in ("send", "receive", "all_gather", "reduce_scatter", "all_reduce"):
                ranks = next((int(str(a)[6:]) for a in op.attrs if str(a).startswith("ranks:")), 0)
                key = ("recv" if kind == "receive" else kind, ranks if kind in ("all_gather", "reduce_scatter") else 0,
                       max(op.bytes_read, op.bytes_written))  # fmt: skip
                found[key] = found.get(key, 0) + times
    return found


def compare(plan: Plan, trace: Trace, rank: int) -> None:
    seen = dry.run(build, plan, rank)
    for phase, predicted in peaks(trace).items():
        assert abs(seen.peaks[phase] - seen.left - predicted) <= SCALARS, phase
    assert {key: count for key, count in seen.messages.items() if key[2] > 8} == messages(trace)


def local(plan: Plan, capture_one: Callable[..., Any]) -> Trace:
    found: Trace = capture_one(replace(recipe_of(plan, "keep"), accumulate=1))
    return found


@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        (Mesh(dp_shard=4), {}), (Mesh(dp_shard=4), {"accumulate": 3}), (Mesh(dp_replicate=2, dp_shard=4), {"accumulate": 3}),
        (Mesh(dp_replicate=4), {"accumulate": 2}), (Mesh(dp_shard=4), {"reshard": False}), (Mesh(dp_shard=4), {"reshard": 2}),
        (Mesh(dp_shard=4), {"precision": "fp32"}),
    ],
)  # fmt: skip
def test_data_axes(mesh: Mesh, more: dict[str, Any]) -> None:
    plan = plan_of(mesh, **more)
    trace = local(plan, lambda recipe: capture(build, recipe, capability=None))
    compare(plan, sharded(repeated(trace, plan.accumulate), plan), 0)


@pytest.mark.parametrize("mesh", [Mesh(pp=2, dp_shard=2), Mesh(pp=2, dp_shard=4)])
def test_pipeline_axes(mesh: Mesh) -> None:
    plan = plan_of(mesh, accumulate=4)
    trace = local(plan, lambda recipe: capture(build, recipe, capability=None))
    plan = plan.with_(pipeline=Pipeline(schedule="1f1b", cuts=even_cuts(blocks_of(trace), mesh.pp)))
    for one in rank_traces(trace, plan):
        compare(plan, one.trace, rank_at(mesh, pp=one.rank))


@pytest.mark.parametrize(
    ("mesh", "precision", "sequence"),
    [(Mesh(tp=2), "fp32", True), (Mesh(tp=2), "fp32", False), (Mesh(tp=2, dp_shard=2), "bf16-mixed", True)],
)
def test_tensor_axes(mesh: Mesh, precision: str, sequence: bool) -> None:
    plan = plan_of(mesh, precision=precision, split=Split(sequence=sequence, loss=sequence))
    trace = local(
        plan, lambda recipe: capture_split(build, recipe, mesh.tp, sequence=sequence, loss=sequence, capability=None)[0]
    )
    compare(plan, sharded(repeated(trace, plan.accumulate), plan), 0)
