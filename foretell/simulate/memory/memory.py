"""From a trace and a device to a verdict on memory, with who holds the bytes and how each number is known."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from foretell.hardware.overheads import Overhead
from foretell.hardware.types import Cluster
from foretell.lower.offload.activations import COPIES
from foretell.lower.offload.states import MOVED
from foretell.lower.steps import with_evaluation
from foretell.lower.sync import ROUND
from foretell.price.host import steady
from foretell.quantities import ASSUMED, COUNTED, FITS, NO, TIGHT, Holder, Memory, Phase
from foretell.simulate.memory.allocator import OutOfMemory
from foretell.simulate.memory.replay import SCRATCH, WORKSPACE, Curve, Moment, Replay, Sizes, holders_at
from foretell.trace import types
from foretell.trace.cuda.versions import doubt, of
from foretell.trace.doubts import memory_widening
from foretell.units import GIB, MIB

HOST_BASE_BYTES = int(1.6 * GIB)
"""Resident memory of a Python process with torch and CUDA up: one training run seen on an H200 host, torch 2.11."""
TIGHT_SHARE = 0.05
"""Less than this share of capacity to spare is called tight."""
RESERVED_BAND = 0.03
"""Reserved memory is expected within this share of the prediction: it held 46 of 52 rows measured on an H200."""
FITTED_BAND, FEW_FITTED = 0.06, 2
"""The same where the workspaces of more ops than so many (patches of pictures are one) follow fitted rules: of 74 steps with
convolutions 62 were inside, and 8 needed more."""
ALLOCATED_BAND = 0.01
"""The same for allocated memory: it held 51 of the 52 rows."""
CONTEXT_BAND_BYTES = 160 * MIB
"""Context and library modules varied by this much between models on one device."""

PROCESS_BYTES = 400 << 20
"""Resident memory of a Python process that has imported torch, made a step and joined a gloo group; measured with torch
2.13 on a Xeon, without the tensors."""
TIGHT_RAM_SHARE = 0.15
"""Less than this share of RAM to spare is called tight: other processes need some too. Assumed."""
CAREFUL_RAM_SHARE = 0.05
"""Share of RAM that a plan may not count on: other processes, pages the allocator keeps. Assumed."""
SPEAKS = frozenset(f"foretell.{name}" for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"))
"""Ops whose buffers gloo's threads hold."""

FITTED = "fitted"
"""In the meta of a trace whose ops are merged: how many of them are such as these."""
_FITTED = ("aten.convolution.default", "aten._cudnn_rnn.default")
_UNMEASURED = ("tp", "cp", "ep", "stages", "compiled")
"""In the meta of a rank's trace: ways to split, or to run, that no device was run against near its limit."""
LIMITS_TRIED = 4
STEPS_TRIED = 6
"""A sharded run that needs the allocator to free its cache fits only if it lasts so many steps under every one of so many
limits, from the careful one to the device's own. On an H200 one limit and three steps would have accepted 36 of 87 runs
and been wrong for 4; these were wrong for none of them, nor of 33 accepted afterwards (benchmarks/sharded.py --limits)."""

CATEGORY = {
    types.PARAMETER: "parameters", types.GRADIENT: "gradients", types.OPTIMIZER: "optimizer",
    types.ACTIVATION: "activations", types.LOGITS: "logits", types.TEMPORARY: "temporaries",
    types.BUFFER: "parameters", types.INPUT: "inputs", SCRATCH: "temporaries", WORKSPACE: "workspace",
    types.COMMUNICATION: "communication", types.GATHERED: "gathered",
}  # fmt: skip


@dataclass(frozen=True)
class MemoryOutcome:
    """The memory numbers and the verdict they lead to."""

    verdict: str
    memory: Memory


def predict_memory(
    trace: types.Trace, cluster: Cluster, overhead: Overhead, *, expandable: bool = False, ranks: int = 1
) -> MemoryOutcome:
    """Replay the trace on one device of the cluster: peaks, verdict, owners of the peak. `ranks` share it if it is a CPU."""
    if cluster.device.backend == "cpu":
        return in_ram(trace, cluster.device.memory_bytes // ranks)
    sizes = sizes_for(cluster, overhead)
    schedules = run_order(trace)
    replay = Replay(with_evaluation(trace), sizes, expandable=expandable)
    phases, highest = _phases(replay, schedules, overhead.context_bytes + overhead.nccl_for(cluster))
    allocated, reserved = replay.allocator.peak_allocated, replay.allocator.peak_reserved
    beside = overhead.context_bytes + overhead.nccl_for(cluster)
    capacity = cluster.device.memory_bytes
    reached = highest is not None and highest.allocated >= allocated
    owners = replay.holders_then(highest) if reached and highest else holders_at(trace, sizes, schedules, allocated)[0]
    verdict, device_bytes = _verdict(trace, sizes, schedules, capacity, beside, reserved, expandable)
    reserved = min(reserved, device_bytes - beside)
    host = max(phase.host_bytes for phase in phases)
    memory = Memory(
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        device_bytes=device_bytes,
        capacity_bytes=capacity,
        margin_bytes=capacity - device_bytes,
        host_bytes=host,
        bands=_bands(allocated, reserved, device_bytes, host, memory_widening(trace.meta), reserved_band(fitted_ops(trace))),
        categories=_categories(owners, allocated),
        holders=_holders(owners),
        phases=phases,
        provenance=_provenance(trace, overhead),
    )
    return MemoryOutcome(verdict, memory)


def in_ram(trace: types.Trace, capacity: int) -> MemoryOutcome:
    """The same of a process on a CPU, in its share of the machine's memory."""
    sizes, names = Sizes((0, 0), 0, live=True), list(dict.fromkeys(run_order(trace)))
    replay = Replay(trace, sizes)
    replay.start()
    for name in names:
        replay.run(name)
    peak = replay.allocator.peak_allocated
    owners, _ = holders_at(trace, sizes, names, peak)
    late = _late(trace)
    used = peak + late + PROCESS_BYTES
    spare = capacity - used
    verdict = NO if spare < CAREFUL_RAM_SHARE * capacity else TIGHT if spare < TIGHT_RAM_SHARE * capacity else FITS
    if verdict == NO:
        used = max(used, capacity + 1)
    memory = Memory(
        allocated_bytes=peak, reserved_bytes=peak, device_bytes=used, capacity_bytes=capacity, margin_bytes=capacity - used,
        host_bytes=used, bands={"allocated_bytes": (int(peak * 0.97), int(peak * 1.1) + late)},
        categories=_categories(owners, peak), holders=_holders(owners),
        phases=(Phase(name=names[-1], allocated_bytes=peak, reserved_bytes=peak, device_bytes=used, host_bytes=used),),
        provenance={
            "allocated_bytes": f"{COUNTED}: storages of the traced step, without the scratch of CPU kernels",
            "device_bytes": f"{ASSUMED}: a process of {PROCESS_BYTES >> 20} MiB and its tensors, in a share of the RAM"
            + (", and buffers that gloo's threads let go late" if late else ""),
        },
    )  # fmt: skip
    return MemoryOutcome(verdict, memory)


def _late(trace: types.Trace) -> int:
    """Bytes that may still be alive after their last use: gloo's own threads hold the buffers of a message until they run again,
    and on cores that compute that may be a whole pass later. Two ranks on two cores had 2.3 to 3.6 MB where 2.68 was said
    without, and 5.2 to 6.3 where 4.62 was."""
    passes = {name for name, _ in steady(trace)}
    return max(sum(max(op.bytes_read, op.bytes_written) for op in trace.programs[name].ops if op.name in SPEAKS) for name in passes)


def sizes_for(cluster: Cluster, overhead: Overhead) -> Sizes:
    if cluster.device.backend == "cpu":
        return Sizes((0, 0), 0, live=True)
    return Sizes(cluster.device.compute_capability or (9, 0), overhead.cublas_workspace_bytes)


def run_order(trace: types.Trace) -> list[str]:
    """The first step makes optimizer state; two more let the allocator's cache settle, with a round between where replicas have them."""
    if "first_step" not in trace.schedule:
        return ["evaluation"] * 2
    return ["first_step", "steady_step", *([ROUND] if ROUND in trace.schedule else []), "steady_step"]


def smallest_limit(trace: types.Trace, sizes: Sizes, schedules: list[str], *, expandable: bool = False) -> int:
    """The least memory the allocator can work in, freeing its cache where it must; to two percent, upper side."""
    names = list(dict.fromkeys(schedules))
    plain = Replay(trace, sizes, expandable=expandable)
    plain.start()
    for name in names:
        plain.run(name)
    low, high = plain.allocator.peak_allocated, plain.allocator.peak_reserved
    while high - low > max(2 * MIB, high // 50):
        middle = (low + high) // 2
        if fits_in(trace, sizes, names, middle, expandable=expandable):
            high = middle
        else:
            low = middle
    return high


def fits_in(
    trace: types.Trace, sizes: Sizes, schedules: list[str], limit: int, *, expandable: bool = False
) -> bool:
    """Whether the run gets through with this much memory for the allocator, its retries included."""
    replay = Replay(trace, sizes, limit=limit, expandable=expandable)
    state: object = None
    try:
        replay.start()
        for number, name in enumerate(schedules):
            replay.run(name)
            before, state = state, replay.state()
            if state == before and {name} >= {*schedules[number:]}:  # it has come back to where it was, and would again
                break
    except OutOfMemory:
        return False
    return True


def _verdict(
    trace: types.Trace, sizes: Sizes, schedules: list[str], capacity: int, beside: int, reserved: int, expandable: bool
) -> tuple[str, int]:
    """Fits if it fits with the uncertainty taken off the limit; device bytes are what it would then use.

    Near the limit the allocator gives cached segments back and tries again, so that it may get through with less
    than it would reserve on a larger device: the replay decides, not the peak. Sharded runs are less regular: a little
    more memory may end one that a little less did not, so several limits are tried. Where parts of the rules are fitted,
    what is free between two segments is not known well enough for that, and the peak decides.
    """
    careful = careful_limit(trace, capacity, beside)
    if reserved <= careful:
        device = reserved + beside
        return (TIGHT if capacity - device < tight_share(trace) * capacity else FITS), device
    least = reserved
    if not _fitted(trace):
        if careful > 0 and _lasts(trace, sizes, schedules, careful, capacity - beside, expandable):
            return TIGHT, min(reserved, careful) + beside
        smallest = smallest_limit(trace, sizes, schedules, expandable=expandable)
        least = smallest if smallest > careful else reserved
    return NO, max(least + beside, capacity + max(1, least - careful))


def _lasts(trace: types.Trace, sizes: Sizes, schedules: list[str], careful: int, whole: int, expandable: bool) -> bool:
    """Whether the run gets through with the careful limit; if it is sharded, with every limit up to the whole, for longer."""
    limits, names = [careful], schedules
    if "ranks" in trace.meta:
        limits = [careful + (whole - careful) * part // (LIMITS_TRIED - 1) for part in range(LIMITS_TRIED)]
        names = [*schedules, *schedules[-1:] * (STEPS_TRIED - len(schedules))]
    return all(fits_in(trace, sizes, names, limit, expandable=expandable) for limit in limits)


def used_of(trace: types.Trace, sizes: Sizes, capacity: int, beside: int, *, expandable: bool = False) -> tuple[int, int]:
    """Bytes that the allocator reserves on a device, its cache given back where it must, and that are allocated; above the careful
    limit where the run does not get through. The same as `predict_memory` decides by."""
    schedules = run_order(trace)
    replay = Replay(trace, sizes, expandable=expandable)
    replay.start()
    for name in schedules:
        replay.run(name)
    reserved, allocated = replay.allocator.peak_reserved, replay.allocator.peak_allocated
    careful = careful_limit(trace, capacity, beside)
    hopes = allocated <= careful < reserved and not _fitted(trace)
    lasts = hopes and _lasts(trace, sizes, schedules, careful, capacity - beside, expandable)
    return careful if lasts else reserved, allocated


def careful_limit(trace: types.Trace, capacity: int, beside: int) -> int:
    """What the allocator may use if the prediction is to hold: the limit less what it is uncertain by.

    Half of the band of reserved memory; all of it where several ranks' streams are involved or activations are moved (which reserved up
    to 1.1 % more than was said), and the wider band where parts of the
    rules are fitted rather than known (workspaces of convolutions and recurrent layers); twice where states are moved, which
    reserved up to 5 % more than was said. All that twice under a release of torch that was not checked,
    and four times where sizes hang on what data chooses.
    """
    share = careful_share(fitted_ops(trace), split="ranks" in trace.meta or COPIES in trace.meta or _fitted(trace), moved=MOVED in trace.meta)
    wider = memory_widening(trace.meta)
    return int((capacity - beside - CONTEXT_BAND_BYTES // 4 * wider) * (1 - share * wider))


def careful_share(fitted: int, *, split: bool, moved: bool) -> float:
    """The share of a limit that a prediction of reserved memory may be off by."""
    return max(reserved_band(fitted) if fitted else 0, 2 * RESERVED_BAND if moved else RESERVED_BAND if split else RESERVED_BAND / 2)


def tight_share(trace: types.Trace) -> float:
    """Share of capacity below which what is to spare is called tight."""
    return TIGHT_SHARE * memory_widening(trace.meta)


def _fitted(trace: types.Trace) -> bool:
    """Whether parts of the rules are fitted, or the run is split in a way not measured near a limit; FSDP2 alone was."""
    ranks = trace.meta.get("ranks")
    split = ranks is not None and (ranks != trace.meta.get("shards") or any(name in trace.meta for name in _UNMEASURED))
    return split or MOVED in trace.meta or fitted_ops(trace) > 0


def fitted_ops(trace: types.Trace) -> int:
    """How many ops have a workspace that follows a rule that was fitted; a trace of merged ops says so itself."""
    said = trace.meta.get(FITTED)
    return said if isinstance(said, int) else sum(op.name in _FITTED for op in trace.ops())


def reserved_band(fitted: int) -> float:
    """The share of the prediction that reserved memory is expected within."""
    return FITTED_BAND if fitted > FEW_FITTED else RESERVED_BAND


def _phases(replay: Replay, schedules: list[str], beside: int) -> tuple[tuple[Phase, ...], Moment | None]:
    """The phases of a run, and where its steps first allocate most."""
    trace, allocator = replay.trace, replay.allocator
    weights = sum(
        trace.storages[number].nbytes
        for number in trace.resident
        if trace.storages[number].role in (types.PARAMETER, types.BUFFER)
    )
    found: list[Phase] = []
    curve = Curve(replay)

    def note(name: str, host: int) -> None:
        found.append(
            Phase(
                name=name,
                allocated_bytes=allocator.peak_allocated,
                reserved_bytes=allocator.peak_reserved,
                device_bytes=allocator.peak_reserved + beside,
                host_bytes=host,
                timeline=curve.take(),
            )
        )

    replay.start()
    note("init", HOST_BASE_BYTES + weights)
    for name in dict.fromkeys(schedules):
        allocator.reset_peaks()
        for _ in range(schedules.count(name)):
            curve.points.clear()
            replay.run(name)
        note(name, HOST_BASE_BYTES)
    highest = curve.highest
    if "evaluation" in trace.schedule and "evaluation" not in schedules:
        allocator.reset_peaks()
        replay.run("evaluation")
        note("evaluation", HOST_BASE_BYTES)
    state = sum(s.nbytes for s in trace.storages.values() if s.role == types.OPTIMIZER)
    largest = max((trace.storages[number].nbytes for number in trace.resident), default=0)
    allocator.reset_peaks()
    note("save", HOST_BASE_BYTES + largest)
    note("load", HOST_BASE_BYTES + weights + state)
    allocator.peak_allocated = max(phase.allocated_bytes for phase in found)
    allocator.peak_reserved = max(phase.reserved_bytes for phase in found)
    return tuple(found), highest


def _bands(allocated: int, reserved: int, device: int, host: int, wider: float, of_reserved: float) -> dict[str, tuple[int, int]]:
    def around(value: int, share: float, beside: int = 0) -> tuple[int, int]:
        return int(value * (1 - share * wider) - beside * wider), int(value * (1 + share * wider) + beside * wider)

    return {
        "allocated_bytes": around(allocated, ALLOCATED_BAND),
        "reserved_bytes": around(reserved, of_reserved),
        "device_bytes": around(device, of_reserved, CONTEXT_BAND_BYTES),
        "host_bytes": around(host, 0.25),
    }


def _categories(owners: Mapping[tuple[str, str], int], allocated: int) -> dict[str, int]:
    """Bytes by what they are for; rounding and unsplit rests of blocks go with the temporaries."""
    found: dict[str, int] = {}
    for (role, _), nbytes in owners.items():
        category = CATEGORY[role]
        found[category] = found.get(category, 0) + nbytes
    found["temporaries"] = found.get("temporaries", 0) + max(0, allocated - sum(found.values()))
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _holders(owners: Mapping[tuple[str, str], int], limit: int = 12) -> tuple[Holder, ...]:
    """Largest holders, repeated blocks added up: `blocks.3.mlp` and `blocks.4.mlp` are `blocks.*.mlp`."""
    found: dict[tuple[str, str], int] = {}
    for (role, module), nbytes in owners.items():
        key = (re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", module), CATEGORY[role])
        found[key] = found.get(key, 0) + nbytes
    top = sorted(found.items(), key=lambda item: -item[1])[:limit]
    return tuple(Holder(name=name or category, category=category, bytes=nbytes) for (name, category), nbytes in top)


def _provenance(trace: types.Trace, overhead: Overhead) -> dict[str, str]:
    unsure = f"; {note}" if (note := doubt(of(trace.meta))) else ""
    context = overhead.provenance.get("context_bytes", ASSUMED)
    return {
        "allocated_bytes": f"{COUNTED}: storages of the traced step, op scratch by rules measured on an H200{unsure}",
        "reserved_bytes": f"{COUNTED}: the trace replayed through a simulation of PyTorch's caching allocator",
        "device_bytes": f"{context}: reserved plus CUDA context and libraries ({overhead.sources.get('context_bytes', '')})",
        "capacity_bytes": "what torch reports as total memory of the device",
        "host_bytes": f"{ASSUMED}: weights built on the host and moved, a process of 1.6 GiB (one run, one host)",
        "categories": f"{COUNTED}: storages alive at the highest point of allocated memory",
    }
