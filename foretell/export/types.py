"""What an export is, and what the tools have in common."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foretell.errors import UserError
from foretell.hardware import Cluster, parse
from foretell.plan.blocks import expand
from foretell.plan.recipe import known_blocks
from foretell.plan.text import plain
from foretell.plan.types import AWAY, Plan, computed
from foretell.trace.recipe import adapters_told


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Files for another tool."""

    files: Mapping[str, str]
    """Name → text."""
    command: str
    """What starts it, in the folder of the files."""
    lost: tuple[str, ...]
    """What the plan says and these files do not."""


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Where the plan runs, as far as its hardware says."""

    nodes: int
    per_node: int
    """Processes on each node."""
    device: str
    """Name in the catalogue; empty where it is not known."""
    backend: str
    """cuda, rocm, mps or cpu; empty where it is not known."""


def machines_of(plan: Plan) -> Machines:
    """As many nodes as the plan's ranks need; a plan for this machine, or for a file that is elsewhere, is taken as one."""
    world = plan.mesh.world
    cluster = _cluster(plan.hardware)
    if cluster is None:
        return Machines(nodes=1, per_node=world, device="", backend="")
    if cluster.groups:
        raise UserError(f"{plan.hardware} joins unlike devices, and one job description has one kind", "run it with torchrun on each of them")
    nodes = -(-world // max(1, cluster.devices_per_node)) if cluster.device.backend != "cpu" else 1
    while world % nodes:
        nodes += 1
    return Machines(nodes=nodes, per_node=world // nodes, device=cluster.device.name, backend=cluster.device.backend)


def _cluster(hardware: str) -> Cluster | None:
    if hardware.strip().casefold().startswith("auto"):
        return None
    try:
        return parse(hardware)
    except (UserError, ValueError) as error:  # ValueError: a path that no file can have
        if hardware.endswith((".toml", ".json")):
            return None
        if isinstance(error, UserError):
            raise
        raise UserError(f"the hardware {plain(hardware)} is not known", "see `foretell hardware`") from error


def title(plan: Plan) -> str:
    """The plan in one line, whatever its names hold."""
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
    mesh = " × ".join(f"{axis} {getattr(plan.mesh, axis)}" for axis in axes if getattr(plan.mesh, axis) > 1) or "one device"
    return plain(f"{plan.model.get('model', 'a model')} on {plan.hardware}: {mesh}, {plan.global_batch} samples a step")


def header(plan: Plan, tool: str, lost: Sequence[str]) -> str:
    """Comment lines that begin a file; in bash, YAML, TOML and Python none of them ends before its line does."""
    lines = [f"Written by `foretell plan export --to {tool}` for {title(plan)}."]
    lines += ["Of the plan, this file does not say:", *(f"  - {line}" for line in lost)] if lost else []
    return "".join(f"# {plain(line)}\n" for line in lines)


def modes_of(plan: Plan) -> set[str]:
    """How the plan's blocks keep their activations."""
    known = known_blocks(plan)
    modes = {residency.mode for residency in (expand(plan.blocks, known) if known else plan.blocks).values()} or {"keep"}
    return {computed(mode) for mode in modes}


def label(plan: Plan) -> str:
    """A name for jobs, services and folders: small letters, digits and dashes, a letter first (RFC 1035, 1123)."""
    name = str(plan.model.get("model", "plan")).rpartition("/")[2].removesuffix(".py")
    found = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return (found if found[:1].isalpha() else f"plan-{found}")[:40].strip("-")


def refuse(tool: str, what: str, why: str, remedy: str = "") -> UserError:
    return UserError(f"{tool} cannot express {plain(what)}: {why}", remedy or "export to slurm, k8s or skypilot, which start foretell itself")


def only_on_foretell(plan: Plan) -> list[str]:
    """What no configuration of another trainer holds."""
    lost = []
    if plan.placement:
        lost.append("placement: which device each rank is on")
    if plan.states:
        lost.append("states: which blocks keep their optimizer states on the host")
    away = [pattern for pattern, residency in plan.blocks.items() if residency.mode in AWAY]
    if away:
        lost.append(f"blocks: activations of {', '.join(away)} are moved, which stay on the device here")
    if plan.weights:
        lost.append("weights: which blocks keep their weights on the host")
    if plan.adapters is not None:
        lost.append(f"adapters: {adapters_told(plan.adapters, plan.base)}, which your script must put on, by peft for instance")
    if plan.loss_chunks > 1:
        lost.append(f"loss_chunks: output layer and loss in {plan.loss_chunks} chunks of the tokens")
    if plan.sync is not None:
        lost.append(f"sync: replicas that step alone for {plan.sync.every} steps, and the outer optimizer that joins them")
    if plan.kernels:
        lost.append(f"kernels: {', '.join(f'{op} by {kernel}' for op, kernel in plan.kernels.items())}")
    if plan.split is not None and plan.split.rules:
        lost.append("split.rules: how each layer is split")
    return lost
