"""What foretell answers: frozen values that say what they are and how they are known.

The JSON of `Prediction` is a contract: names are added, never changed, within one schema version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

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
    """One change that lowers the peak, with what it is predicted to save."""

    change: str
    """For people: `recompute every block in backward`."""
    flag: str
    """For the command line: `--recompute full`."""
    saves_bytes: int
    """Of device memory at the peak."""
    fits: bool
    """Whether the step fits with this change alone."""
    costs: str = ""
    """What it costs: `about one more forward pass`."""


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
class Infeasible:
    """Why a step does not fit: which device, how many bytes short, who holds most."""

    device: str
    bytes_short: int
    holders: tuple[Holder, ...]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The answer of `fit`."""

    verdict: str
    """fits, tight (within the stated uncertainty of the limit), no, or unknown."""
    model: Mapping[str, Any]
    """source, description, blocks, recipe, batch, ..."""
    hardware: Mapping[str, Any]
    parameters: int
    memory: Memory
    remedies: tuple[Remedy, ...] = ()
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

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        data["fits"] = self.fits
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Prediction:
        given = {key: value for key, value in data.items() if key not in ("fits", "memory", "remedies")}
        memory = dict(data["memory"])
        memory["holders"] = tuple(Holder(**holder) for holder in memory["holders"])
        memory["phases"] = tuple(
            Phase(**{**phase, "timeline": tuple((a, r) for a, r in phase.get("timeline", ()))})
            for phase in memory["phases"]
        )
        memory["bands"] = {name: (low, high) for name, (low, high) in memory["bands"].items()}
        given["assumptions"] = tuple(given["assumptions"])
        return cls(**given, memory=Memory(**memory), remedies=tuple(Remedy(**remedy) for remedy in data["remedies"]))
