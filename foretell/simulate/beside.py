"""Jobs that share one device, each a process of its own: memory adds up, contexts included; steps take turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from foretell.quantities import ASSUMED, FITS, NO, TIGHT
from foretell.simulate.memory.memory import TIGHT_SHARE
from foretell.simulate.parts import PlanCost
from foretell.simulate.time.beside import Sharing
from foretell.simulate.time.beside import beside as side_by_side


@dataclass(frozen=True, kw_only=True)
class Together:
    """What jobs on one device need and take, in the order in which they were given."""

    verdict: str
    """Of all together: fits, tight or no."""
    device_bytes: int
    """The sum of what each needs on the device, its context included."""
    capacity_bytes: int
    margin_bytes: int
    each_bytes: tuple[int, ...]
    alone_seconds: tuple[float, ...] | None
    """A step of each with the device to itself; None where nothing is known of the device's speed."""
    step_seconds: tuple[float, ...] | None
    """A step of each beside the others."""
    alone_busy: tuple[float, ...] | None
    """Share of its step in which each keeps the device busy by itself."""
    busy: float | None
    """Share of the time in which the device runs kernels with all of them."""
    provenance: str = f"{ASSUMED}: time slices and context switches of the driver; the steps themselves as known alone"

    @property
    def fits(self) -> bool:
        return self.verdict != NO

    @property
    def slowdown(self) -> tuple[float, ...] | None:
        """How many times as long a step of each takes as alone."""
        if self.step_seconds is None or self.alone_seconds is None:
            return None
        return tuple(both / alone for both, alone in zip(self.step_seconds, self.alone_seconds, strict=True))

    @property
    def gain(self) -> float | None:
        """Work done in a given time over that of the same jobs one after the other: above 1 sharing pays."""
        slower = self.slowdown
        return sum(1 / one for one in slower) if slower else None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "fits": self.fits, "slowdown": self.slowdown, "gain": self.gain}


def together(costs: Sequence[PlanCost], sharing: Sharing | None = None) -> Together:
    """From what each job costs alone on the same device, each with one rank."""
    memories = [cost.worst.memory for cost in costs]
    each = tuple(memory.device_bytes for memory in memories)
    capacity = min(memory.capacity_bytes for memory in memories)
    margin = capacity - sum(each)
    unsure = sum(memory.bands["device_bytes"][1] - memory.device_bytes for memory in memories if "device_bytes" in memory.bands)
    no = margin < unsure or any(not cost.fits for cost in costs)
    alone = steps = shares = busy = None
    if all(cost.time is not None and cost.timeline is not None for cost in costs):
        times = [cost.time for cost in costs if cost.time is not None]
        alone = tuple(time.step_seconds for time in times)
        shares = tuple(min(1.0, time.device_seconds / time.step_seconds) for time in times)
        found = side_by_side([cost.timeline.tasks for cost in costs if cost.timeline is not None], sharing)
        steps, busy = found.step_seconds, found.busy
    return Together(
        verdict=NO if no else TIGHT if margin < TIGHT_SHARE * capacity + unsure else FITS, device_bytes=sum(each), capacity_bytes=capacity,
        margin_bytes=margin, each_bytes=each, alone_seconds=alone, step_seconds=steps, alone_busy=shares, busy=busy,
    )  # fmt: skip
