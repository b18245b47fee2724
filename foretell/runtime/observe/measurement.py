"""What a run was measured to do, as a value and as a file. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from foretell.decode import decode
from foretell.files import read_json
from foretell.runtime.observe.machine_load import MachineLoad

FILE = "measurement.json"
SCHEMA_VERSION = 1
CONVENTION = (
    "FLOPs of the model as the plan counts them (2 a multiply-add, causal attention at half, no recomputation) over the "
    "dense peak of the precision on all devices"
)
_AGAIN = "run the plan again"


@dataclass(frozen=True, kw_only=True)
class _Hardware:
    """What readers rely on of where a run was."""

    device: str | None
    kind: str | None
    host: str | None
    count: int | None
    threads: int | None


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a run was measured to do."""

    steps: int
    """That the figures rest on, without the first ones."""
    skipped_steps: int
    step_seconds: float
    """Median."""
    p10_seconds: float
    p90_seconds: float
    mean_seconds: float
    unit: str
    """tokens or samples."""
    per_step: int
    """All ranks together."""
    per_second: float
    phases: Mapping[str, float]
    """Median seconds of a step: backward (forward and backward), update, between (the loop itself), data (host)."""
    overhead: float
    """Share of a step that lies between two steps: the loop's own."""
    stretches: tuple[float, ...]
    """Median step seconds of equal stretches of the run, in order: its drift."""
    allocated_bytes: int | None
    """Peak of the worst rank; None on a CPU, which has no caching allocator."""
    reserved_bytes: int | None
    host_bytes: int
    """Peak resident memory of the largest process."""
    by_rank: tuple[Mapping[str, Any], ...]
    mfu: float | None
    """None where the device's peak or the plan's FLOPs are not known."""
    flops_per_step: float | None
    peak_flops_per_second: float | None
    """Of one device."""
    first_loss: float | None
    last_loss: float | None
    """None of a script that is watched: reading it would make the device wait."""
    eval_loss: float | None
    save_seconds: float | None
    """Mean of one save."""
    eval_seconds: float | None
    hardware: Mapping[str, Any]
    versions: Mapping[str, str]
    command: str
    started: str
    wall_seconds: float
    joules_per_step: float | None = None
    """Of all devices, by their own counters; None where they have none, or the run was too short for them."""
    delayed: float | None = None
    """Share of the time in which other processes had the cores that the slowest rank was ready to run on; None where it was not read."""
    load: MachineLoad | None = None
    """Of the machine of the first rank, and who else used it; None where it was not read."""
    convention: str = CONVENTION
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any, where: str = FILE) -> Measurement:
        """From its JSON; a field of another type is a `FileFormatError` that names it and `where` it stands."""
        found = decode(cls, data, where, _AGAIN)
        decode(dict[str, _Hardware], {"hardware": found.hardware}, where, _AGAIN)
        return found


def read(run: Path) -> dict[str, Any] | None:
    """The measurement in a run folder as its JSON, every field checked; None where the run has not ended."""
    try:
        data = read_json(run / FILE, _AGAIN)
    except FileNotFoundError:
        return None
    Measurement.from_json(data, str(run / FILE))
    return dict(data)


def nearest(ordered: Sequence[float], share: float) -> float:
    """The value below which that share lies, by nearest rank."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def stretches(seconds: Sequence[float], most: int = 10) -> list[float]:
    """Medians of that many equal parts of a run, in order: a step that gets slower shows in them."""
    count = min(most, len(seconds))
    cuts = [round(place * len(seconds) / count) for place in range(count + 1)]
    return [statistics.median(seconds[a:b]) for a, b in pairwise(cuts)]
