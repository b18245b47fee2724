"""A published run as a plan: mesh, micro-batches, sharding, recomputation, and the software it was run with."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from published_rows import Run  # noqa: E402
from published_traces import model_of  # noqa: E402

from benchmarks.foreign.plan import ZERO2, ZERO3, ForeignPlan  # noqa: E402
from foretell.plan.types import FP16, Mesh, Plan, Residency, Split  # noqa: E402

_MODES = {"none": "keep", "full": "recompute", "selective": "selective"}


def mesh_of(run: Run) -> Mesh:
    if run.shard != ZERO3 and not (run.shard == ZERO2 and run.stack.by_unit):
        return Mesh(dp_replicate=run.dp, tp=run.tp, cp=run.cp, pp=run.pp)
    group = run.shard_group if run.shard_group and run.dp % run.shard_group == 0 else run.dp
    return Mesh(dp_shard=group, dp_replicate=run.dp // group, tp=run.tp, cp=run.cp, pp=run.pp)


def plan_of(run: Run, device: str) -> ForeignPlan:
    plan = Plan(
        model=model_of(run, run.layers), hardware=device, mesh=mesh_of(run), micro_batch=run.micro, accumulate=run.micros,
        precision=FP16 if run.precision == "fp16" else "bf16-mixed", optimizer=run.stack.optimizer,
        blocks={"blocks.*": Residency(mode=_MODES[run.recompute])}, compile=run.stack.compile,
        split=Split(sequence=run.sequence_parallel) if run.tp > 1 else None,
    )  # fmt: skip
    return ForeignPlan(
        plan=plan, stack=run.stack, layers=run.layers, layer_alone=not run.vocab, data=run.shard, group=run.shard_group, schedule=run.schedule,
        chunks=run.chunks, recompute=run.recompute, float8=run.float8, narrow_gathers=run.narrow_gathers,
        hides_tensor=run.hides_tensor, topk=run.topk, ep=run.ep,
        tokens=run.micro * run.seq // run.cp // (run.tp if run.experts else 1), hidden=run.hidden,
    )  # fmt: skip
