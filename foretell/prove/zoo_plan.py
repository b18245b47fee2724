"""A plan for half the memory: asked of the search, really run, and held against the plain run.

The batch is the smallest of a few in which weights, gradients and states are at most two fifths of what the plain step needs, and
for which there is a plan: where they alone are more than half, none on one device can help. Memory of a CPU cannot be capped from
outside, so the peak of the real run's tensors is measured and must be below the cap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foretell.errors import ForetellError
from foretell.hardware.types import Cluster
from foretell.plan.recipe import model_of
from foretell.plan.types import Mesh, Plan
from foretell.search.solve.choose import Choice, SearchConstraints, choose
from foretell.search.traces.needed import Traces
from foretell.simulate.memory.memory import CAREFUL_RAM_SHARE as CAREFUL_SHARE
from foretell.simulate.memory.memory import PROCESS_BYTES
from foretell.simulate.plan import KEEP, Options, PlanCost, predict_plan
from foretell.trace.load.model import Source
from foretell.trace.types import GRADIENT, OPTIMIZER, PARAMETER, Trace
from foretell.units import human_bytes

PARTS = 4
"""Micro-batches that the plain plan's one batch can be run in."""
MICRO_BATCHES = (2, 8, 32, 128)
"""A fourth of the batch, the smallest first."""
MOST_STATES = 0.4
"""Share of the plain step's bytes that weights, gradients and states may have."""
CARE = 0.05
"""What a prediction may be off by, left free under the cap."""
STEPS = 2
MESHES = {1: (Mesh(),), 2: (Mesh(dp_shard=2), Mesh(dp_replicate=2))}


class HereTraces(Traces):
    """Traces that are made in this process, which has torch loaded."""

    def _made(self, requests: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
        from foretell.search.traces.child import answer
        from foretell.trace.sandbox.child import as_error

        found = []
        for asked in requests:
            reply = answer(asked)
            if "error" in reply:
                raise as_error(reply["error"])
            found.append((reply.pop("text"), reply))
        return found


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What the search answered."""

    global_batch: int
    plain_bytes: int
    cap_bytes: int
    plan: Plan | None = None
    """None where nothing fits: then `why` says what holds the bytes."""
    predicted_bytes: int | None = None
    why: str = ""


def planned(source: Source, cluster: Cluster, traces: Traces, options: Options) -> Planned:
    """The plan for half the memory: on one device, or on two with half each."""
    for micro, plain in _batches(source, cluster, traces, options):
        found = _planned(source, cluster, traces, options, micro, plain)
        if found.plan is not None:
            break
    return found


def _planned(source: Source, cluster: Cluster, traces: Traces, options: Options, micro: int, plain: PlanCost) -> Planned:
    whole = plain.worst.memory.allocated_bytes
    asked = Planned(global_batch=PARTS * micro, plain_bytes=whole, cap_bytes=whole // 2)
    nearest: list[PlanCost] = []
    for ranks, meshes in MESHES.items():
        room = capped(cluster, int((1 - CARE) * asked.cap_bytes), ranks)
        for size in (micro, max(1, micro // PARTS)):
            wishes = SearchConstraints(global_batch=asked.global_batch, micro_batch=size, meshes=meshes, compile=("none",), clip=None)
            found = choose(source, room, "auto", wishes, options=options, traces=traces)
            if found.best is not None and found.best.cost is not None:
                held = found.best.cost.worst.memory.allocated_bytes
                return replace(asked, plan=found.best.plan, predicted_bytes=held)
            nearest += _costs(found)
    return replace(asked, why=_held(nearest, asked.cap_bytes))


def _batches(source: Source, cluster: Cluster, traces: Traces, options: Options) -> Iterator[tuple[int, PlanCost]]:
    """Micro-batches to try, and what the plain step of four of them costs."""
    for micro in MICRO_BATCHES:
        plan = Plan(model=model_of(source), hardware="auto", precision="fp32", micro_batch=PARTS * micro, clip=None)
        found = traces.of(plan, [KEEP])
        cost = predict_plan(found, plan, cluster, options)
        if micro == MICRO_BATCHES[-1] or states_of(found[KEEP]) <= MOST_STATES * cost.worst.memory.allocated_bytes:
            yield micro, cost


def states_of(trace: Trace) -> int:
    """Bytes of weights, of their gradients and of the optimizer's states."""
    return sum(one.nbytes for one in trace.storages.values() if one.role in (PARAMETER, GRADIENT, OPTIMIZER))


def capped(cluster: Cluster, tensors: int, ranks: int) -> Cluster:
    """A CPU with just so much memory that each rank has room for these bytes of tensors, its process aside."""
    each = math.ceil((tensors + PROCESS_BYTES) / (1 - CAREFUL_SHARE)) + 1
    return replace(cluster, device=cluster.device.with_memory(ranks * each, "a cap for this check"))


def _costs(found: Choice) -> list[PlanCost]:
    return [one.cost for one in found.dropped if one.cost is not None]


def _held(costs: Sequence[PlanCost], cap: int) -> str:
    """What holds the bytes of the plan that comes nearest."""
    if not costs:
        return "no plan is legal"
    memory = min((cost.worst.memory for cost in costs), key=lambda memory: memory.allocated_bytes)
    most = [f"{name} {human_bytes(held)}" for name, held in list(memory.categories.items())[:3]]
    return f"no plan in {human_bytes(cap)}: the nearest needs {human_bytes(memory.allocated_bytes)}, {', '.join(most)}"


# ---------------------------------------------------------------------------------------------- really run


@dataclass(frozen=True)
class RankResult:
    """What a rank saw of a plan's first steps."""

    losses: list[float]
    peak_bytes: int


def run_plan(_rank: int, _world: int, source: Source, plan: Plan, steps: int = STEPS) -> RankResult:
    """Some steps of a plan on this rank of a CPU; the highest point of live tensors, the step's data among them."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from foretell.runtime.check import verify
    from foretell.runtime.parallel.apply import apply
    from foretell.runtime.parallel.ranks import start
    from foretell.trace.record.collection import no_collection
    from foretell.trace.record.on_cpu import peaks_of, quiet_stderr

    verify.quiet_warnings()
    torch.set_num_threads(1)
    ranks = start(plan, device="cpu")
    job = apply(verify.build(source).summed(), plan, ranks, learning_rate=verify.LEARNING_RATE)
    mine = verify.shared(source, plan, ranks, job)
    held = {_bytes(tensor) for part in job.parts for tensor in (*part.parameters(), *part.buffers())}
    held |= {one for batch in mine for one in _data(batch)}
    with no_collection(), quiet_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        losses = [job.train_step(mine).loss.item() for _ in range(steps)]
    peak = peaks_of(recorded.profiler.kineto_results.events())[0]
    return RankResult(losses, sum(size for _, size in held) + peak)


def carried(_rank: int, _world: int, source: Source) -> list[str]:
    """Buffers that a forward changes and that are no running statistics of a norm: what one micro-batch leaves to the next,
    and each rank has of its own micro-batches."""
    import torch
    from torch import nn

    from foretell.runtime.check import verify
    from foretell.trace.record.step import compute_loss

    workload = verify.build(source).summed()
    norms = [f"{path}." for path, module in workload.model.named_modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    before = {name: buffer.clone() for name, buffer in workload.model.named_buffers()}
    workload.model.train()
    compute_loss(workload)
    changed = [name for name, buffer in workload.model.named_buffers() if not torch.equal(buffer, before[name])]
    return [name for name in changed if not name.startswith(tuple(norms))]


def _bytes(tensor: Any) -> tuple[int, int]:
    """Where a tensor's bytes on this rank begin, and how many there are."""
    storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _data(batch: Any) -> set[tuple[int, int]]:
    import torch

    return {_bytes(leaf) for leaf in torch.utils._pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)}


def first_line(error: BaseException | str) -> str:
    text = error.problem if isinstance(error, ForetellError) and hasattr(error, "problem") else str(error)
    return text.strip().splitlines()[0][:200] if text.strip() else type(error).__name__
