"""What prices the tasks of a rank: the machine it is on, the links that join it to others, the cores it shares.

A GPU and a CPU differ in these values alone. Ranks on one CPU share its cores: a rank with fewer threads takes longer for
ops that would have used all of them, and as long as before for those too small to be spread; gloo's messages pass through
memory on the same cores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from foretell.hardware.profile import Profile
from foretell.hardware.types import Cluster, Device
from foretell.lower.fsdp.sharded import DP_SHARD
from foretell.lower.offload.activations import COPIES, moves
from foretell.lower.sync import THROUGH_HUB
from foretell.plan.mesh import OWN_RANKS, groups, sharing, sharing_experts
from foretell.plan.types import Mesh, Plan
from foretell.price import offload
from foretell.price.bands import Evidence, factors
from foretell.price.calibrate.kin import kin_of
from foretell.price.heterogeneous import slowest_seen
from foretell.price.machine import machine
from foretell.price.network.collectives import (
    ALL_REDUCE,
    ALL_TO_ALL,
    P2P,
    Fabric,
    among,
    collective,
    fabric,
    slowest,
    wire_part,
)
from foretell.price.offload import CopyRates
from foretell.price.time import Machine, Reprice
from foretell.trace.types import Op, Trace

REDUCTION_AT_END_BYTES = 8
"""Loss and squared norm of the gradient, summed over all ranks once a step."""

Profiles = Callable[[str], Profile | None]
Seconds = Callable[[Op], float]


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to predict, besides what the plan says."""

    profile_of: Profiles = field(default=lambda _: None)
    """Device name → its profile, if there is one."""
    expandable: bool = False
    """The caching allocator grows segments."""
    pace: float = 1.0
    """How much longer this CPU takes now than its profile says."""
    filled: bool = False
    """Messages between ranks take no time, but for filling what is gathered, at the speed of memory."""


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """How long a rank takes for its ops and messages."""

    machine: Machine
    comm_time: Seconds = lambda _: 0.0
    """Of a collective."""
    p2p_time: Callable[[int], float] = lambda _: 0.0
    """Of a message of so many bytes between two ranks of a pipeline."""
    sync_time: float = 0.0
    """Of the reduction of loss and gradient norm over all ranks, once a step."""
    op_slowdown: Seconds | None = None
    """Factor on the seconds of an op; None: 1."""
    reprice: Reprice | None = None
    """Op, its family and its seconds → its seconds in other software; None: as they are."""
    each_longer: float = 0.0
    """Seconds that every op takes longer, such as the host's wait for it."""
    host_slowdown: float = 1.0
    """Factor on the seconds of the host."""
    drag: float = 1.0
    """Factor on how much compute slows down while a collective runs beside it."""
    slowdown: float = 1.0
    """Factor on everything."""
    alone: bool = True
    """One rank: nothing of a link is assumed."""
    copies: CopyRates | None = None
    """Of activations that are moved; None where nothing is, or its speed is not known."""

    def copies_priced(self, trace: Trace) -> bool:
        """Whether the copies of a step have a measured speed, or there are none."""
        return COPIES not in trace.meta or self.copies is not None

    def band(self, seen: Evidence | None = None) -> tuple[float, float]:
        """Factors on the predicted seconds of a step between which it is expected, by what was seen of it."""
        low, high = factors(replace(seen or Evidence(), device=self.machine.known_by, alone=self.alone, paced=self.slowdown != 1.0))
        return low * self.machine.spread[0], high * self.machine.spread[1]


def profile_for(cluster: Cluster, profile_of: Profiles) -> Profile | None:
    """Of the device, of its generation, or of its backend."""
    names = (cluster.device.name, *kin_of(cluster.device))
    return next((found for name in names if (found := profile_of(name)) is not None), None)


def speeds_of(plan: Plan, cluster: Cluster, how: Options, stage: int | None = None) -> Speeds | None:
    """Of a rank of a plan, or of a place of its pipeline; None where nothing is known of the device's speed."""
    seen = slowest_seen(plan, cluster, stage)
    known = machine(seen.device, profile_for(seen, how.profile_of))
    if known is None:
        return None
    if cluster.device.backend == "cpu":
        return _with_messages(_on_cpu(plan, cluster, known, how.pace), how, cluster.device)
    found = _with_messages(on_gpu(plan, cluster, known), how, cluster.device)
    return replace(found, copies=offload.copy_rates(profile_for(seen, how.profile_of), plan)) if moves(plan) else found


def _with_messages(found: Speeds, how: Options, device: Device) -> Speeds:
    """With messages that are filled in at once, where the options ask for that."""
    if not how.filled:
        return found
    rate = device.memory_bandwidth_bytes_per_second
    fill = lambda op: message(op) / rate if op.name.endswith("all_gather") else 0.0  # noqa: E731
    return replace(found, comm_time=fill, p2p_time=lambda _: 0.0, sync_time=0.0)


def alone(known: Machine) -> Speeds:
    """Of one rank that talks to nobody."""
    return Speeds(machine=known)


def on_gpu(plan: Plan, cluster: Cluster, known: Machine) -> Speeds:
    """Of a rank on devices that are not the host itself."""
    world = plan.together.world
    if plan.mesh.world == 1:
        return Speeds(machine=known)
    fabrics = fabrics_for(plan, cluster)
    link = fabrics.get("pp")
    return Speeds(
        machine=known, comm_time=comm_time_over(fabrics), alone=False,
        p2p_time=lambda nbytes: collective(P2P, nbytes, link).seconds if link is not None else 0.0,
        sync_time=collective(ALL_REDUCE, REDUCTION_AT_END_BYTES, fabric(cluster, world)).seconds,
    )  # fmt: skip


# ---------------------------------------------------------------------- links


def fabrics_of(mesh: Mesh, cluster: Cluster) -> dict[str, Fabric]:
    """Axis → what joins the ranks of its groups; `world` joins all."""
    found, stride = {}, 1
    for axis in reversed(OWN_RANKS):
        ranks = getattr(mesh, axis)
        if ranks > 1:
            found[axis] = fabric(cluster, ranks, stride=stride)
        stride *= ranks
    if mesh.cp > 1:
        found[DP_SHARD] = fabric(cluster, mesh.dp_shard * mesh.cp, stride=mesh.tp)
    if mesh.ep > 1:
        found["ep"] = fabric(cluster, mesh.ep, stride=mesh.tp * mesh.cp)
        found[f"{DP_SHARD}:{mesh.dp_shard // mesh.ep}"] = fabric(cluster, mesh.dp_shard // mesh.ep, stride=mesh.tp * mesh.cp * mesh.ep)
    if stride > 1:
        found["world"] = fabric(cluster, stride)
    return found


def fabrics_for(plan: Plan, cluster: Cluster) -> dict[str, Fabric]:
    """The same for a plan: where devices are unlike, measured or placed, by the slowest group of each axis. Parameters
    that are gathered again among fewer ranks have their own entry, `dp_shard:8`: those ranks are side by side."""
    mesh, fewer = plan.mesh, 0 if isinstance(plan.reshard, bool) else plan.reshard
    if plan.placement or cluster.groups or cluster.matrix is not None:
        found = {
            axis: slowest(among(cluster, map(plan.device_of, group)) for group in groups(mesh, axis))
            for axis in OWN_RANKS if getattr(mesh, axis) > 1
        }  # fmt: skip
        if mesh.ep > 1:
            found["ep"] = slowest(among(cluster, map(plan.device_of, group)) for group in sharing_experts(mesh))
        if mesh.cp > 1:
            found[DP_SHARD] = slowest(among(cluster, map(plan.device_of, group)) for group in sharing(mesh))
        if mesh.world > 1:
            found["world"] = among(cluster, map(plan.device_of, range(mesh.world)))
        pieces = [
            group[start : start + fewer] for group in sharing(mesh) for start in range(0, len(group), fewer or len(group))
        ]  # fmt: skip
        part = slowest(among(cluster, map(plan.device_of, piece)) for piece in pieces)
    else:
        found, part = fabrics_of(mesh, cluster), fabric(cluster, max(1, fewer), stride=mesh.tp)
    return found | ({f"{DP_SHARD}:{fewer}": part} if fewer > 1 else {})


def comm_time_over(fabrics: Mapping[str, Fabric]) -> Seconds:
    """Seconds of a collective by the links of its axis."""

    def seconds(op: Op) -> float:
        axis = axis_of(op)
        ranks = next((str(attr).removeprefix("ranks:") for attr in op.attrs if str(attr).startswith("ranks:")), "")
        group = fabrics.get(f"{axis}:{ranks}") or fabrics.get(axis)
        return collective(op.name.removeprefix("foretell."), message(op), group).seconds if group is not None else 0.0

    return seconds


def axis_of(op: Op) -> str:
    """The mesh axis of a collective."""
    return next(str(attr).removeprefix("axis:") for attr in op.attrs if str(attr).startswith("axis:"))


def message(op: Op) -> int:
    """The larger buffer of a collective, in bytes; where a hub has that of every rank on its own link, as much as makes an exchange of
    all with all carry the same."""
    largest = max(op.bytes_read, op.bytes_written)
    if THROUGH_HUB not in op.attrs:
        return largest
    ranks = int(next(str(attr).removeprefix("ranks:") for attr in op.attrs if str(attr).startswith("ranks:")))
    return largest * ranks * ranks // (ranks - 1)


# ---------------------------------------------------------------------- the cores of one machine

GRAIN = 32768
"""Elements below which torch does not spread an op over threads."""
SPREAD = 0.9
"""How much of another thread's time an op that is spread over it gains. Assumed: a 10M GPT's step took 0.33 s on two
threads of an idle Xeon and 0.77 s on one thread of a busy one."""
MESSAGE_SECONDS = 1.5e-3
"""Of any collective over gloo inside a step, before its bytes. Measured with two ranks on two cores of a Xeon: alone a
small one takes 0.2 to 0.5 ms, in a step 3 to 5 ms with 0.8 MB, since gloo's threads wait for the cores that compute."""
BYTES_PER_SECOND: Mapping[str, float] = {
    "all_gather": 0.6e9, "reduce_scatter": 0.5e9, "all_reduce": 0.5e9, "all_to_all": 0.6e9, "send": 0.8e9,
}  # fmt: skip
"""Of the larger buffer, inside a step. Measured there: 125 MB took 0.25 s of a 10M GPT's step; alone 0.8 to 1.6e9. That
of all_to_all is assumed to be a gather's."""

PROCESS_MESSAGES: Mapping[str, tuple[float, float]] = {"tcp": (0.1e-3, 1.6e8), "gloo": (1.5e-3, 1.5e9)}
"""Seconds before its bytes, and bytes a second, of a message between stages of a split (runtime.infer.links). Measured on a Xeon: over
TCP both ends sign what passes, at 0.35e9 bytes a second each; gloo's threads hear of a message when they next wake."""


CROSSINGS: Mapping[str, int] = {"all_to_all": 2, "all_gather": 2, "reduce_scatter": 2, "all_reduce": 4}
"""How often a collective of gloo's crosses a link one after the other: the receiver says that it is ready, then data comes. All but
all_to_all go round a ring and do so for every other rank. Measured between network namespaces 100 ms apart: 0.20 s, 0.20 s and 0.21 to
0.5 s for a few bytes among two, 0.20, 0.60 and 1.2 s among four."""
CARRIED = 0.965
"""Part of a link's rate that is left of it beside the headers of TCP and IP."""


def _on_cpu(plan: Plan, cluster: Cluster, known: Machine, pace: float) -> Speeds:
    ranks, cores = plan.mesh.world, cluster.device.sm_count
    if ranks == 1:
        return Speeds(machine=known, slowdown=pace)
    comm_time: Seconds = by_gloo
    sync_time = MESSAGE_SECONDS if plan.together.world > 1 else 0.0
    if far_apart(cluster):
        ranks = -(-ranks // cluster.nodes)
        fabrics = fabrics_of(plan.mesh, replace(cluster, devices_per_node=ranks))
        comm_time = gloo_over(fabrics, pace)
        across = plan.together.world > ranks
        sync_time += _over(ALL_REDUCE, REDUCTION_AT_END_BYTES, fabrics["world"]) / pace if across else 0.0
    return Speeds(
        machine=known, comm_time=comm_time, p2p_time=lambda nbytes: MESSAGE_SECONDS + nbytes / BYTES_PER_SECOND["send"],
        sync_time=sync_time, op_slowdown=_shared(ranks, cores) if ranks > 1 else None, host_slowdown=max(1.0, ranks / cores),
        slowdown=pace, alone=False,
    )  # fmt: skip


def far_apart(cluster: Cluster) -> bool:
    """Whether CPUs are of machines that a link which somebody named joins; else several ranks are on one machine."""
    return cluster.device.backend == "cpu" and cluster.nodes > 1 and cluster.inter is not None and cluster.link is not None


def gloo_over(fabrics: Mapping[str, Fabric], pace: float = 1.0) -> Seconds:
    """Seconds of a collective between machines: what it takes on one, and its way over the link. All of a CPU's seconds are multiplied
    by its pace, and the link knows nothing of that."""

    def seconds(op: Op) -> float:
        group = fabrics.get(axis_of(op)) or fabrics.get("world")
        return by_gloo(op) + (_over(op.name.removeprefix("foretell."), message(op), group) / pace if group is not None else 0.0)

    return seconds


def _over(operation: str, nbytes: int, group: Fabric) -> float:
    """What a collective spends on the link between machines."""
    if group.domains == 1 or group.inter is None:
        return 0.0
    turns = 1 if operation == ALL_TO_ALL else group.ranks - 1
    carried = CARRIED * group.network_bytes_per_second / group.local
    return CROSSINGS[operation] * turns * group.inter.latency_seconds + nbytes * wire_part(operation, group.ranks) / carried


def _shared(ranks: int, cores: int) -> Seconds:
    """How much longer an op takes on a rank's share of the cores than on all of them."""

    def factor(op: Op) -> float:
        spread = max((ref.spec.numel for ref in (*op.inputs, *op.outputs)), default=0) >= GRAIN
        return _gain(cores) / _gain(cores / ranks) if spread else max(1.0, ranks / cores)

    return factor


def _gain(threads: float) -> float:
    """How many times faster than on one thread an op that can be spread runs; below one thread, its share of a core."""
    return 1 + SPREAD * (threads - 1) if threads >= 1 else threads


def among_ranks(known: Machine, ranks: int, cores: int) -> Speeds:
    """Of one of several ranks on the cores of one machine, each with its part of the threads."""
    if ranks == 1:
        return alone(known)
    return Speeds(machine=known, op_slowdown=_shared(ranks, cores), host_slowdown=max(1.0, ranks / cores), alone=False)


def between_processes(over: str, nbytes: int) -> float:
    """Seconds of a message between two processes of one machine, from a tensor to a tensor."""
    start, rate = PROCESS_MESSAGES[over]
    return start + nbytes / rate


def by_gloo(op: Op) -> float:
    """Seconds of a collective on one machine."""
    return MESSAGE_SECONDS + message(op) / BYTES_PER_SECOND[op.name.removeprefix("foretell.")]
