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
    replicas: int = 0
    """Of replicas that come and go, how many: a failure costs one of them its round, `interval` is a round, and `restarts` the time until
    such a replica is in one again."""

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


def rejoining(costs: FailureCosts, mtbf_seconds: float, *, replicas: int, quorum: int, every: int) -> Goodput:
    """The same of replicas that are joined every so many steps and may come and go: the share of all replicas' time in rounds that count.

    A replica that fails in a round is out of it, starts again, and is in the first round that begins after that. The others do not wait
    for it, unless the quorum is all of them: then each failure costs everybody what it had done of its round, and its start. Not in
    it: rounds that wait since more replicas are away than the quorum allows, the grace window of one that is not noticed at once, and
    failures of the process that joins them.
    """
    if not 0 < mtbf_seconds < math.inf:
        raise UserError(f"the time between failures must be above zero, got {mtbf_seconds:g}", "give --mtbf such as 4h")
    step = costs.step.seconds if costs.step is not None else 0.0
    turn = max(every * step, 1e-9)
    if quorum >= replicas:
        share, limit = (_useful(turn, 0.0, after, mtbf_seconds) for after in (costs.restart.seconds, 0.0))
        restarts = min(1 - share, costs.restart.seconds / mtbf_seconds)
    else:
        own = replicas * mtbf_seconds  # between failures of one replica
        share, lost = _of_rounds(turn, costs.restart.seconds, own)
        limit, _ = _of_rounds(turn, 0.0, own)
        restarts = max(0.0, 1 - share - lost)
    return Goodput(
        mtbf_seconds=mtbf_seconds, interval_seconds=turn, interval_steps=every if step else None, share=share, checkpoints=0.0,
        again=1 - share - restarts, restarts=restarts, limit=limit, costs=costs, replicas=replicas,
    )  # fmt: skip


def _of_rounds(turn: float, restart: float, mtbf: float) -> tuple[float, float]:
    """Of one replica: the share of its time in rounds that it finishes, and in those that it does not, until it fails.

    It finishes q / (1 - q) rounds between two failures, q = exp(-turn / mtbf). Then it misses the round that it fails in, those that its
    start takes, and one more where it failed too late in its round to be back for the one after.
    """
    if turn / mtbf > _LARGEST or restart / mtbf > _LARGEST:
        return 0.0, 1.0
    fails = -math.expm1(-turn / mtbf)
    restart = mtbf * math.expm1(restart / mtbf)  # it may fail again meanwhile
    whole, part = divmod(restart / turn, 1.0)
    late = (math.exp(-(1 - part) * turn / mtbf) - math.exp(-turn / mtbf)) / fails
    finished, missed = (1 - fails) / fails, whole + 1 + late
    into = mtbf / turn - finished  # of the round that it fails in, on average
    return finished / (finished + missed), into / (finished + missed)


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


def rejoin_costs(nbytes: int, cluster: Cluster, step_seconds: float | None) -> FailureCosts:
    """Of replicas that come and go, where nobody has run them: one that comes gets the weights and the outer momentum over the link."""
    link, start = cluster.inter, RESTART_SECONDS.get(cluster.device.backend, DEVICE_RESTART_SECONDS)
    rate = HOST_BYTES_PER_SECOND if link is None else link.bytes_per_second
    nothing = KnownSeconds(seconds=0.0, how=ASSUMED, why="beside the rounds")
    return FailureCosts(
        step=KnownSeconds(seconds=step_seconds, how="predicted") if step_seconds else None, checkpoint=nothing, written=nothing,
        restart=KnownSeconds(seconds=start + nbytes / rate, how=ASSUMED, why=f"{start:.3g} s and {human_bytes(nbytes)} at {rate / 1e9:.3g} GB/s"),
    )  # fmt: skip


def measured_costs(found: Mapping[str, tuple[float, int]], otherwise: FailureCosts) -> FailureCosts:
    """Those of a run as far as it has measured them (seconds, and of how many), the others as they are."""
    known = {name: KnownSeconds(seconds=seconds, how=MEASURED, why=f"median of {count}") for name, (seconds, count) in found.items()}
    return FailureCosts(**{name: known.get(name, getattr(otherwise, name)) for name in ("step", "checkpoint", "written", "restart")})
