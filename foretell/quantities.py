"""What foretell answers: frozen values that say what they are and how they are known.

The JSON of `Prediction` is a contract: names are added, never changed, within one schema version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from foretell.decode import value_of
from foretell.notebook import Displayable
from foretell.units import GIB, gib

SCHEMA_VERSION = 1

FITS, TIGHT, NO, UNKNOWN = "fits", "tight", "no", "unknown"
COUNTED, MEASURED, ASSUMED = "counted", "measured", "assumed"

CATEGORIES = (
    "parameters", "gradients", "optimizer", "activations", "logits", "temporaries", "workspace", "inputs",
    "gathered", "communication",
)  # fmt: skip
"""What bytes at the peak are held for; their sum is the peak of allocated memory."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Something that holds memory at the peak."""

    name: str
    """Module path (indices of repeated blocks folded, such as `blocks.*.mlp`) or what it is."""
    category: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Peaks inside one phase: init, load, first_step, steady_step, evaluation, save."""

    name: str
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    host_bytes: int
    timeline: tuple[tuple[int, int], ...] = ()
    """Allocated and reserved bytes over the phase, in at most 64 stretches, the highest of each."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One change, or several together, and what was predicted of the step with it."""

    change: str
    """For people: `recompute every block in backward`."""
    flag: str
    """For the command line: `--recompute full`; empty where another command does it."""
    saves_bytes: int
    """Of device memory at the peak."""
    fits: bool
    """Whether the step then fits, or is tight."""
    costs: str = ""
    """What it costs: `about one more forward pass`."""
    verdict: str = UNKNOWN
    """Of the step with this change: fits, tight or no."""
    device_bytes: int = 0
    """That the step then uses on each device."""
    margin_bytes: int = 0
    """What is then left of a device; negative when it does not fit."""
    devices: int = 1
    """That it takes."""
    same_maths: bool = True
    """False where it changes what is computed: numerics, what is trained, or the batch of a step."""
    command: str = ""
    """The whole command, where it is not the one that was asked with `flag` added."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Peak bytes per device, on the worst rank."""

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    capacity_bytes: int
    margin_bytes: int
    """capacity - device; negative when it does not fit."""
    host_bytes: int
    bands: Mapping[str, tuple[int, int]]
    """Name of a number above → [low, high], the range it is expected in."""
    categories: Mapping[str, int]
    holders: tuple[Holder, ...]
    phases: tuple[Phase, ...]
    provenance: Mapping[str, str]
    """Name of a number above → how it is known."""


@dataclass(frozen=True, kw_only=True)
class Time:
    """How long one steady step takes."""

    step_seconds: float
    low_seconds: float
    high_seconds: float
    """Nine of ten steps are expected between low and high."""
    breakdown: Mapping[str, float]
    """gemm, attention, convolution, recurrent, memory, communication (exposed), waiting_for_host; adds up to the step."""
    phases: Mapping[str, float]
    """Device seconds in forward, backward, recompute, update."""
    binds: str
    """compute, memory bandwidth, host or network."""
    provenance: str
    device_seconds: float
    """The device computes."""
    host_seconds: float
    """The host asks."""
    exposed_communication_seconds: float = 0.0
    waiting_for_host_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """What a step gets through, all devices together."""

    unit: str
    """tokens or samples."""
    per_step: int
    per_second: float
    per_second_per_device: float


@dataclass(frozen=True, kw_only=True)
class Mfu:
    """Share of the peak rate: `value` without recomputation (model FLOPs), `hfu` with it (hardware FLOPs)."""

    value: float
    hfu: float
    flops_per_step: int
    """Of the model, all devices together; recomputation not counted."""
    peak_flops_per_second: float
    """Of one device, dense."""
    peak_dtype: str
    convention: str
    """How FLOPs are counted."""


@dataclass(frozen=True, kw_only=True)
class Utilisation:
    """Shares between 0 and 1 of a step on one device."""

    busy: float
    """Of the time, in which kernels run: what `nvidia-smi` calls GPU utilisation."""
    multiprocessors: float
    """Of all multiprocessors over all of the time, that have work: by the thread blocks of each kernel, assumed."""
    compute: float
    """Of what the product units could do, FLOPs of the step's products."""
    memory_bandwidth: float
    """Of what the memory could move."""
    provenance: str


@dataclass(frozen=True, kw_only=True)
class Energy:
    """Joules of one step, all devices together."""

    joules_per_step: float
    low_joules: float
    high_joules: float
    watts_per_device: float
    provenance: str
    carbon_grams_per_step: float | None = None
    carbon_source: str = ""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Money, all devices together."""

    per_hour: float
    per_step: float
    per_billion: float | None
    """Per billion tokens (or samples)."""
    unit: str
    currency: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """A whole run: so many tokens, samples or epochs."""

    amount: float
    unit: str
    steps: int
    seconds: float
    low_seconds: float
    high_seconds: float
    joules: float | None
    money: float | None
    carbon_kilograms: float | None
    device_years: float
    """Devices × seconds, in years of one device."""
    embodied_carbon_kilograms: float | None = None
    """Share of making the devices, by lifetime."""


@dataclass(frozen=True, kw_only=True)
class Infeasible:
    """Why a step does not fit: which device, how many bytes short, who holds most."""

    device: str
    bytes_short: int
    holders: tuple[Holder, ...]


@dataclass(frozen=True, kw_only=True, repr=False)
class Prediction(Displayable):
    """The answer of `fit`."""

    verdict: str
    """fits, tight (within the stated uncertainty of the limit), no, or unknown."""
    model: Mapping[str, Any]
    """source, description, blocks, recipe, batch, ..."""
    hardware: Mapping[str, Any]
    parameters: int
    memory: Memory
    plan: Mapping[str, Any] = field(default_factory=dict)
    """The plan that was predicted, as a plan file says it; empty where a plan cannot say it (inference, frozen parameters) or
    the model has no name."""
    time: Time | None = None
    """None where nothing is known of the device's speed."""
    throughput: Throughput | None = None
    mfu: Mfu | None = None
    utilisation: Utilisation | None = None
    energy: Energy | None = None
    cost: Cost | None = None
    run: Run | None = None
    """Only when a number of tokens, samples or epochs was asked for."""
    rounds: Mapping[str, float] = field(default_factory=dict)
    """Of replicas that step alone: seconds and bytes of what joins them; see `simulate.sync.SyncCost`."""
    goodput: Mapping[str, Any] = field(default_factory=dict)
    """Only where a time between failures was given: the useful share, and what it follows from; see `simulate.goodput.Goodput`."""
    remedies: tuple[Remedy, ...] = ()
    """Each was predicted; those that fit first, then by what they cost the user."""
    ways_tried: int = 0
    """Changes that were predicted to find those; 0 where it fits as it is."""
    advice: str = ""
    """What there is to say of them: that none fits, or that the time for trying was up."""
    assumptions: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    @property
    def fits(self) -> bool:
        return self.verdict in (FITS, TIGHT)

    @property
    def infeasible(self) -> Infeasible | None:
        """Why it does not fit, or None if it does."""
        if self.verdict != NO:
            return None
        name = str(self.hardware.get("name", ""))
        return Infeasible(device=name, bytes_short=-self.memory.margin_bytes, holders=self.memory.holders)

    def headline(self) -> str:
        verdict = {FITS: "fits", TIGHT: "fits, tight", NO: "does not fit"}.get(self.verdict, "unknown")
        count = int(self.hardware.get("count", 1))
        on = f"{count}x{self.hardware['name']}" if count > 1 else self.hardware["name"]
        return f"{self.model.get('source')} on {on} {verdict}: {gib(self.memory.device_bytes)} of {gib(self.memory.capacity_bytes)}"

    def rows(self) -> Sequence[tuple[str, str]]:
        memory, known = self.memory, [("parameters", f"{self.parameters:,}")]
        known.append(("memory", f"{gib(memory.device_bytes)} of {gib(memory.capacity_bytes)}, {gib(abs(memory.margin_bytes))} "
                                f"{'spare' if memory.margin_bytes >= 0 else 'short'}"))  # fmt: skip
        known += [(f"  {name}", gib(value)) for name, value in memory.categories.items() if value >= 0.005 * GIB]
        if self.time is not None:
            low, middle, high = (1e3 * value for value in (self.time.low_seconds, self.time.step_seconds, self.time.high_seconds))
            known.append(("step", f"{middle:,.4g} ms ({low:,.4g}–{high:,.4g}), bound by {self.time.binds}; {self.time.provenance}"))
        if self.throughput is not None:
            known.append((f"{self.throughput.unit}/s", f"{self.throughput.per_second:,.0f}"))
        return [*known, *((one.change, f"{gib(one.device_bytes)}") for one in self.remedies if one.fits)]

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        data["fits"] = self.fits
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Prediction:
        """Also of answers that were written before a name was added, and of those with names added since.

        Raises `decode.Mismatch` where a field is of another type.
        """
        found: Prediction = value_of(cls, data)
        return found


# ---------------------------------------------------------------------- work on a stream

COMPUTE, COLLECTIVES, H2D, D2H, HOST = "compute", "collectives", "h2d", "d2h", "host"


class Task(NamedTuple):
    """One piece of work on one resource."""

    name: str
    resource: str
    seconds: float
    after: tuple[int, ...] = ()
    """Positions, in the list of tasks, of earlier tasks that must have finished."""
    host_seconds: float = 0.0
    """What the host spends on issuing it."""
    kind: str = ""
    """gemm, attention, memory, all_gather, copy, ...: for tables and colours."""
    module: str = ""
    phase: str = ""
    synchronises: bool = False
    """The host waits until it has finished (`.item()`, a pageable copy)."""
    slower: float = 0.0
    """How much longer it takes while a collective runs beside it: 0.2 is a fifth."""
