"""In which order each rank of a pipeline runs forwards and backwards of its stages. Plain data, no torch.

    F forward    B backward, whole    I gradients of inputs    W gradients of weights

The orders are those of `torch.distributed.pipelining`; a test holds every one of them against it. A looped schedule
deals with micro-batches in rounds: as many forwards of one stage as a round has, then of the rank's next stage, and
backwards likewise from the last stage. The V has two stages a rank, the second on the way back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from foretell.errors import UserError


class Event(NamedTuple):
    """One micro-batch at one stage."""

    kind: str
    """F, B, I or W."""
    stage: int
    micro: int


Order = tuple[Event, ...]


def orders(schedule: str, ranks: int, stages: int, micro_batches: int) -> tuple[Order, ...]:
    """What every rank runs, in order."""
    if schedule == "gpipe":
        return tuple(tuple(_all_forward(rank, micro_batches)) for rank in range(ranks))
    if schedule == "1f1b":
        return tuple(tuple(_one_by_one(rank, ranks, micro_batches)) for rank in range(ranks))
    if schedule == "zero-bubble-v":
        return tuple(tuple(_there_and_back(rank, ranks, micro_batches)) for rank in range(ranks))
    split = schedule == "zero-bubble"
    return tuple(tuple(_in_rounds(rank, ranks, stages // ranks, micro_batches, split)) for rank in range(ranks))


def needs(event: Event, last: int) -> Event | None:
    """The event that must have ended, and sent, before this one; `last` is the last stage."""
    kind, stage, micro = event
    if kind == "F":
        return Event("F", stage - 1, micro) if stage else None
    if kind == "W":
        return Event("I", stage, micro)
    return Event(kind, stage + 1, micro) if stage < last else Event("F", stage, micro)


def target(event: Event, last: int) -> int | None:
    """The stage that an event sends to."""
    if event.kind == "F":
        return event.stage + 1 if event.stage < last else None
    return event.stage - 1 if event.kind in "BI" and event.stage else None


def in_turn(every: Sequence[Sequence[Event]], last: int) -> Iterator[tuple[int, Event]]:
    """Rank and event of all ranks' orders, each after the one that it needs."""
    done: set[Event] = set()
    places = [0] * len(every)
    while any(place < len(mine) for place, mine in zip(places, every, strict=True)):
        before = len(done)
        for rank, mine in enumerate(every):
            while places[rank] < len(mine):
                event = mine[places[rank]]
                need = needs(event, last)
                if need is not None and need not in done:
                    break
                yield rank, event
                done.add(event)
                places[rank] += 1
        if len(done) == before:
            raise UserError("the schedule waits for itself with so few micro-batches", "take more of them")


def _all_forward(rank: int, count: int) -> Iterator[Event]:
    for kind in "FB":
        for micro in range(count):
            yield Event(kind, rank, micro)


def _one_by_one(rank: int, ranks: int, count: int) -> Iterator[Event]:
    """As many forwards as there are ranks from here on, then a backward before every further forward."""
    ahead = min(count, ranks - rank)
    for micro in range(ahead):
        yield Event("F", rank, micro)
    for micro in range(count):
        yield Event("B", rank, micro)
        if micro + ahead < count:
            yield Event("F", rank, micro + ahead)


def _in_rounds(rank: int, ranks: int, held: int, count: int, split: bool) -> Iterator[Event]:
    """Several stages a rank, taken in turn; with `split`, weights' gradients come later, from the rank-th backward on."""
    each = count // max(1, count // ranks)
    total = held * count
    ahead = min((held - 1) * each + (1 if split else 2) * (ranks - 1 - rank), total)
    forward, backward = _Turns(rank, ranks, held, each), _Turns(rank, ranks, held, each, last_first=True)
    waiting: list[Event] = []
    for _ in range(ahead):
        yield forward.next("F")
    for step in range(total):
        if step < total - ahead:
            yield forward.next("F")
        event = backward.next("I" if split else "B")
        yield event
        if split:
            waiting.append(event._replace(kind="W"))
            if step >= rank:
                yield waiting.pop(0)
    yield from waiting


class _Turns:
    """Deals out micro-batches of a rank's stages, a round of one stage after the other."""

    def __init__(self, rank: int, ranks: int, held: int, each: int, *, last_first: bool = False) -> None:
        self.rank, self.ranks, self.held, self.each, self.last_first = rank, ranks, held, each, last_first
        self.step = 0
        self.done = [0] * held

    def next(self, kind: str) -> Event:
        place = self.step // self.each % self.held
        place = self.held - 1 - place if self.last_first else place
        self.step += 1
        self.done[place] += 1
        return Event(kind, place * self.ranks + self.rank, self.done[place] - 1)


def _there_and_back(rank: int, ranks: int, count: int) -> Iterator[Event]:
    """Two stages a rank; with fewer micro-batches than fill the V, the missing ones are left out."""
    wanted = max(2 * ranks - 1, count)
    made = _Both(rank, 2 * ranks - 1 - rank)
    for _ in range(2 * (ranks - rank) - 1):
        made.forward(0)
    for _ in range(rank):
        made.forward(1)
        made.forward(0)
    for _ in range(ranks - rank):
        made.forward(1)
        made.backward(1)
    while made.forwards[1] < made.forwards[0] or made.forwards[0] < wanted:
        if made.forwards[0] < wanted:
            made.forward(0)
        made.backward(0)
        made.forward(1)
        made.backward(1)
    for _ in range(rank):
        made.inputs(0)
        made.inputs(1)
    for _ in range(ranks - rank):
        made.inputs(0)
        made.weights(0)
    for place in (1, 0):
        while made.weighed[place] < made.backwards[place]:
            made.weights(place)
    yield from (event for event in made.events if event.micro < count)


class _Both:
    """The events of a rank with two stages, counted."""

    def __init__(self, first: int, second: int) -> None:
        self.stages = (first, second)
        self.events: list[Event] = []
        self.forwards, self.backwards, self.weighed = [0, 0], [0, 0], [0, 0]

    def _add(self, kind: str, place: int, counts: list[int]) -> None:
        self.events.append(Event(kind, self.stages[place], counts[place]))
        counts[place] += 1

    def forward(self, place: int) -> None:
        self._add("F", place, self.forwards)

    def inputs(self, place: int) -> None:
        self._add("I", place, self.backwards)

    def weights(self, place: int) -> None:
        self._add("W", place, self.weighed)

    def backward(self, place: int) -> None:
        self.inputs(place)
        self.weights(place)
