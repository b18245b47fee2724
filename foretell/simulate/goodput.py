"""The useful share of a run that fails now and then: what checkpoints, restarts and work that is done again leave of the time.

    step ... step  stall │ step ... step  stall │ step ✗ │ restart │ the same steps again ...
    └── interval ──┘                            └ written: a checkpoint counts some seconds after it was taken

Failures come at random, at a rate; a restart may fail too. The interval between checkpoints is the one that loses the least
(`best_interval`), unless a run has its own. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from foretell.errors import UserError
from foretell.hardware.types import Cluster
from foretell.quantities import ASSUMED, MEASURED
from foretell.units import human_bytes

DISK_BYTES_PER_SECOND = 1e9
"""Of a node, writing and reading, where the hardware says nothing of its disks."""
HOST_BYTES_PER_SECOND = 5e9
"""Of one rank, copying what it saves, where no link to the host is known."""
RESTART_SECONDS = {"cpu": 2.5}
"""From a fault to the first step, for ranks that are forked from a standby, without reading the checkpoint: measured on CPUs."""
DEVICE_RESTART_SECONDS = 15.0
"""The same with devices and their libraries to start: assumed."""
SAVED = ("parameters", "optimizer")
"""Categories of bytes that are in a checkpoint."""
_LARGEST = 700.0
"""Beyond this exp is no number."""


def best_interval(cost_seconds: float, mtbf_seconds: float) -> float:
    """Seconds of training between two saves that lose the least time (Daly 2006, Young's with its next terms).

    A save costs `cost_seconds` of training; a failure, on average every `mtbf_seconds`, costs what was done since the
    last save. Where a save takes as long as machines live, nothing helps: once per life.
    """
    if cost_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    share = cost_seconds / (2 * mtbf_seconds)
    return math.sqrt(2 * cost_seconds * mtbf_seconds) * (1 + math.sqrt(share) / 3 + share / 9) - cost_seconds


@dataclass(frozen=True, kw_only=True)
class KnownSeconds:
    """A duration, and how it is known."""

    seconds: float
    how: str
    """measured or assumed."""
    why: str = ""
    """Of what, or by what assumption."""


@dataclass(frozen=True, kw_only=True)
class FailureCosts:
    """What goodput follows from."""

    step: KnownSeconds | None
    """None: nothing is known of the device's speed, and an interval is no number of steps."""
    checkpoint: KnownSeconds
    """That training waits for one."""
    written: KnownSeconds
    """From then until it counts: what was done meanwhile is lost with it."""
    restart: KnownSeconds
    """From a failure until ranks train again."""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Shares of the time of a run, failures included; they add up to 1."""

    mtbf_seconds: float
    """Of the whole run, not of one device."""
    interval_seconds: float
    """Of training between two checkpoints."""
    interval_steps: int | None
    share: float
    """Useful: steps that count."""
    checkpoints: float
    again: float
    """Steps that are done again, and their checkpoints."""
    restarts: float
    limit: float
    """Of the useful share, for checkpoints of this cost and failures at this rate, where they are written at once and a restart takes no time."""
    costs: FailureCosts

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def goodput(costs: FailureCosts, mtbf_seconds: float, interval_seconds: float | None = None) -> Goodput:
    """The prediction; every other place that names a goodput has it from here."""
    if not 0 < mtbf_seconds < math.inf:
        raise UserError(f"the time between failures must be above zero, got {mtbf_seconds:g}", "give --mtbf such as 4h")
    stall, step = costs.checkpoint.seconds, costs.step.seconds if costs.step is not None else 0.0
    interval = best_interval(stall, mtbf_seconds) if interval_seconds is None else interval_seconds
    steps = max(1, round(interval / step)) if step > 0 else None
    interval = steps * step if steps is not None else max(interval, 1e-9)
    share = _useful(interval, stall, costs.restart.seconds + costs.written.seconds, mtbf_seconds)
    whole = interval / share if share > 0 else math.inf
    restarts = min(1 - share, costs.restart.seconds / mtbf_seconds)
    checkpoints = min(1 - share - restarts, stall / whole)
    best = max(best_interval(stall, mtbf_seconds), step, 1e-9)
    return Goodput(
        mtbf_seconds=mtbf_seconds, interval_seconds=interval, interval_steps=steps, share=share, checkpoints=checkpoints, restarts=restarts,
        again=1 - share - checkpoints - restarts, limit=_useful(best, stall, 0.0, mtbf_seconds), costs=costs,
    )  # fmt: skip


def _useful(interval: float, stall: float, after: float, mtbf: float) -> float:
    """Of failures at random (Daly 2006, eq. 13): so much training, by the time that it takes on average to get it saved, when each
    failure costs `after` seconds besides what was done since the last save."""
    if max(after, interval + stall) / mtbf > _LARGEST:
        return 0.0
    return min(1.0, interval / (mtbf * math.exp(after / mtbf) * math.expm1((interval + stall) / mtbf)))


# --- what is assumed before anything was run -------------------------------------------------------------------------


def assumed_costs(nbytes: int, cluster: Cluster, step_seconds: float | None, ranks: int) -> FailureCosts:
    """Of a plan that nobody has run: what each rank saves goes over the link to the host, and on to the disk."""
    link, disk = cluster.host_link, cluster.tier("disk")
    rate = HOST_BYTES_PER_SECOND if link is None or cluster.device.backend == "cpu" else link.bytes_per_second
    here = nbytes * min(max(1, ranks), max(1, cluster.devices_per_node))
    write, read = (disk.write_bytes_per_second, disk.read_bytes_per_second) if disk is not None else (DISK_BYTES_PER_SECOND,) * 2
    start = RESTART_SECONDS.get(cluster.device.backend, DEVICE_RESTART_SECONDS)
    return FailureCosts(
        step=KnownSeconds(seconds=step_seconds, how="predicted") if step_seconds else None,
        checkpoint=KnownSeconds(seconds=nbytes / rate, how=ASSUMED, why=f"{human_bytes(nbytes)} a rank at {rate / 1e9:.3g} GB/s, none of it hidden"),
        written=KnownSeconds(seconds=here / write, how=ASSUMED, why=f"{write / 1e9:.3g} GB/s of disk a node"),
        restart=KnownSeconds(seconds=start + here / read, how=ASSUMED, why=f"{start:.3g} s and reading at {read / 1e9:.3g} GB/s"),
    )


def measured_costs(found: Mapping[str, tuple[float, int]], otherwise: FailureCosts) -> FailureCosts:
    """Those of a run as far as it has measured them (seconds, and of how many), the others as they are."""
    known = {name: KnownSeconds(seconds=seconds, how=MEASURED, why=f"median of {count}") for name, (seconds, count) in found.items()}
    return FailureCosts(**{name: known.get(name, getattr(otherwise, name)) for name in ("step", "checkpoint", "written", "restart")})
