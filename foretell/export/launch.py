"""What starts foretell itself on every node of a job. No word of a plan is in a command: it reads the plan file beside it."""

from __future__ import annotations

from foretell.export.types import Machines
from foretell.plan.types import Plan

PLAN = "plan.json"
PORT = 29500
HEAD = '"$HEAD"'
"""The first node in a script that finds it."""


def command(plan: Plan, where: Machines, head: str, *, port: int = PORT) -> str:
    """`head` is how a node finds the first one."""
    run = f"run {PLAN} --out run"
    if plan.mesh.world == 1:
        return f"foretell {run}"
    if where.nodes == 1:
        return f"torchrun --standalone --nproc-per-node {where.per_node} -m foretell {run}"
    return (
        f"torchrun --nnodes {where.nodes} --nproc-per-node {where.per_node} --rdzv-backend c10d "
        f"--rdzv-endpoint {head}:{port} -m foretell {run}"
    )


def lost(plan: Plan, where: Machines) -> list[str]:
    found = [
        "data, steps and learning rate: add --data, --steps and --lr to the command",
        "what is predicted: it is in plan.json, which is beside this file",
    ]
    model = str(plan.model.get("model"))
    if ".py" in model:
        found.append(f"the model's own file: {model.partition(':')[0]} must be there under that path")
    if not where.device:
        found.append("hardware: the plan names none that is known everywhere, so one node with all ranks is asked for")
    return found
