"""What torchrun would say to a process, from what Slurm says to a task."""

from __future__ import annotations

import re
from collections.abc import Mapping

FIRST_PORT, PORTS = 10_000, 20_000
"""Ports of rendezvous: below those that systems give to connections."""


def rank_variables(env: Mapping[str, str]) -> dict[str, str]:
    """RANK and the others for a task of several, as far as they are not there; empty outside Slurm and for a single task."""
    rank, world = env.get("SLURM_PROCID", ""), env.get("SLURM_NTASKS", env.get("SLURM_NPROCS", ""))
    if not (rank.isdecimal() and world.isdecimal()) or int(world) < 2 or "RANK" in env:
        return {}
    job, step = env.get("SLURM_JOB_ID", "0"), env.get("SLURM_STEP_ID", "0")
    place = (int(job) if job.isdecimal() else 0) + (int(step) if step.isdecimal() else 0)
    found = {
        "RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": env.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": re.split(r"[^0-9]", env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", "1")))[0] or "1",
        "MASTER_ADDR": first_host(env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", ""))) or "127.0.0.1",
        "MASTER_PORT": str(FIRST_PORT + place % PORTS),
    }  # fmt: skip
    return {name: value for name, value in found.items() if name not in env}


def first_host(hosts: str) -> str:
    """Of a list such as `gpu[003-010,12],login1`."""
    found = re.match(r"([^,\[]+)(?:\[([0-9]+))?([^,\[\]]*\])?", hosts.strip())
    return (found[1] + (found[2] or "")) if found else ""
