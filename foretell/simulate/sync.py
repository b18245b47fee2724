"""What joining replicas every so many steps takes and hides, from a rank's lowered trace: a step on average, rounds included."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from foretell.lower.fsdp.units import COLLECTIVES
from foretell.lower.sync import OUTER, ROUND, sent_bytes, trained_elements
from foretell.plan.types import Plan
from foretell.price.speeds import Speeds
from foretell.quantities import Time
from foretell.simulate.time.step import tasks_of
from foretell.trace.types import Trace


@dataclass(frozen=True, kw_only=True)
class SyncCost:
    """A round of replicas that step alone."""

    every: int
    alone_seconds: float | None
    """Of a step of a replica by itself; None, as for all seconds, where nothing is known of the device's speed."""
    message_seconds: float | None
    """In which what replicas have moved is exchanged."""
    hidden_seconds: float | None
    """Part of that in which replicas go on with their next steps."""
    update_seconds: float | None
    """Of all else in a round: what was moved, codes, the outer optimizer."""
    sent_bytes: int
    """By a rank in a round."""
    kept_bytes: int
    """By a rank, beside what it has without rounds."""

    @property
    def round_seconds(self) -> float | None:
        """In which a replica does no step, in each round."""
        if self.message_seconds is None or self.hidden_seconds is None or self.update_seconds is None:
            return None
        return self.message_seconds - self.hidden_seconds + self.update_seconds

    @property
    def share(self) -> float | None:
        """Of the time, that replicas step: 1 where rounds cost nothing."""
        wait = self.round_seconds
        return None if self.alone_seconds is None or wait is None else self.every * self.alone_seconds / (self.every * self.alone_seconds + wait)

    def to_json(self) -> dict[str, Any]:
        more = {"round_seconds": self.round_seconds, "share": self.share}
        return {name: value for name, value in {**asdict(self), **more}.items() if value is not None}


def round_cost(local: Trace, plan: Plan, speeds: Speeds | None, time: Time | None) -> SyncCost:
    """Of a trace with a round (`lower.sync.joined`), whose steps take `time`."""
    assert plan.sync is not None
    kept = sum(storage.nbytes for storage in local.storages.values() if storage.module == OUTER and storage.role == "optimizer")
    sent = sent_bytes(trained_elements(local), plan.mesh.dp_replicate, plan.sync.format, through_hub=plan.sync.quorum > 0)
    if speeds is None or time is None:
        nothing: dict[str, Any] = dict.fromkeys(("alone_seconds", "message_seconds", "hidden_seconds", "update_seconds"))
        return SyncCost(every=plan.sync.every, sent_bytes=sent, kept_bytes=kept, **nothing)
    found = {True: 0.0, False: 0.0}
    alone = replace(local, programs={ROUND: local.programs[ROUND]}, schedule={"steady_step": local.schedule[ROUND]})
    for task in tasks_of(alone, local.schedule[ROUND], speeds, around=False):
        found[task.name in COLLECTIVES] += task.seconds + task.host_seconds
    hidden = min(found[True], plan.sync.delay * time.step_seconds)
    return SyncCost(
        every=plan.sync.every, alone_seconds=time.step_seconds, message_seconds=found[True], hidden_seconds=hidden,
        update_seconds=found[False], sent_bytes=sent, kept_bytes=kept,
    )  # fmt: skip


def averaged(time: Time, cost: SyncCost) -> Time:
    """A step on average: every round's own seconds are spread over its steps."""
    wait = cost.round_seconds
    if wait is None or cost.message_seconds is None or cost.hidden_seconds is None or cost.update_seconds is None:
        return time
    more, exposed = wait / cost.every, (cost.message_seconds - cost.hidden_seconds) / cost.every
    part = (time.step_seconds + more) / time.step_seconds if time.step_seconds else 1.0
    breakdown = dict(time.breakdown)
    for name, seconds in (("communication", exposed), ("memory", cost.update_seconds / cost.every)):
        breakdown[name] = breakdown.get(name, 0.0) + seconds
    return replace(
        time, step_seconds=time.step_seconds + more, low_seconds=time.low_seconds * part, high_seconds=time.high_seconds * part,
        breakdown=breakdown, phases={**time.phases, OUTER: (cost.message_seconds + cost.update_seconds) / cost.every},
        exposed_communication_seconds=time.exposed_communication_seconds + exposed,
        binds="network" if exposed > 0.25 * (time.step_seconds + more) else time.binds,
    )  # fmt: skip
