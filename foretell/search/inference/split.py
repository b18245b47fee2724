"""Inference split over unlike devices: every split that is best at something (after ParetoPipe).

    units (blocks, and what is before and after them) in the order they run, seconds of each on each device,
    bytes that cross behind each ─► contiguous splits over devices in any order
                                 ─► those that no other beats in latency, throughput and memory at once: the front

A request goes through the devices one after the other: latency is the sum of their seconds and of the messages between
them. Requests follow each other: throughput is one over the slowest device or message. Memory is how full the fullest
device is. The input is on the first device of the cluster; what leads it elsewhere counts, the way of the answer back
does not.

All three only grow as a split goes on, so that of partial splits that end at the same unit on the same device those
that are beaten can be left: dynamic programming over fronts, equal to trying every split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from foretell.errors import UserError
from foretell.search.solve import engine

MOST_FREE = 6
"""Devices whose order is free; more than these are taken in the order of the cluster."""


@dataclass(frozen=True, kw_only=True)
class InferenceUnit:
    """A piece of the model that is not split further."""

    name: str
    seconds: tuple[float, ...]
    """On each device."""
    weights: tuple[tuple[int, int], ...] = ()
    """(Number of a tensor, its bytes): parameters and buffers; one that two units use is held once by a device."""
    live_bytes: int = 0
    """The most that its activations take while it runs."""
    sends_bytes: int = 0
    """What later units need of this one and those before it."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """One device to split over."""

    name: str
    memory_bytes: int
    beside_bytes: int = 0
    """Taken beside the model."""
    like: int = 0
    """Devices of one number are alike, links and all: only one order of them is tried."""


@dataclass(frozen=True, kw_only=True)
class DevicePart:
    """The units one device runs."""

    device: int
    """Its number in the cluster."""
    name: str
    first: int
    last: int
    """Unit after the last."""
    seconds: float
    bytes: int
    receives_bytes: int
    receives_seconds: float


@dataclass(frozen=True, kw_only=True)
class InferenceSplit:
    """One way to split a model."""

    parts: tuple[DevicePart, ...]
    latency_seconds: float
    slowest_seconds: float
    """Of the device or message that the others wait for."""
    fullest: float
    """Share of its memory that the fullest device uses."""

    @property
    def per_second(self) -> float:
        """Requests a second, as they follow each other."""
        return 1 / self.slowest_seconds


Link = Callable[[int, int, int], float]
"""(From device, to device, bytes) → seconds of one message."""


class _Label(NamedTuple):
    latency: float
    slowest: float
    fullest: float
    parts: tuple[DevicePart, ...]
    used: int
    """Devices, a bit for each."""

    def beaten_by(self, other: _Label) -> bool:
        return other.latency <= self.latency and other.slowest <= self.slowest and other.fullest <= self.fullest


def split_front(units: Sequence[InferenceUnit], places: Sequence[Place], link: Link, input_bytes: int = 0) -> tuple[InferenceSplit, ...]:
    """Every split that no other beats in latency, throughput and memory at once; the lowest latency first.

    None where nothing fits. Of splits that are equal in all three, one is kept: the one with fewest devices.
    """
    if not units or not places:
        raise UserError("there is nothing to split, or nothing to split it over", "a model and at least one device")
    found = _Splits(units, places, link, input_bytes).front()
    return tuple(
        InferenceSplit(parts=one.parts, latency_seconds=one.latency, slowest_seconds=one.slowest, fullest=one.fullest) for one in found
    )


class _Splits:
    """What is searched: a candidate is a split of the first units, grown by a device each round."""

    def __init__(self, units: Sequence[InferenceUnit], places: Sequence[Place], link: Link, input_bytes: int) -> None:
        self.units, self.places, self.link, self.input_bytes = units, places, link, input_bytes
        self.free = len(places) <= MOST_FREE
        self.sums = [[0.0] for _ in places]
        for device, sums in enumerate(self.sums):
            for unit in units:
                if not 0 <= unit.seconds[device] < float("inf"):
                    raise UserError(f"{unit.name} takes {unit.seconds[device]} seconds", "a number of at least 0")
                sums.append(sums[-1] + unit.seconds[device])
        self.sizes = [_sizes(units, start) for start in range(len(units))]
        """Start → end → bytes of weights and activations."""
        self.done: list[_Label] = []
        self.open: dict[tuple[int, int, int], list[_Label]] = {(0, -1, 0): [_Label(0.0, 0.0, 0.0, (), 0)]}
        """Devices used, the last of them and the next unit → splits of the units before that no other beats."""
        self.costed = 0

    def front(self) -> list[_Label]:
        if engine.search(self):
            raise KeyboardInterrupt
        return sorted(self.done, key=lambda label: (label.latency, label.slowest, label.fullest))

    def candidates(self) -> Iterator[_Label]:
        """Splits over one device first, then over two, and so on."""
        for _ in self.places:
            states, self.open = self.open, {}
            for (used, last, start), labels in states.items():
                fine = [label for label in labels if not self.hopeless(label)]
                for device in self._next(used, last):
                    for end in range(start + 1, len(self.units) + 1):
                        yield from self._grown(fine, last, device, start, end)

    def hopeless(self, one: _Label) -> bool:
        """Whether a whole split beats it: it only gets worse as it goes on."""
        return any(one.beaten_by(other) for other in self.done)

    def cost(self, one: _Label) -> None:
        self.costed += 1
        last = one.parts[-1]
        whole = last.last == len(self.units)
        _keep(self.done if whole else self.open.setdefault((one.used, last.device, last.last), []), one)

    def _next(self, used: int, last: int) -> Iterator[int]:
        seen = set()
        for device, place in enumerate(self.places):
            if used >> device & 1 or (not self.free and device <= last):
                continue
            if place.like in seen:  # in the order of the cluster too: the first of them leaves all others for later
                continue
            seen.add(place.like)
            yield device

    def _grown(self, labels: Sequence[_Label], last: int, device: int, start: int, end: int) -> Iterator[_Label]:
        place = self.places[device]
        size = self.sizes[start][end] + place.beside_bytes
        if size > place.memory_bytes:
            return
        source, nbytes = (0, self.input_bytes) if last < 0 else (last, self.units[start - 1].sends_bytes)
        message = self.link(source, device, nbytes) if source != device else 0.0
        seconds = self.sums[device][end] - self.sums[device][start]
        part = DevicePart(
            device=device, name=place.name, first=start, last=end, seconds=seconds, bytes=size,
            receives_bytes=nbytes, receives_seconds=message,
        )  # fmt: skip
        for label in labels:
            yield _Label(
                label.latency + message + seconds, max(label.slowest, message, seconds),
                max(label.fullest, size / place.memory_bytes), (*label.parts, part), label.used | 1 << device,
            )  # fmt: skip


def _keep(front: list[_Label], label: _Label) -> None:
    """Into the front, without what it beats; not at all where it is beaten."""
    if any(label.beaten_by(other) for other in front):
        return
    front[:] = [other for other in front if not other.beaten_by(label)]
    front.append(label)


def _sizes(units: Sequence[InferenceUnit], start: int) -> list[int]:
    """End → bytes of the units from `start` on; a tensor that several use counts once."""
    held: set[int] = set()
    weights = live = 0
    found = [0] * (start + 1)
    for unit in units[start:]:
        for number, nbytes in unit.weights:
            if number not in held:
                held.add(number)
                weights += nbytes
        live = max(live, unit.live_bytes)
        found.append(weights + live)
    return found
