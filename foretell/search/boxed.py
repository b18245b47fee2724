"""What is predicted for one rank of a plan, in the form in which a box measures it, and what the box's stand-ins are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from foretell.decode import decode
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.hardware.types import Cluster
from foretell.lower.blocks import KEEP, blocks_of
from foretell.plan.mesh import check_rank, coordinates
from foretell.plan.types import Plan, computed
from foretell.price.network.messages import Messages
from foretell.runtime.box.script import BoxScript
from foretell.search.traces.needed import Traces
from foretell.simulate.arrivals import Arrivals, arrivals
from foretell.simulate.plan import Options, PlanCost, modes_of, predict_plan

_TABLES = ("arrivals", "free_arrivals", "bands", "uses")


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Of one rank; seconds are null where nothing is known of the device's speed."""

    rank: int
    step_seconds: float | None
    low_seconds: float | None
    high_seconds: float | None
    free_seconds: float | None
    """Of the same step if messages took no time."""
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    verdict: str
    arrivals: Arrivals = field(default_factory=Arrivals)
    free_arrivals: Arrivals = field(default_factory=Arrivals)
    bands: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Name of some bytes above → the range they are expected in."""
    capacity_bytes: int = 0
    """Of the device that the plan is for."""
    uses: Mapping[str, int] = field(default_factory=dict)
    """What the memory is used for at the peak."""

    @property
    def exposed_seconds(self) -> float | None:
        if self.step_seconds is None or self.free_seconds is None:
            return None
        return max(0.0, self.step_seconds - self.free_seconds)

    @property
    def exposed_share(self) -> float | None:
        exposed = self.exposed_seconds
        return None if exposed is None or not self.step_seconds else exposed / self.step_seconds

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Expected:
        return decode(cls, data, "what was predicted", "predict it again")

    def told(self) -> dict[str, Any]:
        """The numbers alone."""
        plain = {name: value for name, value in self.to_json().items() if name not in _TABLES}
        return {**plain, "exposed_seconds": self.exposed_seconds, "exposed_share": self.exposed_share}


def expect(plan: Plan, rank: int, *, traces: Traces | None = None, cluster: Cluster | None = None) -> Expected:
    """Predict a plan twice: as it is, and with messages that take no time but for filling what is gathered."""
    check_rank(plan, rank)
    cluster = cluster or parse(plan.hardware)
    device = cluster.device
    traces = traces or Traces(capability=None if device.backend == "cpu" else device.compute_capability or (9, 0))
    kept = traces.of(plan, [KEEP])
    kept |= traces.of(plan, sorted({computed(mode) for mode in modes_of(plan, blocks_of(kept[KEEP])).values()} - {KEEP}))

    def cost(**how: Any) -> PlanCost:
        return predict_plan(kept, plan, cluster, Options(profile_of=find_profile, **how))

    usual, free = cost(), cost(filled=True)
    place = coordinates(plan.mesh, rank)["pp"]
    mine = next(one for one in usual.ranks if one.rank == place)
    time = usual.time
    piped = plan.mesh.pp > 1 and usual.events
    return Expected(
        rank=rank, step_seconds=time.step_seconds if time else None, low_seconds=time.low_seconds if time else None,
        high_seconds=time.high_seconds if time else None, free_seconds=free.time.step_seconds if free.time else None,
        allocated_bytes=mine.memory.allocated_bytes, reserved_bytes=mine.memory.reserved_bytes, device_bytes=mine.memory.device_bytes,
        verdict=mine.verdict, arrivals=arrivals(usual.events, plan, place) if piped else Arrivals(),
        free_arrivals=arrivals(free.events, plan, place) if piped else Arrivals(), bands=dict(mine.memory.bands),
        capacity_bytes=mine.memory.capacity_bytes, uses=dict(mine.memory.categories),
    )  # fmt: skip


def scripts(plan: Plan, rank: int, expected: Expected, cluster: Cluster | None = None) -> tuple[BoxScript, BoxScript]:
    """What stand-ins are told: as predicted, and where messages take no time."""
    messages = Messages(plan, cluster or parse(plan.hardware), rank)
    usual = BoxScript(seconds=messages.seconds, channels=messages.channels, arrivals=expected.arrivals)
    return usual, BoxScript(channels=messages.channels, arrivals=expected.free_arrivals, free=True)
