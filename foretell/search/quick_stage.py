"""One rank's part of a step, put together from a sheet: seconds of forward and backward, bytes at their highest.

Gathers and scatters of fully_shard are laid beside compute block by block, as `simulate.time.step` lays them op by op:

    forward    │ gather │ copy │ block 0 │ gather │ copy │ block 1 │ …            a gather waits for the block before
    backward   │ copy │ block 1 ──────────│ copy │ block 0 ──────│ …              gathers and scatters beside compute,
    links             │ gather 0 ──│ scatter 1 ──│ …                              which is slower meanwhile

A run of alike blocks is walked for a few of them; the others take as long as the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foretell.price.time import DRAG
from foretell.quantities import COLLECTIVES
from foretell.search.sheet import Unit, Works
from foretell.search.sheet_ops import AFTER, BEFORE
from foretell.search.sheet_work import Half, Message, Work

WALKED = 4
"""Blocks of a run that are walked one by one."""
SLOWER = DRAG[COLLECTIVES]
Talk = Callable[[str, str, float], float]
"""Axis, operation and bytes → seconds."""
Run = tuple[int, str, int]
"""Kind, residency and how many in a row."""


@dataclass(frozen=True)
class Way:
    """How parameters are shared by ranks."""

    shards: int
    replicas: int
    reshard: bool | int

    @property
    def data(self) -> bool:
        return self.shards * self.replicas > 1


@dataclass(frozen=True)
class Stage:
    """The blocks of one stage, as runs of alike ones; and whether it has what is before and after the blocks."""

    runs: tuple[Run, ...]
    first: bool = True
    last: bool = True


def keys_of(stage: Stage, root: str = "root") -> list[tuple[int | str, int]]:
    """The units of a stage: the root's, and one for each block of a run."""
    return [(root, 1), *((kind, count) for kind, _, count in stage.runs)]


@dataclass
class Seconds:
    """Of one micro-batch, or of one event of a pipeline."""

    total: float = 0.0
    """On the device, with messages that are waited for."""
    host: float = 0.0
    product: float = 0.0
    attention: float = 0.0
    device: float = 0.0
    """All ops, undisturbed."""
    again: float = 0.0
    waited: dict[str, float] = field(default_factory=dict)
    """Axis → seconds compute waits for its messages."""
    flops: float = 0.0
    moved: float = 0.0

    def wait(self, axis: str, seconds: float) -> None:
        if seconds > 0:
            self.waited[axis] = self.waited.get(axis, 0.0) + seconds

    def add(self, half: Half, times: int = 1) -> None:
        self.host += half.host * times
        self.product += half.product * times
        self.attention += half.attention * times
        self.device += half.seconds * times
        self.flops += half.flops * times
        self.moved += half.moved * times

    def plus(self, other: Seconds, times: float = 1.0) -> None:
        for name in ("total", "host", "product", "attention", "device", "again", "flops", "moved"):
            setattr(self, name, getattr(self, name) + times * getattr(other, name))
        for axis, seconds in other.waited.items():
            self.wait(axis, seconds * times)


_NOWHERE = Seconds()
"""For sums that are not kept."""


# ---------------------------------------------------------------------- time


class Clock:
    """Compute, and one lane for each data axis beside it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.free = {"dp_shard": 0.0, "dp_replicate": 0.0}

    def compute(self, seconds: float) -> None:
        """Run, slower while messages travel."""
        left, now = seconds, self.now
        for end in sorted(self.free.values()):
            if end <= now or left <= 0:
                continue
            slow = 1.0 + SLOWER * sum(other >= end for other in self.free.values())
            window = end - now
            if left * slow <= window:
                now, left = now + left * slow, 0.0
            else:
                now, left = end, left - window / slow
        self.now = now + left

    def send(self, axis: str, seconds: float, after: float = 0.0) -> float:
        """Put a message on a lane; when it has arrived."""
        if not seconds:
            return max(self.now, after)
        start = max(self.free[axis], self.now, after)
        self.free[axis] = start + seconds
        return start + seconds


class Timer:
    """Seconds of the events of one stage."""

    def __init__(self, works: Works, way: Way, talk: Talk, issue: Callable[[str], float]) -> None:
        self.works, self.way, self.talk, self.issue = works, way, talk, issue

    def unit(self, key: int | str) -> Unit:
        return self.works.unit(key, self.way.shards, data=self.way.data)

    def messages(self, sent: Sequence[Message], found: Seconds) -> float:
        if not sent:
            return 0.0
        total = 0.0
        for one in sent:
            seconds = self.talk(one.axis, one.kind, one.nbytes) * one.times
            found.wait(one.axis, seconds)
            total += seconds
        return total

    def gather(self, unit: Unit, *, again: bool = False) -> float:
        """Seconds to gather a unit; `again`: in backward, where fewer ranks may hold it together since forward."""
        if self.way.shards == 1 or not unit.tensors:
            return 0.0
        fewer = again and not isinstance(self.way.reshard, bool) and self.way.reshard > 1
        seconds = self.talk(f"dp_shard:{self.way.reshard}" if fewer else "dp_shard", "all_gather", unit.rest.gather_output)
        mine = unit.experts
        return seconds + (self.talk(f"dp_shard:{mine.ranks}", "all_gather", mine.gather_output) if mine is not None else 0.0)

    def scatter(self, unit: Unit) -> float:
        """Seconds to scatter a unit's gradients."""
        if self.way.shards == 1:
            return 0.0
        mine = unit.experts
        seconds = self.talk("dp_shard", "reduce_scatter", unit.rest.reduce_input)
        return seconds + (self.talk(f"dp_shard:{mine.ranks}", "reduce_scatter", mine.reduce_input) if mine is not None else 0.0)

    def forward(self, stage: Stage, root: str, *, gathers: bool = True) -> Seconds:
        """One forward of a stage. `gathers`: its parameters are not whole yet."""
        found = Seconds()
        if self.way.data and gathers:
            self._gathering(stage, root, found)
            return found
        if stage.first:
            self._plain(self.works.work(BEFORE).forward, 1, found)
        for kind, mode, count in stage.runs:
            self._plain(self.works.work(kind, mode).forward, count, found)
        if stage.last:
            self._plain(self.works.work(AFTER).forward, 1, found)
        return found

    def _gathering(self, stage: Stage, root: str, found: Seconds) -> None:
        """Forward with parameters in shards: the next unit is gathered while one computes."""
        clock = Clock()
        units = [self.unit(kind) for kind, _, _ in stage.runs]
        ready = self._whole(self.unit(root), clock.send("dp_shard", self.gather(self.unit(root))), units[:1], clock, found)
        if stage.first:
            self._ahead(self.works.work(BEFORE).forward, clock, found)
        for place, (kind, mode, count) in enumerate(stage.runs):
            unit, half = units[place], self.works.work(kind, mode).forward
            for number in range(min(count, WALKED)):
                before, waits = clock.now, found.waited.get("dp_shard", 0.0)
                following = [unit] if number < count - 1 else units[place + 1 : place + 2]
                ready = self._whole(unit, ready, following, clock, found)
                self._ahead(half, clock, found)
            more, step = max(0, count - WALKED), clock.now - before
            clock.now, ready = clock.now + more * step, ready + more * step
            clock.free["dp_shard"] += more * step
            found.wait("dp_shard", more * (found.waited.get("dp_shard", 0.0) - waits))
            for one in half.messages:
                found.wait(one.axis, more * self.talk(one.axis, one.kind, one.nbytes) * one.times)
            found.add(half, more)
            found.device += more * unit.copy_out
            found.host += more * self._issued(unit) + count * self.issue("foretell.reshard")
        if stage.last:
            self._ahead(self.works.work(AFTER).forward, clock, found)
        found.total = clock.now

    def _whole(self, unit: Unit, ready: float, following: Sequence[Unit], clock: Clock, found: Seconds) -> float:
        """Waited for and copied out, and the next one asked for: when that will be there."""
        found.wait("dp_shard", ready - clock.now)
        clock.now = max(clock.now, ready)
        clock.compute(unit.copy_out)
        found.device += unit.copy_out
        found.host += self._issued(unit)
        return clock.send("dp_shard", self.gather(following[0])) if following else clock.now

    def _ahead(self, half: Half, clock: Clock, found: Seconds) -> None:
        found.add(half)
        clock.compute(half.seconds)
        clock.now += self.messages(half.messages, found)

    def _plain(self, half: Half, count: int, found: Seconds) -> None:
        found.add(half, count)
        sent = self.messages(half.messages, _NOWHERE) if half.messages else 0.0
        found.total += count * (half.seconds + sent)
        for one in half.messages:
            found.wait(one.axis, count * self.talk(one.axis, one.kind, one.nbytes) * one.times)

    def _issued(self, unit: Unit) -> float:
        """Host seconds of making a unit whole: one gather, or casts and copies of each parameter."""
        if not unit.tensors:
            return 0.0
        one = self.issue("foretell.all_gather") + self.issue("foretell.all_gather_copy_out")
        cast = self.issue("aten._to_copy.default") if self.works.material.wide else 0.0
        each, waits = cast + self.issue("aten.copy_.default"), self.issue("foretell.all_gather_wait")
        if self.way.shards == 1:
            return waits + unit.tensors * each
        mine = unit.experts
        return one + (0.0 if mine is None else one if mine.ranks > 1 else waits + mine.tensors * each)

    def backward(self, stage: Stage, root: str, *, gathers: bool = True, reduces: bool = True, sums: bool = True) -> Seconds:
        """One backward of a stage. `reduces`: gradients are scattered; `sums`: and summed over replicas."""
        found, clock = Seconds(), Clock()
        data = self.way.data
        gathers = gathers and data and self.way.reshard is not False
        order: list[tuple[Work, Unit | None]] = []
        jumps: dict[int, int] = {}
        for kind, mode, count in reversed(stage.runs):
            work, unit = self.works.work(kind, mode), self.unit(kind) if data else None
            order += [(work, unit)] * min(count, WALKED)
            if count > WALKED:
                jumps[len(order) - 1] = count - WALKED
        ready = self._prefetched(order, 0, clock) if gathers else 0.0
        if stage.last:
            self._run(self.works.work(AFTER), clock, found)
        for place, (work, unit) in enumerate(order):
            before, lanes = clock.now, dict(clock.free)
            if unit is not None and gathers:
                found.wait("dp_shard", ready - clock.now)
                clock.now = max(clock.now, ready)
                clock.compute(unit.copy_out)
                ready = self._prefetched(order, place + 1, clock)
            waits = found.waited.get("dp_shard", 0.0)
            again = found.again
            self._run(work, clock, found)
            if unit is not None:
                self._ended(unit, clock, found, gathers, reduces, sums)
            if place in jumps:
                more = jumps[place]
                step = clock.now - before
                clock.now += more * step
                ready += more * step if ready else 0.0
                for axis in clock.free:
                    clock.free[axis] += more * max(0.0, clock.free[axis] - lanes[axis]) if clock.free[axis] > lanes[axis] else 0.0
                self._repeat(work, unit, more, found, gathers, reduces, found.again - again)
                found.wait("dp_shard", more * (found.waited.get("dp_shard", 0.0) - waits))
        if stage.first:
            self._run(self.works.work(BEFORE), clock, found)
        if data:
            self._ended(self.unit(root), clock, found, gathers=False, reduces=reduces, sums=sums)
        end = max(clock.now, *clock.free.values()) if reduces else clock.now
        for axis, free in clock.free.items():
            found.wait(axis, (free - clock.now) if reduces else 0.0)
        found.total = end
        return found

    def _prefetched(self, order: Sequence[tuple[Work, Unit | None]], place: int, clock: Clock) -> float:
        if place >= len(order):
            return 0.0
        unit = order[place][1]
        assert unit is not None
        seconds = self.gather(unit, again=True)
        return clock.send("dp_shard", seconds) if seconds else 0.0

    def _run(self, work: Work, clock: Clock, found: Seconds) -> None:
        half = work.backward
        found.add(half)
        found.again += work.again
        clock.compute(half.seconds)
        clock.now += self.messages(half.messages, found)

    def _ended(self, unit: Unit, clock: Clock, found: Seconds, gathers: bool, reduces: bool, sums: bool) -> None:
        """A unit's gradients are copied together and sent; in a pipeline they are added up until the last one."""
        if not unit.tensors:
            return
        found.host += self.issue("foretell.reshard") * _messages(unit) + self._issued(unit) * gathers
        found.device += unit.copy_out * gathers
        if not reduces:
            clock.compute(unit.adding)
            found.device += unit.adding
            found.host += unit.trained * self.issue("aten.add_.Tensor")
            return
        if not unit.trained:
            return
        clock.compute(unit.copy_in)
        found.device += unit.copy_in
        scattered = self.issue("foretell.reduce_scatter_copy_in") + self.issue("foretell.reduce_scatter")
        found.host += _messages(unit) * (scattered + self.issue("foretell.all_reduce") * (self.way.replicas > 1 and sums))
        done = clock.now
        if self.way.shards > 1:
            done = clock.send("dp_shard", self.scatter(unit))
        if self.way.replicas > 1 and sums:
            clock.send("dp_replicate", self.talk("dp_replicate", "all_reduce", unit.partial), done)

    def _repeat(
        self, work: Work, unit: Unit | None, more: int, found: Seconds, gathers: bool, reduces: bool, again: float
    ) -> None:
        """What is counted of blocks that were not walked."""
        found.add(work.backward, more)
        found.again += more * again
        for m in work.backward.messages:
            found.wait(m.axis, more * self.talk(m.axis, m.kind, m.nbytes) * m.times)
        if unit is not None:
            shadow = Seconds()
            self._ended(unit, Clock(), shadow, gathers, reduces, True)
            found.host += more * shadow.host
            found.device += more * shadow.device

    def reduce_all(self, stage: Stage, root: str) -> Seconds:
        """After a stage's last backward in a pipeline: all of it is scattered, one unit after the other."""
        found, clock = Seconds(), Clock()
        for key, count in keys_of(stage, root):
            for _ in range(min(count, WALKED)):
                self._ended(self.unit(key), clock, found, gathers=False, reduces=True, sums=True)
            if count > WALKED:
                unit, left = self.unit(key), count - WALKED
                each = max(unit.copy_in, self.scatter(unit))
                if self.way.replicas > 1:
                    each = max(each, self.talk("dp_replicate", "all_reduce", unit.partial))
                clock.now += left * unit.copy_in
                for axis in clock.free:
                    clock.free[axis] = clock.free[axis] + left * each if clock.free[axis] else 0.0
                found.host += left * (self.issue("foretell.reduce_scatter_copy_in") + self.issue("foretell.reduce_scatter"))
                found.device += left * unit.copy_in
        found.total = max(clock.now, *clock.free.values())
        found.wait("dp_shard", found.total - found.device)
        return found


def _messages(unit: Unit) -> int:
    """Gathers that make a unit whole: experts have one of their own."""
    return 1 if unit.experts is None else 2
