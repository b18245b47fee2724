"""Which plans may sum gradients in one fixed order, so that losses and weights have the same bits on any number of ranks."""

from __future__ import annotations

from dataclasses import fields

from foretell.errors import UserError
from foretell.plan.types import AWAY, Mesh, Plan

PRECISIONS = ("fp32", "bf16", "bf16-mixed")
_FREE = ("model", "mesh", "accumulate", "hardware", "placement", "predicted", "notes", "version", "reshard")
"""What may differ between plans that compute the same bits."""
_NOTE = "run with --exact, whose messages are not predicted: nothing is compared with a prediction"


def leaves(plan: Plan) -> int:
    """Micro-batches of a step, on all ranks."""
    return plan.accumulate * plan.mesh.data


def refuse(plan: Plan) -> None:
    """Raise where a plan cannot be run so, in one line."""
    axes = [axis for axis in ("dp_shard", "tp", "cp", "pp", "ep") if getattr(plan.mesh, axis) > 1]
    wrong = next((what for what, is_so in (
        (f"has {' and '.join(f'{axis} {getattr(plan.mesh, axis)}' for axis in axes)}", bool(axes)),
        ("has replicas that step alone (--sync-every)", plan.sync is not None),
        ("moves weights, states or activations", plan.offloads or any(one.mode in AWAY for one in plan.blocks.values())),
        (f"has precision {plan.precision}", plan.precision not in PRECISIONS),
    ) if is_so), None)  # fmt: skip
    if wrong is not None:
        raise UserError(f"--exact sums the gradients of whole replicas, and the plan {wrong}",
                        f"plan with dp_replicate alone, nothing moved, and precision {', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}")  # fmt: skip


def refuse_other(stored: Plan, plan: Plan) -> None:
    """Raise where a run would go on with other bits."""
    refuse(plan)
    unlike = [item.name for item in fields(Plan) if item.name not in _FREE and getattr(stored, item.name) != getattr(plan, item.name)]
    if leaves(stored) != leaves(plan):
        unlike.append(f"micro-batches of a step ({leaves(stored)} and {leaves(plan)})")
    if unlike:
        raise UserError(f"the run is --exact, and the plan computes other bits: it differs in {', '.join(unlike)}",
                        "resume with a plan that differs in dp_replicate and accumulate alone")  # fmt: skip


def plan_for(plan: Plan, ranks: int) -> Plan:
    """The same training, to the bit, on so many ranks."""
    count = leaves(plan)
    if count % ranks:
        raise UserError(f"no exact plan for {ranks} ranks: {count} micro-batches of a step do not divide by it", "give it a number that divides them")
    return plan.with_(mesh=Mesh(dp_replicate=ranks), accumulate=count // ranks, placement=(), predicted={})


def unpredicted(plan: Plan) -> Plan:
    """The plan without its predictions: they are of messages that such a run does not send."""
    return plan.with_(predicted={}, notes=(*(note for note in plan.notes if note != _NOTE), _NOTE)) if plan.predicted else plan
