"""Slurm: a batch script for sbatch. One task a node, which starts its ranks with torchrun."""

from __future__ import annotations

from foretell.export import launch
from foretell.export.types import Exported, header, label, machines_of
from foretell.plan import file
from foretell.plan.types import Plan

NAME = "train.sbatch"


def write(plan: Plan) -> Exported:
    where = machines_of(plan)
    lost = [*launch.lost(plan, where), "partition, account, time: add #SBATCH lines as your cluster wants them"]
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={label(plan)}",
        f"#SBATCH --nodes={where.nodes}",
        "#SBATCH --ntasks-per-node=1",
        *([f"#SBATCH --gpus-per-node={where.per_node}"] if where.backend not in ("cpu", "") else []),
        *(["#SBATCH --exclusive"] if where.nodes > 1 else []),
        "#SBATCH --output=%x-%j.log",
        header(plan, "slurm", lost).rstrip(),
        "",
        "set -euo pipefail",
        'cd "$SLURM_SUBMIT_DIR"',
        *(['HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)', "export HEAD"] if where.nodes > 1 else []),
        f"srun {launch.command(plan, where, launch.HEAD)}",
    ]
    files = {NAME: "\n".join(lines) + "\n", launch.PLAN: file.text_of(plan)}
    return Exported(files=files, command=f"sbatch {NAME}", lost=tuple(lost))
