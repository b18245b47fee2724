"""Bytes of one rank over a steady step, by what they are held for; and the same as a PyTorch memory snapshot. No torch.

A GPU's step is replayed through the simulated caching allocator, after a first step and a steady one, so that what is
shown is a step of a long run. On a CPU, which has no such allocator, it is the live bytes.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from foretell.errors import UserError
from foretell.files import write_atomically
from foretell.hardware import overhead
from foretell.hardware.types import Cluster
from foretell.price.time import Machine, op_prices
from foretell.quantities import CATEGORIES
from foretell.simulate.memory.allocator import SMALL_SEGMENT
from foretell.simulate.memory.memory import CATEGORY, sizes_for
from foretell.simulate.memory.replay import Replay
from foretell.simulate.parts import TORCH
from foretell.trace.types import Op, Trace

POINTS = 240
"""Moments of a curve: enough for a wide screen."""
MOST_EVENTS = 400_000
"""Allocations and frees of a snapshot; more makes a file that viewers do not open."""
REST = "workspace and rounding"
"""What the allocator holds besides tensors: workspaces of libraries, sizes rounded up."""
AROUND = "around the blocks"
"""What belongs to no block: embeddings, the head, the loss."""
RUN = "steady_step"


@dataclass(frozen=True, kw_only=True)
class MemoryCurve:
    """Bytes over a step. Of every stretch of it, its highest moment."""

    rank: int
    categories: tuple[str, ...]
    at: tuple[float, ...]
    """Seconds since the step began, ops lying in it by the seconds they compute; where no speed is known, ops."""
    end: float
    unit: str
    """seconds or ops."""
    bytes: tuple[tuple[int, ...], ...]
    """For each moment, by category."""
    peak: int
    """Which moment is the highest."""
    peak_op: str
    peak_module: str
    phases: tuple[tuple[str, float, float], ...]
    """Name, from and to."""
    held: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Block → category → bytes at the peak."""
    events: tuple[MemoryEvent, ...] = ()
    """Allocations and frees of the step; empty where there are too many."""
    before: tuple[MemoryEvent, ...] = ()
    """What was alive when it began."""
    segments: tuple[tuple[int, int], ...] = ()
    """Address and bytes of what the allocator has from the device when the step has ended; none on a CPU."""

    def over(self, seconds: float | None) -> MemoryCurve:
        """The same, as long as the step takes."""
        if seconds is None or self.unit != "seconds" or not self.end:
            return self
        scale = seconds / self.end
        return replace(
            self, end=seconds, at=tuple(at * scale for at in self.at),
            phases=tuple((name, start * scale, end * scale) for name, start, end in self.phases),
            events=tuple(replace(one, at=one.at * scale) for one in self.events),
        )  # fmt: skip

    @property
    def peak_bytes(self) -> int:
        return sum(self.bytes[self.peak]) if self.bytes else 0


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """Bytes that came or went."""

    comes: bool
    address: int
    size: int
    at: float
    what: str
    """Op or role."""
    module: str


@dataclass
class _Watch:
    """Totals by category while storages come and go."""

    trace: Trace
    totals: dict[str, int] = field(default_factory=dict)

    def add(self, number: int, sign: int) -> None:
        storage = self.trace.storages[number]
        category = CATEGORY[storage.role]
        self.totals[category] = self.totals.get(category, 0) + sign * storage.nbytes


class _Blocks(dict[int, int]):
    """Storages alive and their handles, counted by category as they change."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def __setitem__(self, number: int, handle: int) -> None:
        if number not in self:
            self.watch.add(number, 1)
        super().__setitem__(number, handle)

    def pop(self, number: int, *default: Any) -> Any:
        if number in self:
            self.watch.add(number, -1)
        return super().pop(number, *default)


def memory_curve(
    trace: Trace, cluster: Cluster, blocks: Sequence[str], known: Machine | None, *, rank: int = 0
) -> MemoryCurve:
    """Bytes of one rank's steady step."""
    clock = _Clock(trace, known)
    moments = _Moments(clock)
    watch = _Watch(trace)
    return moments.curve(trace, blocks, rank, _replayed(trace, cluster, watch, moments))


class _Clock:
    """Where in the step an op is: the ops of the run in order, with the seconds they begin at."""

    def __init__(self, trace: Trace, known: Machine | None) -> None:
        prices = op_prices(trace, known) if known is not None else {}
        self.unit = "seconds" if known is not None else "ops"
        self.ops: list[Op] = []
        self.begins: list[float] = []
        now = 0.0
        for name, times in trace.schedule[RUN]:
            for _ in range(times):
                for op in trace.programs[name].ops:
                    self.ops.append(op)
                    self.begins.append(now)
                    now += prices.get(id(op), ("", 0.0))[1] if known is not None else 1.0
        self.end, self.place = now, 0

    def now(self, op: Op | None) -> float:
        """Seconds at which an op begins; ops are asked for in the order they run."""
        if op is not None:
            place = self.place
            while place < len(self.ops) and self.ops[place] is not op:
                place += 1
            self.place = place if place < len(self.ops) else self.place
        return self.begins[self.place] if self.begins else 0.0

    def phases(self) -> tuple[tuple[str, float, float], ...]:
        found = []
        for name, run in groupby(range(len(self.ops)), key=lambda place: self.ops[place].phase):
            places = list(run)
            after = places[-1] + 1
            found.append((name, self.begins[places[0]], self.begins[after] if after < len(self.ops) else self.end))
        return tuple(found)


class _Moments:
    """Highest moments of equal stretches of the step."""

    def __init__(self, clock: _Clock) -> None:
        self.clock = clock
        self.found: dict[int, tuple[int, float, dict[str, int]]] = {}
        self.highest: tuple[int, float, str, str] = (-1, 0.0, "", "")
        self.events: list[MemoryEvent] = []
        self.before: list[MemoryEvent] = []
        self.segments: tuple[tuple[int, int], ...] = ()

    def look(self, op: Op, totals: Mapping[str, int], scratch: int, allocated: int) -> bool:
        """Take a moment; whether it is the highest so far."""
        now = self.clock.now(op)
        place = min(POINTS - 1, int(POINTS * now / self.clock.end)) if self.clock.end else 0
        if place not in self.found or allocated > self.found[place][0]:
            here = {**totals, "temporaries": totals.get("temporaries", 0) + scratch}
            here[REST] = max(0, allocated - sum(here.values()))
            self.found[place] = (allocated, now, here)
        if allocated > self.highest[0]:
            self.highest = (allocated, now, op.name, op.module)
            return True
        return False

    def curve(self, trace: Trace, blocks: Sequence[str], rank: int, alive: Mapping[int, None]) -> MemoryCurve:
        rows = [self.found[place] for place in sorted(self.found)]
        used = {name for _, _, here in rows for name, value in here.items() if value > 0}
        categories = tuple(name for name in (*CATEGORIES, REST) if name in used)
        peak = max(range(len(rows)), key=lambda number: rows[number][0], default=0)
        fits = len(self.events) + len(self.before) <= MOST_EVENTS
        return MemoryCurve(
            rank=rank, categories=categories, at=tuple(now for _, now, _ in rows), end=self.clock.end,
            unit=self.clock.unit,
            bytes=tuple(tuple(max(0, here.get(name, 0)) for name in categories) for _, _, here in rows), peak=peak,
            peak_op=self.highest[2], peak_module=self.highest[3], phases=self.clock.phases(),
            held=_held(trace, blocks, alive), events=tuple(self.events) if fits else (),
            before=tuple(self.before) if fits else (), segments=self.segments,
        )  # fmt: skip


def _held(trace: Trace, blocks: Sequence[str], alive: Mapping[int, None]) -> dict[str, dict[str, int]]:
    """Block → category → bytes of the storages alive."""
    known = set(blocks)
    found: dict[str, dict[str, int]] = {}
    for number in alive:
        storage = trace.storages[number]
        if storage.host:
            continue
        into, category = found.setdefault(block_named(storage.module, known), {}), CATEGORY[storage.role]
        into[category] = into.get(category, 0) + storage.nbytes
    return found


def block_named(module: str, blocks: Collection[str]) -> str:
    """The block that a module path lies in."""
    parts = module.split(".")
    return next((name for end in range(len(parts), 0, -1) if (name := ".".join(parts[:end])) in blocks), AROUND)


def _replayed(trace: Trace, cluster: Cluster, watch: _Watch, moments: _Moments) -> dict[int, None]:
    """Replay a first step, a steady one, and watch the next; who is alive at its peak."""
    replay = Replay(trace, sizes_for(cluster, overhead(cluster.device, TORCH)))
    allocator = replay.allocator
    replay.blocks = _Blocks(watch)
    peak: dict[int, None] = {}
    now: list[Op] = []
    replay.start()
    for name in ("first_step", RUN):
        if name in trace.schedule:
            replay.run(name)
    whose = {handle: number for number, handle in replay.blocks.items()}
    for address, nbytes in allocator.held().items():
        number = whose.get(address)
        storage = trace.storages[number] if number is not None else None
        what, module = (storage.role, storage.module) if storage is not None else (REST, "")
        moments.before.append(MemoryEvent(True, address, nbytes, 0.0, what, module))

    def look(op: Op | None, buffers: tuple[int, ...]) -> None:
        if op is not None and moments.look(op, watch.totals, sum(buffers), allocator.allocated):
            peak.clear()
            peak.update(dict.fromkeys(replay.blocks))

    pending: list[tuple[bool, int, int]] = []
    allocator.tell = lambda comes, address, size: pending.append((comes, address, size))

    def settled(op: Op | None, buffers: tuple[int, ...]) -> None:
        """Changes since the last look belong to this op, but for frees, which are of the one before."""
        at = moments.clock.now(op)
        for comes, address, size in pending:
            of = op if comes or not now else now[-1]
            moments.events.append(MemoryEvent(comes, address, size, at, of.name if of else "", of.module if of else ""))
        pending.clear()
        if op is not None:
            now[:] = [op]
        look(op, buffers)

    replay.watch(settled)
    replay.run(RUN)
    settled(None, ())
    moments.segments = tuple((address, size) for address, size, _ in allocator.segments())
    return peak


# ---------------------------------------------------------------------- a file for PyTorch's own viewer


def snapshot(curve: MemoryCurve) -> dict[str, Any]:
    """The step as `torch.cuda.memory._snapshot()` would tell it: what was alive before, then what came and went."""
    scale = 1e6 if curve.unit == "seconds" else 1.0
    left = sorted(_left(curve), key=lambda one: one.address)
    segments = curve.segments or (((left[0].address, left[-1].address + left[-1].size - left[0].address),) if left else ())
    traced = []
    for one in curve.events:
        frame = {"addr": one.address, "size": one.size, "stream": 0, "time_us": int(one.at * scale), "frames": _frames(one), "device": 0}
        actions = ("alloc",) if one.comes else ("free_requested", "free_completed")
        traced += [{"action": action, **frame} for action in actions]
    return {"segments": list(_segments(segments, left)), "device_traces": [traced], "allocator_settings": {}}


def _segments(segments: Sequence[tuple[int, int]], left: Sequence[MemoryEvent]) -> Iterator[dict[str, Any]]:
    """What the allocator has from the device, each piece with its blocks."""
    place = 0
    for address, total in segments:
        mine = []
        while place < len(left) and left[place].address < address + total:
            mine.append(left[place])
            place += 1
        used = sum(one.size for one in mine)
        yield {
            "device": 0, "address": address, "stream": 0, "segment_type": "large" if total > SMALL_SEGMENT else "small",
            "total_size": total, "allocated_size": used, "active_size": used, "requested_size": used, "frames": [],
            "blocks": list(_laid_out(address, total, mine)), "segment_pool_id": (0, 0), "is_expandable": False,
        }  # fmt: skip


def _left(curve: MemoryCurve) -> list[MemoryEvent]:
    """What is alive when the step has ended."""
    alive = {one.address: one for one in curve.before}
    for one in curve.events:
        if one.comes:
            alive[one.address] = one
        else:
            alive.pop(one.address, None)
    return list(alive.values())


def _laid_out(address: int, total: int, events: Sequence[MemoryEvent]) -> Iterator[dict[str, Any]]:
    """Blocks of one segment, one after the other, with what is free between them."""
    end = address
    for one in events:
        if one.address > end:
            yield _free(end, one.address - end)
        yield {"address": one.address, "size": one.size, "requested_size": one.size, "state": "active_allocated", "frames": _frames(one)}
        end = one.address + one.size
    if address + total > end:
        yield _free(end, address + total - end)


def _free(address: int, size: int) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": 0, "state": "inactive", "frames": []}


def _frames(event: MemoryEvent) -> list[dict[str, Any]]:
    return [{"name": event.what, "filename": event.module or "step", "line": 0}]


def write_snapshot(curve: MemoryCurve, path: Path) -> None:
    """Write a snapshot; it holds plain values alone."""
    try:
        write_atomically(path, pickle.dumps(snapshot(curve), protocol=4), parents=False)
    except OSError as error:
        raise UserError(f"cannot write the memory snapshot to {path}: {error.strerror}", "give another --out") from None
