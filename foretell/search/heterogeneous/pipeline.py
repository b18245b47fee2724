"""Unlike devices in one pipeline: layers shared by speed and memory; and what to do with unlike data ranks (after Holmes).

    cluster ─► islands: like devices that one fabric joins; each makes whole stages of `width` devices (tp × data ranks)
            ─► orders of the islands along the pipeline: the stages of one stay together, so that the slow link between
               two is crossed once
            ─► blocks shared among the stages of each order: the slowest stage is as quick as it can be, and no device
               holds more than it has. Exact: equal to trying every cut

Seconds and bytes of blocks are asked from the caller, kind of device by kind of device.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

from foretell.errors import UserError
from foretell.hardware.types import Cluster, Device

NARROW = 1e-12
"""Share to which the seconds of the slowest stage are least."""
MOST_ORDERS = 120
"""Orders of islands that are tried: all of five."""
Seconds = Callable[[str, int], float]
"""(Device's name, block) → seconds of forward and backward of one micro-batch on one rank."""


class Bytes(NamedTuple):
    """What one block takes on one rank."""

    kept: int
    """Parameters, gradients, optimizer state."""
    in_flight: int
    """Activations of one micro-batch between forward and backward."""


@dataclass(frozen=True, kw_only=True)
class Island:
    """Like devices that stand together."""

    device: Device
    stages: int
    """Pipeline stages that they make."""
    ranks: tuple[int, ...]
    """Their numbers in the cluster."""
    memory_bytes: int
    """Of one device, for blocks: less what is taken beside the model."""


@dataclass(frozen=True, kw_only=True)
class SharedStage:
    """One stage of a shared pipeline."""

    device: str
    first: int
    """Its first block ..."""
    last: int
    """... and the one after its last."""
    seconds: float
    """Of one micro-batch."""
    bytes: int
    """On one of its ranks."""
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class SharedBlocks:
    """Blocks shared among unlike stages."""

    stages: tuple[SharedStage, ...]
    placement: tuple[int, ...] = ()
    """Device of each rank, stage by stage: what `Plan.placement` takes. Empty: devices in their own order."""

    @property
    def cuts(self) -> tuple[int, ...]:
        """Index of the first block of each later stage."""
        return tuple(stage.first for stage in self.stages[1:])

    @property
    def slowest(self) -> float:
        return max(stage.seconds for stage in self.stages)

    def step_seconds(self, micro_batches: int) -> float:
        """Of a step under 1F1B, messages left out: fill, then the slowest stage again and again."""
        fill = sum(stage.seconds for stage in self.stages)
        return fill + (micro_batches - 1) * self.slowest


# ---------------------------------------------------------------------- islands


def islands(cluster: Cluster, width: int, *, beside_bytes: Callable[[Device], int] = lambda device: 0) -> tuple[Island, ...]:
    """The groups of a cluster as stages of `width` devices each; groups that do not make whole stages are refused."""
    if width < 1:
        raise UserError(f"stages of {width} devices were asked for", "give a whole number above 0")
    found, first = [], 0
    for part in cluster.parts:
        if part.count % width:
            near = max(size for size in range(1, width + 1) if all(group.count % size == 0 for group in cluster.parts))
            raise UserError(
                f"{part.count} {part.device.name} do not make whole pipeline stages of {width} devices",
                f"tp × data ranks of {near}, which every group divides by",
            )
        ranks = tuple(range(first, first + part.count))
        room = part.device.memory_bytes - beside_bytes(part.device)
        found.append(Island(device=part.device, stages=part.count // width, ranks=ranks, memory_bytes=room))
        first += part.count
    return tuple(found)


# ---------------------------------------------------------------------- sharing blocks


def one_f_one_b(stage: int, stages: int) -> int:
    """Micro-batches whose activations a stage holds at once under 1F1B."""
    return stages - stage


def share(
    order: Sequence[Island], blocks: Sequence[Bytes], seconds: Seconds,
    in_flight: Callable[[int, int], int] = one_f_one_b,
) -> SharedBlocks | None:  # fmt: skip
    """Blocks shared among stages in this order so that the slowest is quickest; None where they do not fit.

    Every stage gets at least one block. `in_flight` says how many micro-batches stage s of S holds.
    """
    kinds = [island for island in order for _ in range(island.stages)]
    count, total = len(kinds), len(blocks)
    if count > total:
        raise UserError(f"{count} stages and {total} blocks: every stage needs one", f"at most {total} stages")
    time = {kind.device.name: _sums(seconds(kind.device.name, block) for block in range(total)) for kind in order}
    kept, flying = (_sums(values) for values in zip(*blocks, strict=True))
    sizes: dict[int, list[float]] = {}
    for stage in range(count):
        held = in_flight(stage, count)
        if held not in sizes:
            sizes[held] = [one + held * other for one, other in zip(kept, flying, strict=True)]
    line = [
        _Room(time[kind.device.name], sizes[in_flight(stage, count)], kind.memory_bytes) for stage, kind in enumerate(kinds)
    ]
    found = _quickest(line)
    if found is None:
        return None
    ends = [0, *found]
    stages = tuple(
        SharedStage(
            device=kind.device.name, first=first, last=last, seconds=time[kind.device.name][last] - time[kind.device.name][first],
            bytes=round(kept[last] - kept[first] + in_flight(stage, count) * (flying[last] - flying[first])),
            memory_bytes=kind.memory_bytes,
        )
        for stage, (kind, first, last) in enumerate(zip(kinds, ends, ends[1:], strict=False))
    )  # fmt: skip
    return SharedBlocks(stages=stages, placement=tuple(rank for island in order for rank in island.ranks))


class _Room(NamedTuple):
    """A stage: seconds and bytes of all blocks before each, on its device."""

    seconds: list[float]
    sizes: list[float]
    most: float
    """Bytes that fit."""

    def furthest(self, start: int, last: int, limit: float) -> int:
        """The block after the last of those that keep both limits."""
        slow = bisect_right(self.seconds, self.seconds[start] + limit, start, last + 1)
        large = bisect_right(self.sizes, self.sizes[start] + self.most, start, last + 1)
        return min(slow, large) - 1

    def earliest(self, end: int, first: int, limit: float) -> int:
        """The first block of those that end here and keep both limits."""
        slow = bisect_left(self.seconds, self.seconds[end] - limit, first, end + 1)
        large = bisect_left(self.sizes, self.sizes[end] - self.most, first, end + 1)
        return max(slow, large)


def _quickest(line: Sequence[_Room]) -> list[int] | None:
    """Ends of the stages, so that the slowest is quickest; None where no cuts fit.

    For a given limit it is best to give each stage as many blocks as it allows; the least limit is found by halving.
    Of the cuts that reach it, either the first stages have as many blocks as they may or the last: those with fewer
    seconds in all are taken, since a pipeline has to be filled.
    """
    found = _ahead(line, float("inf"))
    if found is None:
        return None
    low, high = 0.0, _slowest(line, found)
    while high > low:
        middle = (low + high) / 2
        better = _ahead(line, middle)
        if better is None:
            low = middle
            better = _ahead(line, high * (1 - NARROW))
            if better is None:
                break
        high = _slowest(line, better)
    ways = [_ahead(line, high * (1 + NARROW)), _back(line, high * (1 + NARROW)), found]
    fine = [way for way in ways if way is not None and _slowest(line, way) <= high * (1 + 2 * NARROW)]
    return min(fine, key=lambda way: _all(line, way))


def _ahead(line: Sequence[_Room], limit: float) -> list[int] | None:
    """Each stage as many blocks as the limit allows, the first first."""
    total, start, ends = len(line[0].seconds) - 1, 0, []
    for stage, room in enumerate(line):
        end = room.furthest(start, total - (len(line) - 1 - stage), limit)
        if end <= start:
            return None
        ends.append(end)
        start = end
    return ends if start == total else None


def _back(line: Sequence[_Room], limit: float) -> list[int] | None:
    """The same, the last first."""
    end, ends = len(line[0].seconds) - 1, []
    for stage in reversed(range(len(line))):
        start = line[stage].earliest(end, stage, limit)
        if start >= end:
            return None
        ends.append(end)
        end = start
    return ends[::-1] if end == 0 else None


def _slowest(line: Sequence[_Room], ends: Sequence[int]) -> float:
    return max(room.seconds[end] - room.seconds[start] for room, start, end in zip(line, (0, *ends), ends, strict=False))


def _all(line: Sequence[_Room], ends: Sequence[int]) -> float:
    return sum(room.seconds[end] - room.seconds[start] for room, start, end in zip(line, (0, *ends), ends, strict=False))


def share_best(
    found: Sequence[Island], blocks: Sequence[Bytes], seconds: Seconds, *, micro_batches: int,
    in_flight: Callable[[int, int], int] = one_f_one_b,
) -> SharedBlocks:  # fmt: skip
    """The best order of the islands and the best cuts for it; a `UserError` says how much is missing where none fits."""
    best: SharedBlocks | None = None
    for number, order in enumerate(_orders(found)):
        if number >= MOST_ORDERS:
            break
        shared = share(order, blocks, seconds, in_flight)
        if shared is not None and (best is None or shared.step_seconds(micro_batches) < best.step_seconds(micro_batches)):
            best = shared
    if best is None:
        need = sum(block.kept + block.in_flight for block in blocks)
        have = sum(island.memory_bytes * island.stages for island in found)
        raise UserError(
            f"no cut of {len(blocks)} blocks fits {sum(island.stages for island in found)} stages: with one micro-batch in "
            f"flight they need {need / 2**30:.1f} GiB, and the stages have {have / 2**30:.1f} GiB",
            "recompute blocks, a smaller micro-batch, or more devices to a stage",
        )
    plain = tuple(range(len(best.placement)))
    return SharedBlocks(stages=best.stages, placement=() if best.placement == plain else best.placement)


def _orders(found: Sequence[Island]) -> Iterable[tuple[Island, ...]]:
    """Each order of the islands once; those of one device and size may stand for each other."""
    seen = set()
    for order in permutations(found):
        key = tuple((island.device.name, island.stages, island.memory_bytes) for island in order)
        if key not in seen:
            seen.add(key)
            yield order


def _sums(values: Iterable[float]) -> list[float]:
    found = [0.0]
    for value in values:
        if not 0 <= value < float("inf"):
            raise UserError(f"a block takes {value} seconds or bytes", "a number of at least 0")
        found.append(found[-1] + value)
    return found
