"""A followed script, costed: its trace, what it does, and what that costs on a device. The path is that of every plan.

    words ─► follow ─► Followed ─► cost ─► PlanCost          follow again with other arguments, or with a change to its model,
                                                              for what would have made it fit (`script_ways`)
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from foretell.errors import UserError
from foretell.hardware import overhead
from foretell.hardware.lookup import find_profile
from foretell.hardware.profile import Profile
from foretell.hardware.types import Cluster
from foretell.lower.blocks import KEEP, blocks_of
from foretell.lower.spread import mesh_told
from foretell.plan.default import default_plan, mode_of
from foretell.plan.types import Plan
from foretell.simulate.memory.memory import PROCESS_BYTES
from foretell.simulate.parts import TORCH, PlanCost
from foretell.simulate.plan import Options, predict_plan
from foretell.trace.recipe import Recipe
from foretell.trace.record.collection import no_collection
from foretell.trace.sandbox.process import TIME_LIMIT
from foretell.trace.script.child import WORKER
from foretell.trace.script.several import follow_ranks
from foretell.trace.script.words import ScriptCommand, over
from foretell.trace.types import Trace


@dataclass(frozen=True, kw_only=True)
class Followed:
    """One step of a script, or of a module."""

    name: str
    """The command, or the class of the module."""
    trace: Trace = field(repr=False)
    recipe: Recipe
    micro_batch: int
    notes: tuple[str, ...] = ()
    script: ScriptCommand | None = None
    world: int = 1
    """Processes of its group."""
    last: Followed | None = None
    """The step of the last of them, where it is another one."""


def capability_of(cluster: Cluster) -> tuple[int, int] | None:
    return None if cluster.device.backend == "cpu" else cluster.device.compute_capability or (9, 0)


def make_ready() -> None:
    """Start the process that scripts are followed in, while something else is looked up."""
    from foretell.trace.sandbox import server

    server.ready(WORKER)


def follow(
    script: ScriptCommand, cluster: Cluster, *, change: Mapping[str, Any] | None = None, hints: Mapping[str, float] | None = None,
    time_limit: float = TIME_LIMIT,
) -> Followed:  # fmt: skip
    """The script's first step on fake tensors, as the device runs it; what it writes is gone afterwards."""
    script = _counted(script, cluster)
    replies = follow_ranks(
        script, capability_of(cluster), hints or {}, False, devices=None, name=cluster.device.name, time_limit=time_limit, change=change
    )
    seats(cluster, int(replies[0][1]["world"]), script.name)
    first, *others = [_of_reply(script, trace, reply) for trace, reply in replies]
    return replace(first, last=others[0]) if others and others[0].trace != first.trace else first


def _of_reply(script: ScriptCommand, trace: Trace, reply: Mapping[str, Any]) -> Followed:
    recipe = Recipe.from_json(trace.meta["recipe"])  # type: ignore[arg-type]
    return Followed(
        name=script.text, trace=trace, recipe=recipe, micro_batch=int(reply["micro_batch"]), notes=tuple(reply["notes"]), script=script,
        world=int(reply["world"]),
    )  # fmt: skip


def _counted(script: ScriptCommand, cluster: Cluster) -> ScriptCommand:
    """With the number of its processes, which may be that of the devices; any number of them runs on a CPU."""
    if cluster.device.backend != "cpu":
        return over(script, cluster.nodes, cluster.devices_per_node, cluster.device.name)
    if script.nodes > 1:
        raise UserError("nothing is known of what joins the CPUs of several nodes", "one node, or --on a GPU and its number")
    each = script.ranks_per_node or (os.cpu_count() or 1)
    return replace(script, ranks=script.nodes * each, ranks_per_node=each)


def seats(cluster: Cluster, world: int, name: str) -> Cluster:
    """The devices that a group of processes has: one each."""
    if cluster.device.backend == "cpu":
        return replace(cluster, nodes=1, devices_per_node=world, groups=(), matrix=None)
    if world > cluster.count:
        device = cluster.device.name
        raise UserError(f"{name} forms a group of {world} processes, and {device} is there {cluster.count} times", f"--on {device}:{world}")
    return replace(cluster, nodes=1, devices_per_node=1, groups=(), matrix=None) if world == 1 else cluster


def plan_of(name: str, recipe: Recipe, on: str, micro_batch: int, blocks: Sequence[str] = ()) -> Plan:
    """The plan that a script stands for, so that its runs are read as all others are."""
    return default_plan(recipe, {"model": name, **({"blocks": list(blocks)} if blocks else {})}, on, micro_batch=micro_batch, blocks=blocks)


def cost(step: Followed, cluster: Cluster, on: str, *, expandable: bool = False) -> PlanCost:
    """What its step costs there, of the rank that needs most; the plan in it says what was predicted."""
    found = [_cost(one, seats(cluster, step.world, step.name), on, expandable) for one in (step, step.last) if one is not None]
    return max(found, key=lambda one: one.worst.memory.device_bytes)


def _cost(step: Followed, cluster: Cluster, on: str, expandable: bool) -> PlanCost:
    blocks = blocks_of(step.trace)
    plan = plan_of(step.name, step.recipe, on, step.micro_batch, blocks).with_(**mesh_told(step.trace))
    with no_collection():
        how = Options(profile_of=profile_here(cluster), expandable=expandable)
        found = predict_plan({mode_of(step.recipe) if blocks else KEEP: step.trace}, plan, cluster, how)
    memory = found.worst.memory
    said: dict[str, Any] = {**found.predicted(), "device": cluster.device.name, "bands": dict(memory.bands)}
    said |= {"phases": dict(found.time.phases)} if found.time else {}
    return replace(found, plan=plan.with_(predicted=said))


def profile_here(cluster: Cluster) -> Any:
    """Device name → its profile. A CPU's own alone: one of another CPU says nothing of this one's seconds."""
    if cluster.device.backend != "cpu":
        return find_profile
    from foretell.hardware.this_machine import cpu_name

    name_here = cpu_name()

    def own(name: str) -> Profile | None:
        found = find_profile(name, reported_as=name_here)
        return found if found is not None and found.reported_as == name_here else None

    return own


def with_room(cluster: Cluster, allocator_bytes: int) -> Cluster:
    """The device with as much memory as lets its allocator, or the tensors of a process, hold so many bytes."""
    if cluster.device.backend == "cpu":
        return replace(cluster, device=cluster.device.with_memory(allocator_bytes + PROCESS_BYTES, "what the script may hold"))
    beside = overhead(cluster.device, TORCH)
    whole = allocator_bytes + beside.context_bytes
    nominal = max(cluster.device.memory_nominal_bytes, whole)
    device = replace(cluster.device, memory_nominal_bytes=nominal).with_memory(whole, "what the script may hold")
    return replace(cluster, device=device)
