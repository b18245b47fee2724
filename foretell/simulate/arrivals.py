"""When messages reach one rank of a pipeline, seen from that rank.

    rank 0   │ F0 │ F1 │ ─────── waits ─────── │ B0 │        what it sends is known to it, and when
    rank 1        │ F0 │ B0 │                                what others do with it takes the simulated seconds
                          └── arrives: so long after F0 was sent, and not before so long after the step began

A message arrives when the latest of all chains of events that lead to it has ended. A chain begins with the step, or with
something this rank sent, and runs through other ranks alone; its seconds are those of `simulate.pipeline`. So whoever runs this
rank really, and knows when it sent what, knows when each message would come: where it is late, others are late by as much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from foretell.decode import decode
from foretell.lower.pipeline.order import Event, in_turn, needs, target
from foretell.plan.types import Plan
from foretell.simulate.pipeline import Events

Chains = list[float]
"""Seconds of the longest chain from the start of the step, then from each message this rank sends; `_NONE`: there is none."""
_NONE = float("-inf")


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """What one rank of a pipeline waits for. Messages are named by the event that sends them: F3.0 is forward, stage 3, micro-batch 0."""

    sends: tuple[str, ...] = ()
    """In the order of the schedule."""
    receives: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    """Message → seconds after the start of the step, then after the end of each send; None: it does not wait for that."""
    end: tuple[float | None, ...] = ()
    """The same for the moment when all other ranks are done with their micro-batches."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Arrivals:
        return decode(cls, data, "arrivals", "predict them again")


def name_of(kind: str, stage: int, micro: int) -> str:
    """Of the message that an event sends; gradients of inputs are sent alike whether those of weights come with them or later."""
    return f"{'F' if kind == 'F' else 'B'}{stage}.{micro}"


def arrivals(events: Sequence[Events], plan: Plan, place: int) -> Arrivals:
    """Of the rank at that place of the pipeline."""
    assert plan.pipeline is not None
    last = plan.pipeline.stages - 1
    orders = [[event for event, _, _ in one.rank.events] for one in events]
    where = {event.stage: number for number, mine in enumerate(orders) for event in mine}
    own = next(number for number, one in enumerate(events) if one.rank.rank == place)
    sends = [
        event for event, size in zip(orders[own], events[own].sent, strict=True)
        if size and (to := target(event, last)) is not None and where[to] != own
    ]  # fmt: skip
    position = {event: index for index, event in enumerate(sends, 1)}
    start = [0.0] + [_NONE] * len(sends)
    free = dict.fromkeys(range(len(events)), start)
    lanes: dict[tuple[int, int], Chains] = {}
    done: dict[Event, Chains] = {}
    places = [0] * len(events)
    receives: dict[str, tuple[float | None, ...]] = {}
    for number, event in in_turn(orders, last):
        one, index = events[number], places[number]
        places[number] += 1
        to = target(event, last)
        if number == own:
            if event in position:
                done[event] = [_NONE] * position[event] + [0.0] + [_NONE] * (len(sends) - position[event])
            continue
        need = needs(event, last)
        ready = free[number] if need is None else _latest(free[number], done[need])
        free[number] = done[event] = _later(ready, one.seconds[index])
        size = one.sent[index]
        if to is not None and size and where[to] != number:
            lane = (number, where[to])
            sent = _later(_latest(done[event], lanes.get(lane, done[event])), one.speeds.p2p_time(size) * one.speeds.slowdown)
            lanes[lane] = done[event] = sent
            if where[to] == own:
                receives[name_of(event.kind, event.stage, event.micro)] = _plain(sent)
    end = [_NONE] * (1 + len(sends))
    for number in free:
        if number != own:
            end = _latest(end, free[number])
    return Arrivals(sends=tuple(name_of(event.kind, event.stage, event.micro) for event in sends), receives=receives, end=_plain(end))


def _latest(one: Chains, other: Chains) -> Chains:
    return list(map(max, one, other))


def _later(chains: Chains, seconds: float) -> Chains:
    return [value + seconds for value in chains]


def _plain(chains: Chains) -> tuple[float | None, ...]:
    return tuple(None if value == _NONE else value for value in chains)
