"""How long a step takes whose states, or weights, come and go beside it: the lanes, played through.

    compute   │ forward: waits for each unit's update │ backward: leaves units │ norm │
    up        states, gradients and weights to the device      one chunk after the other, a ring of buffers ahead
    work      updates on the device                            take the device from compute, unless that waits anyway
    down      states back                                      and gradients for the CPU, and of weights that are elsewhere
    cpu       updates on the host

What is played is when compute, undisturbed, needs each unit and leaves it (`marks_of`), step after step until steps are
alike. With clipping all units are offered when the norm is known; without, each when backward leaves it, and of those
offered the one that is needed first is taken (as `runtime.offload.pump` does).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from foretell.lower.offload.states import NEED, StateUnit
from foretell.plan.states import CHUNK, DEVICE, HOST, SLOTS
from foretell.price.offload import OffloadBytes, Rates
from foretell.quantities import COMPUTE, D2H, H2D
from foretell.simulate.time.streams import Timeline

STEPS = 8
"""Played at most, until two are alike."""
ALIKE = 1e-3


# ---------------------------------------------------------------------- what compute does, undisturbed


@dataclass(frozen=True)
class Mark:
    """A moment of the undisturbed step."""

    seconds: float
    what: str
    """need, leave, enter (a block's forward or backward begins), or the link and the way that something else takes it."""
    path: str
    takes: float = 0.0
    """Seconds of the link."""


@dataclass(frozen=True)
class Marks:
    """All of a step, in their order."""

    found: tuple[Mark, ...]
    end: float


def marks_of(timeline: Timeline, paths: Iterable[str]) -> Marks:
    """When a step needs, enters and leaves units. Seconds count from its start."""
    known = tuple(path for path in paths if path)

    @cache
    def owner_of(module: str) -> str:
        return next((path for path in known if module == path or module.startswith(f"{path}.")), "")

    found: list[Mark] = []
    left: dict[str, float] = {}
    last, rest = ("", ""), 0.0
    for task, start, finish in zip(timeline.tasks, timeline.start, timeline.finish, strict=True):
        if task.name == NEED:
            found.append(Mark(max(0.0, start), "need", task.module))
            continue
        if task.resource in (H2D, D2H):
            found.append(Mark(max(0.0, start), task.resource, "", task.seconds))
        if task.phase == "update" or task.resource != COMPUTE:
            continue
        owner = owner_of(task.module)
        way = "forward" if task.phase == "forward" else "backward"
        if owner and (way, owner) != last:
            last = (way, owner)
            found.append(Mark(max(0.0, start), "enter", owner))
        if way == "backward":
            rest = max(rest, finish)
            if owner:
                left[owner] = finish
    found += [Mark(seconds, "leave", path) for path, seconds in left.items()]
    found.append(Mark(rest, "leave", ""))
    return Marks(tuple(sorted(found, key=lambda mark: mark.seconds)), timeline.seconds)


# ---------------------------------------------------------------------- the lanes


@dataclass
class _Lanes:
    """Until when each lane is taken, and what is offered to them."""

    units: Mapping[str, StateUnit]
    rates: Rates
    load: OffloadBytes
    up: float = 0.0
    work: float = 0.0
    home: float = 0.0
    down: float = 0.0
    cpu: float = 0.0
    pump: float = 0.0
    worked: float = 0.0
    """Seconds of updates on the device."""
    slots: list[float] = field(default_factory=lambda: [0.0] * SLOTS)
    turn: int = 0
    offered: dict[str, float] = field(default_factory=dict)
    done: dict[str, float] = field(default_factory=dict)
    staged: dict[str, float] = field(default_factory=dict)
    """Unit → when its gradients are on the host."""

    def __post_init__(self) -> None:
        self.order = {path: number for number, path in enumerate(self.units)}

    def offer(self, path: str, at: float) -> None:
        unit = self.units[path]
        if not unit.away and not self.load.early:  # such states have no way to go, and wait for nobody
            self.home = self.done[path] = max(self.home, at) + self._spent(unit.elements)
            return
        self.offered[path] = at
        share = self.load.cpu_share if unit.away else 0.0
        if share and self.rates.cpu:
            self.cpu = max(self.cpu, self.staged.pop(path, at), at) + unit.elements * share / self.rates.cpu
            coming = unit.elements * share * self.load.weight / self.rates.up
            self.done[path] = self.cpu + coming

    def stage(self, path: str, at: float) -> None:
        """Gradients that go down when backward leaves a unit: the CPU's share, or all where weights are elsewhere."""
        unit = self.units[path]
        share = 1.0 if unit.streamed else self.load.cpu_share if unit.away else 0.0
        if share:
            self.down = max(self.down, at) + unit.elements * share * self.load.weight / self.rates.down
            self.staged[path] = self.down

    def bring(self, path: str, at: float, again: bool) -> float:
        """When a block's weights have come; `again`: and its gradients, which went down after the micro-batch before."""
        nbytes = self.units[path].elements * self.load.weight
        self.up = max(self.up, at, self.done.pop(path, 0.0)) + nbytes * (2 if again else 1) / self.rates.up
        self.down = max(self.down, at) + (nbytes / self.rates.down if again else 0.0)
        return self.up

    def taken(self, way: str, at: float, seconds: float) -> None:
        """The link by something else."""
        if way == H2D:
            self.up = max(self.up, at) + seconds
        else:
            self.down = max(self.down, at) + seconds

    def until(self, at: float, path: str | None = None) -> None:
        """Take what is offered until `at`, or until a unit is taken."""
        while path in self.offered if path is not None else self.offered:
            now = max(self.pump, min(self.offered.values()))
            if path is None and now > at:
                return
            ready = [name for name, since in self.offered.items() if since <= now]
            self._take(min(ready, key=self.order.__getitem__), now)

    def _spent(self, elements: int) -> float:
        """Seconds of the device on an update."""
        spent = elements * self.load.touched / self.rates.device
        self.worked += spent
        return spent

    def _take(self, path: str, now: float) -> None:
        unit, load, rates = self.units[path], self.load, self.rates
        since = self.offered.pop(path)
        left = int(unit.elements * (1 - load.cpu_share)) if unit.away else unit.elements
        more = load.weight if unit.streamed else 0
        up = (load.states + more) / rates.up
        down = (load.states + more) / rates.down
        if load.cpu_share and left and unit.away:  # new weights come beside
            up += load.cpu_share / (1 - load.cpu_share) * load.weight / rates.up
        if unit.tier not in (DEVICE, HOST) and rates.disk:
            up, down = max(up, load.states / rates.disk), max(down, load.states / rates.disk)
        end = self.pump = now
        while left > 0:
            elements = min(CHUNK, left)
            left -= elements
            spent = self._spent(elements)
            if not unit.away:
                self.home = end = max(self.home, since) + spent
            else:
                self.pump = max(self.pump, self.slots[self.turn])
                self.up = max(self.up, self.pump) + elements * up
                self.work = max(self.work, self.up) + spent
                self.down = max(self.down, self.work) + elements * down
                self.slots[self.turn] = self.down
                self.turn = (self.turn + 1) % SLOTS
                end = self.down if unit.streamed else self.work
        self.done[path] = max(self.done.get(path, 0.0), end)


@dataclass(frozen=True)
class Played:
    """A steady step."""

    seconds: float
    waited: float
    """Of them, in which compute waited for states or weights, or gave the device to updates."""


def played(marks: Marks, units: Sequence[StateUnit], load: OffloadBytes, rates: Rates) -> Played:
    """The step once it is like the one before."""
    each = load.states
    lanes = _Lanes({unit.path: unit for unit in units}, rates.together(each, load.cpu_share), load)
    begin, before = 0.0, 0.0
    for number in range(STEPS):
        seconds = _step(marks, lanes, begin)
        if number > 1 and abs(seconds - before) < ALIKE * seconds:
            break
        begin, before = begin + seconds, seconds
    return Played(seconds, seconds - marks.end)


def _step(marks: Marks, lanes: _Lanes, begin: float) -> float:
    """Seconds of one step; what is not needed in it goes on in the next."""
    late = earlier = lanes.worked = 0.0
    before, turns = "", dict.fromkeys(lanes.units, 0)
    for mark in marks.found:
        now = begin + mark.seconds + late
        lanes.until(now)
        unit = lanes.units.get(mark.path)
        if mark.what in (H2D, D2H):
            lanes.taken(mark.what, now, mark.takes)
        elif unit is None:
            continue
        elif mark.what == "need":
            lanes.until(now, mark.path)
            late += 0.0 if unit.streamed else max(0.0, lanes.done.pop(mark.path, 0.0) - now)
        elif mark.what == "enter":
            turns[mark.path] += 1
            if unit.streamed and mark.path != before:  # asked for when the block before was entered
                again = turns[mark.path] > 2 and turns[mark.path] % 2 == 0  # every second time for backward
                late += max(0.0, lanes.bring(mark.path, begin + earlier + late, again) - now)
            earlier, before = mark.seconds, mark.path
        else:
            lanes.stage(mark.path, now)
            if lanes.load.early:
                lanes.offer(mark.path, now)
    end = begin + marks.end + late
    if not lanes.load.early:
        for path in lanes.units:
            lanes.offer(path, end)
    lanes.until(end)
    return marks.end + late + max(0.0, lanes.worked - late)
