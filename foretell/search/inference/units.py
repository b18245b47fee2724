"""What `search.inference.split` splits, from a model and a cluster: units of an inference trace, seconds of each on each device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from foretell.errors import UserError
from foretell.hardware import overhead
from foretell.hardware.profile import Profile
from foretell.hardware.types import Cluster, Device
from foretell.lower.blocks import blocks_of
from foretell.lower.fsdp.sharded import block_of
from foretell.price.host import steady
from foretell.price.machine import machine
from foretell.price.network.collectives import P2P, among, collective
from foretell.price.speeds import Speeds, among_ranks, between_processes, profile_for
from foretell.price.time import Machine
from foretell.quantities import ASSUMED, MEASURED
from foretell.search.inference.split import InferenceSplit, InferenceUnit, Place, split_front
from foretell.simulate.memory.replay import peak_live
from foretell.simulate.parts import TORCH
from foretell.simulate.time.step import tasks_of
from foretell.simulate.time.streams import simulate
from foretell.trace.load.model import Source
from foretell.trace.load.model import check as check_source
from foretell.trace.recipe import Recipe
from foretell.trace.sandbox.child import request
from foretell.trace.sandbox.process import TIME_LIMIT
from foretell.trace.store.traces import traced
from foretell.trace.types import BUFFER, INPUT, PARAMETER, Op, Program, Trace

DEPTH = 2
"""Names of modules that make a unit where a model has no repeated blocks: `layer1.0` of `layer1.0.conv1`."""
MOST_DEVICES = 64


@dataclass(frozen=True, kw_only=True)
class InferPlan:
    """Splits of a model over the devices of a cluster."""

    front: tuple[InferenceSplit, ...]
    """None beaten by another; empty where nothing fits."""
    units: tuple[str, ...]
    devices: tuple[str, ...]
    """By number."""
    samples: int
    """Of one request."""
    provenance: str
    notes: tuple[str, ...] = ()

    @property
    def quickest(self) -> InferenceSplit | None:
        """With the lowest latency."""
        return min(self.front, key=lambda split: (split.latency_seconds, split.slowest_seconds), default=None)

    @property
    def busiest(self) -> InferenceSplit | None:
        """With the most requests a second."""
        return min(self.front, key=lambda split: (split.slowest_seconds, split.latency_seconds), default=None)

    @property
    def leanest(self) -> InferenceSplit | None:
        """With the most memory to spare."""
        return min(self.front, key=lambda split: (split.fullest, split.latency_seconds), default=None)


def infer_plan(
    source: Source, cluster: Cluster, *, precision: str = "bf16", profile_of: Callable[[str], Profile | None],
    cache: bool = True, time_limit: float = TIME_LIMIT, over: str = "tcp",
) -> InferPlan:  # fmt: skip
    """The front of splits of a model over a cluster's devices. Nothing is run: one request is traced on fake tensors. `over`: what stages on
    CPUs of one machine talk over."""
    check_source(source)
    if cluster.count > MOST_DEVICES:
        raise UserError(f"{cluster.count} devices to split one request over", f"at most {MOST_DEVICES}")
    traces = {
        kind: inference_trace(source, precision, capability, cache, time_limit)
        for kind, capability in _capabilities(cluster).items()
    }
    return plan_from(traces, cluster, profile_of, source.micro_batch, over)


def inference_trace(
    source: Source, precision: str, capability: tuple[int, int] | None, cache: bool = True, time_limit: float = TIME_LIMIT
) -> Trace:
    """One forward without gradients, as a device of that capability (None: a CPU) runs it."""
    recipe = Recipe(precision=precision, mode="infer")
    asked = request(source, recipe, capability or (), {})
    return traced(asked, cache=cache, time_limit=time_limit)[0]


def plan_from(
    traces: Mapping[str, Trace], cluster: Cluster, profile_of: Callable[[str], Profile | None], samples: int, over: str = "tcp"
) -> InferPlan:
    """The same from traces: kind of device (cpu or gpu) → what it runs."""
    devices = [cluster.part_of(rank).device for rank in range(cluster.count)]
    runs = {kind: _runs(trace) for kind, trace in traces.items()}
    names = [name for name, _ in next(iter(runs.values()))]
    notes = list(cluster.notes)
    main = next(iter(traces))
    for kind, found in list(runs.items()):
        if [name for name, _ in found] != names:
            notes.append(f"a {kind} runs the model in other pieces; what a {main} runs is taken for it")
            runs[kind] = runs[main]
    seconds: dict[tuple[str, int], list[float]] = {}
    kinds = [(device.name, ranks) for device, ranks in zip(devices, _together(cluster, devices), strict=True)]
    provenance = MEASURED if cluster.matrix is not None or cluster.count == 1 else ASSUMED
    for key, device in dict(zip(kinds, devices, strict=True)).items():
        known = _machine(device, cluster, profile_of)
        notes += [note for note in known.notes if note not in notes]
        provenance = provenance if known.provenance == MEASURED else ASSUMED
        kind = _kind(device) if runs[_kind(device)] is not runs[main] else main
        seconds[key] = unit_seconds(traces[kind], [ops for _, ops in runs[kind]], among_ranks(known, key[1], device.sm_count))
    units = units_of(traces[main], runs[main], [seconds[key] for key in kinds])
    front = split_front(units, _places(cluster, devices), _links(cluster, over), _input_bytes(traces[main]))
    return InferPlan(
        front=front, units=tuple(names), devices=tuple(device.name for device in devices), samples=samples,
        provenance=provenance, notes=tuple(notes),
    )  # fmt: skip


# ---------------------------------------------------------------------- units


def _runs(trace: Trace) -> list[tuple[str, list[Op]]]:
    """Ops in runs of one block; between blocks, and in models without them, of one module."""
    blocks = blocks_of(trace)
    ops = [op for name, times in steady(trace) for _ in range(times) for op in trace.programs[name].ops]
    found: list[tuple[str, list[Op]]] = []
    for op, block in zip(ops, block_of(ops, blocks) if blocks else [""] * len(ops), strict=True):
        name = block or ("" if blocks else ".".join(op.module.split(".")[:DEPTH]))
        if not found or (name and found[-1][0] != name):
            found.append((name, []))
        elif not name and found[-1][0] in blocks and not _inside(op, found[-1][0]):
            found.append(("", []))
        found[-1][1].append(op)
    return [(name or ("before" if index == 0 else "after"), ops) for index, (name, ops) in enumerate(found)]


def _inside(op: Op, block: str) -> bool:
    return op.module == block or op.module.startswith(f"{block}.")


def unit_seconds(trace: Trace, runs: Sequence[Sequence[Op]], speeds: Speeds) -> list[float]:
    """Seconds of each run of ops, one request after another."""
    found = []
    for ops in runs:
        unit = replace(trace, programs={"unit": Program("unit", tuple(ops))}, schedule={"evaluation": (("unit", 1),)})
        found.append(simulate(list(tasks_of(unit, steady(unit), speeds, around=False)), steps=2).seconds)
    return found


def units_of(trace: Trace, runs: Sequence[tuple[str, Sequence[Op]]], seconds: Sequence[Sequence[float]]) -> list[InferenceUnit]:
    """Units with what they hold and what crosses behind them; `seconds` by device, then by unit."""
    weights = {
        number for number, storage in trace.storages.items() if storage.role in (PARAMETER, BUFFER) and not storage.host
    }
    last: dict[int, int] = {}
    made: dict[int, int] = {number: -1 for number, storage in trace.storages.items() if storage.role == INPUT}
    width: dict[int, int] = {}
    for index, (_, ops) in enumerate(runs):
        for op in ops:
            for ref in op.inputs:
                last[ref.storage] = index
                width[ref.storage] = max(width.get(ref.storage, 0), ref.spec.nbytes)
            for number in op.allocates:
                made.setdefault(number, index)
    found = []
    for index, (name, ops) in enumerate(runs):
        used = {ref.storage for op in ops for ref in op.inputs if ref.storage in weights}
        sends = sum(
            min(width[number], trace.storages[number].nbytes)
            for number, when in made.items() if when <= index < last.get(number, -1) and number not in weights
        )  # fmt: skip
        found.append(
            InferenceUnit(
                name=name, seconds=tuple(each[index] for each in seconds), live_bytes=_live(trace, runs, index),
                weights=tuple((number, trace.storages[number].nbytes) for number in sorted(used)), sends_bytes=sends,
            )
        )  # fmt: skip
    return found


def _live(trace: Trace, runs: Sequence[tuple[str, Sequence[Op]]], index: int) -> int:
    """The most bytes of activations alive while a unit runs: what it got, and what it makes less what it lets go."""
    ops = runs[index][1]
    inside = {number for op in ops for number in op.allocates}
    came = dict.fromkeys(ref.storage for op in ops for ref in op.inputs if ref.storage not in inside)
    kept = tuple(number for number in came if trace.storages[number].role not in (PARAMETER, BUFFER))
    own = tuple(replace(op, frees=tuple(number for number in op.frees if number in inside)) for op in ops)
    unit = replace(trace, programs={"unit": Program("unit", own)}, schedule={"evaluation": (("unit", 1),)}, resident=kept)
    return peak_live(unit, ["evaluation"])


def _input_bytes(trace: Trace) -> int:
    return sum(storage.nbytes for storage in trace.storages.values() if storage.role == INPUT)


# ---------------------------------------------------------------------- devices and links


def _kind(device: Device) -> str:
    return "cpu" if device.backend == "cpu" else "gpu"


def _capabilities(cluster: Cluster) -> dict[str, tuple[int, int] | None]:
    """Kinds of device, GPUs first, and as what to trace them."""
    known = {_kind(device): device for device in cluster.devices}
    found: dict[str, tuple[int, int] | None] = {}
    if "gpu" in known:
        found["gpu"] = known["gpu"].compute_capability or (9, 0)
    if "cpu" in known:
        found["cpu"] = None
    return found


def _machine(device: Device, cluster: Cluster, profile_of: Callable[[str], Profile | None]) -> Machine:
    known = machine(device, profile_for(replace(cluster, device=device), profile_of))
    if known is None:
        raise UserError(f"nothing is known of the speed of {device.name}", "run `foretell probe` on it")
    return known


def _places(cluster: Cluster, devices: Iterable[Device]) -> list[Place]:
    """Devices of one node are alike; the first is not, since the input is on it. With a matrix none is like another."""
    found: list[Place] = []
    kinds: dict[object, int] = {}
    for rank, device in enumerate(devices):
        beside = overhead(device, TORCH).context_bytes if device.backend in ("cuda", "rocm") else 0
        alone = rank == 0 or cluster.matrix is not None
        like = kinds.setdefault(rank if alone else (device.name, cluster.domain_of(rank)), len(kinds))
        found.append(Place(name=device.name, memory_bytes=device.memory_bytes, beside_bytes=beside, like=like))
    return found


def _together(cluster: Cluster, devices: Sequence[Device]) -> list[int]:
    """How many of the devices are the cores of one machine: its processes share them."""
    places = [cluster.domain_of(rank) if device.backend == "cpu" else None for rank, device in enumerate(devices)]
    return [1 if place is None else places.count(place) for place in places]


def _links(cluster: Cluster, over: str) -> Callable[[int, int, int], float]:
    """Of CPUs of one machine what its processes talk `over`, else what joins the devices."""
    cores = [cluster.domain_of(rank) if cluster.part_of(rank).device.backend == "cpu" else None for rank in range(cluster.count)]
    groups = {(a, b): among(cluster, (a, b)) for a in range(cluster.count) for b in range(cluster.count) if a != b}
    for (a, b), group in groups.items():
        if group.domains > 1 and group.inter is None and group.measured_inter is None:
            raise UserError(f"it is not known what joins devices {a} and {b}", "give `inter`, such as Eth10, in the hardware file")

    @functools.cache
    def seconds(source: int, target: int, nbytes: int) -> float:
        if cluster.matrix is None and cores[source] is not None and cores[source] == cores[target]:
            return between_processes(over, nbytes)
        return collective(P2P, nbytes, groups[source, target]).seconds

    return seconds
