"""Plans on the CPU of one machine: bytes are live tensors and processes in RAM, seconds come from its profile.

Ranks on one CPU share its cores and its memory. A rank with fewer threads takes longer for ops that would have used
all of them, and as long as before for those too small to be spread: that, and Python's own time, is what several ranks
win; they pay for gloo's messages, which pass through memory on the same cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from foretell.cost.machine import machine
from foretell.cost.memory import Outcome, _categories, _holders
from foretell.cost.plan_time import Seconds, as_time, message, tasks_of
from foretell.cost.prediction import ASSUMED, COUNTED, FITS, NO, TIGHT, Memory, Phase, Time
from foretell.cost.streams import HOST, Task, simulate
from foretell.hardware.profile import Profile
from foretell.hardware.types import Cluster
from foretell.plan.types import Plan
from foretell.trace.types import Op, Trace

PROCESS_BYTES = 400 << 20
"""Resident memory of a Python process that has imported torch, made a step and joined a gloo group; measured with torch
2.13 on a Xeon, without the tensors."""
TIGHT_SHARE = 0.15
"""Less than this share of RAM to spare is called tight: other processes need some too. Assumed."""
CAREFUL_SHARE = 0.05
"""Share of RAM that a plan may not count on: other processes, pages the allocator keeps. Assumed."""
GRAIN = 32768
"""Elements below which torch does not spread an op over threads."""
SPREAD = 0.9
"""How much of another thread's time an op that is spread over it gains. Assumed: a 10M GPT's step took 0.33 s on two
threads of an idle Xeon and 0.77 s on one thread of a busy one."""
BAND = (0.6, 1.6)
"""Between which factors of the prediction steps of several ranks on one CPU are expected: assumed."""
MESSAGE_SECONDS = 1.5e-3
"""Of any collective over gloo inside a step, before its bytes. Measured with two ranks on two cores of a Xeon: alone a
small one takes 0.2 to 0.5 ms, in a step 3 to 5 ms with 0.8 MB, since gloo's threads wait for the cores that compute."""
BYTES_PER_SECOND: Mapping[str, float] = {
    "all_gather": 0.6e9, "reduce_scatter": 0.5e9, "all_reduce": 0.5e9, "all_to_all": 0.6e9, "send": 0.8e9,
}  # fmt: skip
"""Of the larger buffer, inside a step. Measured there: 125 MB took 0.25 s of a 10M GPT's step; alone 0.8 to 1.6e9. That
of all_to_all is assumed to be a gather's."""


def predict_memory(local: Trace, plan: Plan, cluster: Cluster) -> Outcome:
    """Live bytes of one rank and its process; all ranks share the machine's RAM."""
    peak, owners = _peak(local)
    ranks = plan.mesh.world
    capacity = cluster.device.memory_bytes // ranks
    late = _late(local)
    device = peak + late + PROCESS_BYTES
    spare = capacity - device
    verdict = NO if spare < CAREFUL_SHARE * capacity else TIGHT if spare < TIGHT_SHARE * capacity else FITS
    if verdict == NO:
        device = max(device, capacity + 1)
    memory = Memory(
        allocated_bytes=peak, reserved_bytes=peak, device_bytes=device, capacity_bytes=capacity,
        margin_bytes=capacity - device, host_bytes=device,
        bands={"allocated_bytes": (int(peak * 0.97), int(peak * 1.1) + late)},
        categories=_categories(owners, peak), holders=_holders(owners),
        phases=(
            Phase(name="steady_step", allocated_bytes=peak, reserved_bytes=peak, device_bytes=device, host_bytes=device),
        ),
        provenance={
            "allocated_bytes": f"{COUNTED}: storages of the traced step, without the scratch of CPU kernels",
            "device_bytes": f"{ASSUMED}: a process of {PROCESS_BYTES >> 20} MiB and its tensors, in a share of the RAM"
            + (", and buffers that gloo's threads let go late" if late else ""),
        },
    )  # fmt: skip
    return Outcome(verdict, memory)


def _late(trace: Trace) -> int:
    """Bytes that may still be alive after their last use: gloo's own threads hold the buffers of a message until they run again,
    and on cores that compute that may be a whole pass later. Two ranks on two cores had 2.3 to 3.6 MB where 2.68 was said
    without, and 5.2 to 6.3 where 4.62 was."""
    passes = {name for name, _ in trace.schedule["steady_step"]}
    return max(sum(message(op) for op in trace.programs[name].ops if _speaks(op)) for name in passes)


def _speaks(op: Op) -> bool:
    return op.name.startswith("foretell.") and op.name.removeprefix("foretell.") in BYTES_PER_SECOND


def _peak(trace: Trace) -> tuple[int, dict[tuple[str, str], int]]:
    """Highest live bytes and who holds them."""
    sizes = {number: storage.nbytes for number, storage in trace.storages.items()}
    alive = dict.fromkeys(trace.resident)
    live = peak = sum(sizes[number] for number in alive)
    at_peak = set(alive)
    for run in ("first_step", "steady_step"):
        for name, times in trace.schedule[run]:
            for _ in range(times):
                for op in trace.programs[name].ops:
                    for number in op.allocates:
                        if number not in alive:
                            alive[number] = None
                            live += sizes[number]
                    if live > peak:
                        peak, at_peak = live, set(alive)
                    for number in op.frees:
                        if number in alive:
                            del alive[number]
                            live -= sizes[number]
    owners: dict[tuple[str, str], int] = {}
    for number in at_peak:
        storage = trace.storages[number]
        owners[storage.role, storage.module] = owners.get((storage.role, storage.module), 0) + storage.nbytes
    return peak, owners


def predict_time(local: Trace, plan: Plan, cluster: Cluster, profile: Profile | None, pace: float) -> Time | None:
    """Seconds of a steady step; `pace` says how much longer the machine takes now than its profile says."""
    known = machine(cluster.device, profile)
    if known is None:
        return None
    ranks, cores = plan.mesh.world, cluster.device.sm_count
    tasks = list(tasks_of(local, local.schedule["steady_step"], known, talk, slower(plan, cluster)))
    if ranks > cores:
        tasks = [task._replace(host_seconds=task.host_seconds * ranks / cores) for task in tasks]
    if ranks > 1:
        tasks.append(Task("foretell.all_reduce", HOST, MESSAGE_SECONDS, (), 0.0, "all_reduce", "", "update"))
    found = as_time(simulate(tasks), tasks, known)
    low, high = BAND if ranks > 1 else (found.low_seconds / found.step_seconds, found.high_seconds / found.step_seconds)
    seconds = found.step_seconds * pace
    return replace(
        found, step_seconds=seconds, low_seconds=seconds * low, high_seconds=seconds * high,
        breakdown={name: value * pace for name, value in found.breakdown.items()},
        phases={name: value * pace for name, value in found.phases.items()},
        provenance=ASSUMED if ranks > 1 else found.provenance,
    )  # fmt: skip


def slower(plan: Plan, cluster: Cluster) -> Seconds | None:
    """How much longer an op takes on a rank's share of the cores than on all of them; None with one rank."""
    ranks, cores = plan.mesh.world, cluster.device.sm_count
    if ranks == 1:
        return None

    def factor(op: Op) -> float:
        spread = max((ref.spec.numel for ref in (*op.inputs, *op.outputs)), default=0) >= GRAIN
        return _gain(cores) / _gain(cores / ranks) if spread else max(1.0, ranks / cores)

    return factor


def _gain(threads: float) -> float:
    """How many times faster than on one thread an op that can be spread runs; below one thread, its share of a core."""
    return 1 + SPREAD * (threads - 1) if threads >= 1 else threads


def talk(op: Op) -> float:
    """Seconds of a collective over gloo on one machine."""
    kind = op.name.removeprefix("foretell.")
    return MESSAGE_SECONDS + message(op) / BYTES_PER_SECOND[kind]


def message_seconds(nbytes: int) -> float:
    """Seconds of one message from rank to rank."""
    return MESSAGE_SECONDS + nbytes / BYTES_PER_SECOND["send"]
