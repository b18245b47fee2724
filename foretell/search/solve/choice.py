"""A plan that was considered, the one that was chosen, and both in words."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from foretell.errors import UserError
from foretell.plan.blocks import expand
from foretell.plan.recipe import known_blocks
from foretell.plan.text import plain
from foretell.plan.types import AXES, FP16, Plan
from foretell.quantities import TIGHT, Infeasible
from foretell.search.advice.relax import Relaxation
from foretell.search.solve.found import Candidate, Reason, SearchResult
from foretell.search.solve.planned_batch import BatchAdvice
from foretell.search.solve.reasons import sentence
from foretell.search.space.preferences import ALIKE, lost_though_as_fast
from foretell.simulate.plan import PlanCost
from foretell.trace.recipe import adapters_told, sync_told
from foretell.units import human_bytes


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The best plan and those that lost."""

    best: Candidate | None
    runners_up: tuple[Candidate, ...] = ()
    """That fit, the fastest first; one for each mesh, residency and way to compile."""
    dropped: tuple[Candidate, ...] = ()
    """That do not fit, or are not legal."""
    infeasible: Infeasible | None = None
    """Why nothing fits: of the plan that comes nearest."""
    costed: int = 0
    notes: tuple[str, ...] = ()
    found: SearchResult | None = None
    """What the search found besides: the front, what binds, what other hardware would change."""
    law: BatchAdvice | None = None
    """What the Step Law says of the run, where its tokens are known."""
    reasons: tuple[Reason, ...] = ()
    """Where there is no plan: why not, by count."""
    where: tuple[str, ...] = ()
    """What of the best plan is not on the device, and why."""
    relaxations: tuple[Relaxation, ...] = ()
    """Where nothing fits: changes with which something does, each searched for."""
    tried: int = 0
    """Changes that were searched for to find those."""
    gain: str = ""
    """What the best plan changes in training, where that was allowed, and what it gains."""

    @property
    def plan(self) -> Plan:
        if self.best is None:
            why = f": {sentence(self.reasons)}" if self.reasons else " fits"
            raise UserError(f"no plan{why}", "give more or larger devices, or a shorter sequence")
        return self.best.plan


def kind_of(plan: Plan) -> Any:
    """What plans of one kind have in common."""
    modes = tuple(sorted({residency.mode for residency in plan.blocks.values()}))
    return plan.mesh, modes, plan.compile, plan.reshard


def explained(one: Candidate) -> Candidate:
    """The same with how many bytes are missing, where that is why it is not possible."""
    if one.why or one.cost is None:
        return one
    memory = one.cost.worst.memory
    category, held = next(iter(memory.categories.items()), ("tensors", memory.allocated_bytes))
    short = human_bytes(-memory.margin_bytes)
    return replace(one, why=f"{short} short on each device; {category} hold {human_bytes(held)}")


# ---------------------------------------------------------------------- words


_TREATED = {
    "recompute": "recompute all blocks", "selective": "recompute selectively", "host": "activations moved to the host",
    "disk": "activations moved to the disk", "recompute-host": "recompute blocks from inputs on the host",
}  # fmt: skip


def _some(plan: Plan, mode: str) -> str:
    """How many blocks, where that is known and not all of them."""
    known = known_blocks(plan) or ()
    count = sum(one.mode == mode for one in expand(plan.blocks, known).values()) if known else 0
    return f", {count} of {len(known)}" if count < len(known) else ""


def told(plan: Plan) -> str:
    """A plan in a few words."""
    mesh = plan.mesh
    axes = [f"{axis} {getattr(mesh, axis)}" for axis in AXES if getattr(mesh, axis) > 1]
    words = [" × ".join(axes) or "one device", f"micro-batch {plan.micro_batch}"]
    words += [f"accumulate {plan.accumulate}"] if plan.accumulate > 1 else []
    words += [plan.precision] if plan.precision == FP16 else []
    words += [f"replicas joined {sync_told(plan.sync)}"] if plan.sync is not None else []
    words += [plain(adapters_told(plan.adapters, plan.base))] if plan.adapters is not None else []
    modes = sorted({residency.mode for residency in plan.blocks.values() if residency.mode != "keep"})
    words += [_TREATED.get(mode, mode) + _some(plan, mode) for mode in modes]
    words += [f"loss in {plan.loss_chunks} chunks"] if plan.loss_chunks > 1 else []
    words += [f"{plan.pipeline.stages} stages, {plan.pipeline.schedule}"] if plan.pipeline else []
    words += [f"states of {', '.join(plan.states)} offloaded"] if plan.states else []
    words += [f"weights of {', '.join(plan.weights)} offloaded"] if plan.weights else []
    words += [f"{plan.cpu_share:.0%} of them updated by the CPU"] if plan.cpu_share else []
    words += [f"compile {plan.compile}"] if plan.compile != "none" else []
    words += ["reshard_after_forward=False"] if plan.reshard is False and mesh.dp_shard > 1 else []
    return ", ".join(words)


_REASONS = {
    "communication": "waits for communication", "waiting_for_host": "waits for the host", "gemm": "slower matmuls",
    "memory": "moves more bytes", "attention": "attention takes longer", "recompute": "computes blocks twice",
    "bubble": "ranks wait for each other", "waiting_for_ranks": "ranks wait for each other",
    "waiting_for_states": "waits for states", "waiting_for_copies": "waits for activations",
}  # fmt: skip


def why_slower(best: Candidate, other: Candidate, alike: float = ALIKE) -> str:
    """Where a plan loses against the best, per token."""
    if best.cost is None or other.cost is None or best.cost.time is None or other.cost.time is None:
        return ""
    ours, theirs = best.cost.per_second or 1.0, other.cost.per_second or 1.0
    slower = 1 - theirs / ours
    if slower < ALIKE / 2:
        tight, batch = other.cost.verdict == TIGHT and best.cost.verdict != TIGHT, other.plan.global_batch / best.plan.global_batch
        return lost_though_as_fast(max(0.0, -slower), tight=tight, batch=batch, alike=alike)
    parts: dict[str, float] = {}
    for name in (*other.cost.time.breakdown, "recompute"):
        parts[name] = _per_token(other.cost, name) - _per_token(best.cost, name)
    parts["bubble"] = other.cost.bubble / theirs - best.cost.bubble / ours
    name = max(parts, key=lambda key: parts[key])
    return f"{slower:.0%} slower: {_REASONS.get(name, name)}"


def _per_token(cost: PlanCost, name: str) -> float:
    assert cost.time is not None
    if name == "recompute":
        return cost.time.phases.get("recompute", 0.0) / cost.per_step
    return cost.time.breakdown.get(name, 0.0) / cost.per_step

