"""What is known of one device and its host, and the seconds of each op of a step on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from foretell.hardware.types import Device
from foretell.kernels.names import NAMESPACE, OF_OP, efficiency
from foretell.price.bands import OWN
from foretell.price.clocks import Clocks, slowdowns
from foretell.price.energy import PowerModel
from foretell.price.host import HostModel, steady
from foretell.price.kernels.features import Shape, describe
from foretell.price.kernels.irregular import ASKED, FAMILY, called, unmeasured, waits
from foretell.price.kernels.ops import OpModel
from foretell.price.kernels.shapes import short
from foretell.price.network.overlap import slower
from foretell.quantities import MEASURED, Task
from foretell.trace.fold.merged import MERGED, about
from foretell.trace.inductor.blocks import ENTER, LEAVE
from foretell.trace.inductor.cuda_graphs import REPLAY, REPLAYED
from foretell.trace.types import Op, Trace

MARKS = frozenset({"foretell.begin", "foretell.model_end", "foretell.reshard", "foretell.link", ENTER, LEAVE, REPLAY, REPLAYED})
"""Ops that only mark a place."""
COMPUTE_KINDS = frozenset({"gemm", "attention", "convolution", "recurrent"})
LONG_PROGRAM = 20_000
"""Ops above which one step is simulated instead of two: the device is far behind the host there anyway."""
HUNGRY = frozenset({"bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"})
CLOSER = 1.0e-6
"""Seconds between two kernels that a CUDA graph saves; from replayed steps on an H200."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What is known of one device and its host."""

    ops: OpModel
    host: HostModel
    in_step: Mapping[str, float] = field(default_factory=dict)
    """compute, memory → how much longer such ops take inside a step than alone: caches are cold."""
    clocks: Clocks | None = None
    """How far products slow down under the power limit; None where that is not known."""
    provenance: str = MEASURED
    slower: Mapping[str, float] = field(default_factory=dict)
    """Family of ops → factor on its seconds, where efficiencies come from another device."""
    serial: bool = False
    """The host itself computes, op by op: a CPU."""
    band: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """What binds → the factors between which nine of ten steps fall, for estimates that know no more of a step."""
    spread: tuple[float, float] = (1.0, 1.0)
    """Factors between which several probes of the device lie: a band reaches as much further."""
    known_by: str = OWN
    """What bands of step times rest on."""
    power: PowerModel | None = None
    notes: tuple[str, ...] = ()
    """Sentences on where these figures come from."""
    known: dict[Shape, tuple[str, float]] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Family and seconds of shapes that were priced before."""
    beside: dict[Shape, float] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Of the same shapes: how much longer they take beside a collective."""


def shape_of(op: Op) -> Shape:
    return Shape(op.name, tuple([ref.spec for ref in op.inputs]), tuple([ref.spec for ref in op.outputs]), op.attrs)


def guessed(tasks: Sequence[Task], machine: Machine) -> float:
    """Seconds of a step in ops that the machine's profile was measured without."""
    return sum(task.seconds for task in tasks if task.kind == FAMILY) if FAMILY not in machine.ops.families else 0.0


def unmeasured_ops(trace: Trace, machine: Machine) -> tuple[str, ...]:
    """Names of a step's ops that the machine's profile was measured without."""
    every = {shape_of(op) for name, _ in steady(trace) for op in trace.programs[name].ops if short(op.name) in ASKED}
    return unmeasured(every, machine.ops.families)


def own_seconds(shape: Shape, device: Device) -> float | None:
    """Of one of foretell's kernels that was measured on a device: its bytes at the share of the bandwidth that it was seen to reach."""
    if not shape.name.startswith(f"{NAMESPACE}."):
        return None
    name = short(shape.name).removesuffix("_").removesuffix("_backward")
    kernel = OF_OP.get(name, name)
    specs = [*shape.inputs, *shape.outputs]
    share = efficiency(kernel, device.name, shape.inputs[0].dtype, shape.inputs[0].numel)
    return None if share is None else sum(spec.nbytes for spec in specs) / (device.memory_bandwidth_bytes_per_second * share)


def synchronises(op: Op, machine: Machine) -> bool:
    """Whether the host waits for an op's result: as its profile has seen it, or else as such ops are known to be."""
    name = short(op.name)
    if name not in ASKED:
        return False
    shape = shape_of(op)
    return machine.host.waits.get(called(name, shape), waits(name, shape))


Reprice = Callable[[Op, str, float], tuple[float, float]]
"""An op, its family and its seconds → its seconds in other software, and how hot it keeps the matrix units: 1 as large products do."""


def op_prices(trace: Trace, machine: Machine, reprice: Reprice | None = None) -> dict[int, tuple[str, float]]:
    """Of every op of a steady step: its family and its device seconds. The clock under load follows from them as `reprice` leaves them."""
    known = machine.known
    found: dict[int, Shape] = {}
    together: dict[int, tuple[str, float]] = {}
    for name, _ in steady(trace):
        for op in trace.programs[name].ops:
            if op.name == MERGED:
                together[id(op)] = (about(op).family, about(op).seconds)
            else:
                found[id(op)] = shape_of(op)
    distinct = [shape for shape in dict.fromkeys(found.values()) if shape not in known]
    seconds = machine.ops.seconds(distinct)
    for shape in distinct:
        described = describe(shape, machine.ops.device)
        family = described.family if described else ""
        around = machine.in_step.get("compute" if family in COMPUTE_KINDS else "memory", 1.0)
        alone = own_seconds(shape, machine.ops.device)
        known[shape] = (family, (seconds[shape] * machine.slower.get(family, 1.0) if alone is None else alone) * around)
        waves = 2 ** described.values["waves"] if described and family == "gemm" else 0.0
        machine.beside[shape] = slower(family, waves)
    prices = {number: known[shape] for number, shape in found.items()} | together
    heat: dict[int, float] = {}
    if reprice is not None:
        for op in {id(op): op for name, _ in steady(trace) for op in trace.programs[name].ops}.values():  # programs share ops
            family, alone = prices[id(op)]
            there, heat[id(op)] = reprice(op, family, alone)
            prices[id(op)] = (family, there)
    if machine.clocks is not None:
        _at_the_limit(trace, found, prices, machine.clocks, heat)
    for name, _ in steady(trace):
        replaying = False
        for op in trace.programs[name].ops:
            replaying = op.name != REPLAYED and (replaying or op.name == REPLAY)
            if replaying and prices[id(op)][1]:
                family, alone = prices[id(op)]
                prices[id(op)] = (family, max(alone - CLOSER, alone / 3))
            if op.name == "aten.copy_.default" and len(op.inputs) > 1 and op.inputs[0] == op.inputs[1]:
                prices[id(op)] = ("", 0.0)  # onto itself, as `x[a:] += y` asks for: torch returns at once
    return prices


def _at_the_limit(
    trace: Trace, shapes: Mapping[int, Shape], prices: dict[int, tuple[str, float]], clocks: Clocks, heat: Mapping[int, float]
) -> None:
    """Slow 16-bit products down where they keep the device at its power limit."""
    ops = [op for name, _ in steady(trace) for op in trace.programs[name].ops if prices[id(op)][1]]
    hot = [
        about(op).hungry_seconds if op.name == MERGED else prices[id(op)][1] if hungry(shapes[id(op)], prices[id(op)][0]) else 0.0
        for op in ops
    ]
    factors = slowdowns([(part * heat.get(id(op), 1.0), prices[id(op)][1]) for op, part in zip(ops, hot, strict=True)], clocks)
    for op, part, factor in zip(ops, hot, factors, strict=True):
        if part:
            family, seconds = prices[id(op)]
            prices[id(op)] = (family, seconds + part * (factor - 1))


def hungry(shape: Shape, family: str) -> bool:
    """Whether an op asks for more watts than a device may draw: products and attention on matrix units, in 16 bits or less."""
    return family in ("gemm", "attention") and "tf32" not in shape.attrs and shape.inputs[-1].dtype in HUNGRY
