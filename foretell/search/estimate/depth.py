"""A deep stack of blocks from a short one: seconds by what one block more adds, bytes by what the blocks left out would hold.

    walked     │ 0 │ 1 │ 2 │                        lowered, laid on the timeline, replayed
    all        │ 0 │ 1 │ 2 │ ····· 77 more ····· │

Seconds: those of the walked stack, and for every block that was left out as much as lies between two neighbours, on each
stream and on the host. Bytes: whatever a walked block holds while others run (parameters, optimizer state, gradients, what
its forward keeps) has a twin as large as those of all blocks that were left out, which comes and goes with it. So every
peak is right: before backward, at its end, at the update.

Where blocks are of many kinds, every two that follow each other are walked by themselves, for seconds; for bytes the largest of
each residency is walked, with twins as large as all others.

A twin leaves fewer gaps in the allocator than the blocks it stands for. What is shown of a plan is therefore replayed with every
block, under the device's limit (`Depth.WHOLE`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from itertools import groupby, pairwise

from foretell.lower.fsdp.units import unit_of
from foretell.quantities import COMPUTE
from foretell.search.estimate.short import Item
from foretell.simulate.memory.allocator import LARGE_EXACT, LARGE_ROUNDING, MIN_BLOCK
from foretell.simulate.memory.memory import run_order
from foretell.simulate.memory.replay import Replay, Sizes
from foretell.simulate.time.streams import Timeline
from foretell.trace import types
from foretell.trace.types import Op, Program, Storage, Trace

WALKED = 2
"""Blocks of a run that are walked one by one."""
MOST_RUNS = 8
"""Runs that are walked in their order; if there are more, blocks of one kind and residency are taken together, and if these are
still more, those of one residency."""


class Depth(IntEnum):
    """How the bytes of a rank are found."""

    ALIVE = 0
    """With a pipeline: what its events hold, added up. Else as short."""
    SHORT = 1
    """A short stack, replayed through the caching allocator."""
    WHOLE = 2
    """Every block is there, and the device's limit."""


LASTING = (types.PARAMETER, types.BUFFER, types.OPTIMIZER, types.GRADIENT, types.GATHERED)
More = tuple[float, float]
"""How many times what a block holds of these, and how many times what its forward keeps."""
Run = tuple[int, str, int]
"""Kind, residency and how many in a row."""
Pair = tuple[tuple[int, str], tuple[int, str]]
"""Kind and residency of two blocks that follow each other."""


@dataclass(frozen=True)
class DeepStage:
    """The blocks of one stage, as runs of alike ones; and whether it has what is before and after the blocks."""

    runs: tuple[Run, ...]
    first: bool = True
    last: bool = True
    others: tuple[tuple[Run, ...], ...] = ()
    """Of each run: blocks of other kinds that it stands for; empty: of none."""
    pairs: tuple[tuple[Pair, int], ...] = ()
    """Where runs stand for others: which blocks follow which, and how often."""
    ends: Pair | None = None
    """There: the first block and the last."""
    whole: bool = False
    """Every block is walked."""

    @property
    def walked(self) -> DeepStage:
        """As many blocks of each run as are walked."""
        if self.whole:
            return self
        return replace(self, runs=tuple((kind, mode, min(count, WALKED)) for kind, mode, count in self.runs), others=(), pairs=(), ends=None)

    @property
    def every(self) -> tuple[Run, ...]:
        """All blocks."""
        return (*self.runs, *(run for runs in self.others for run in runs))

    def alone(self, run: Run) -> DeepStage:
        """Two blocks of a run by themselves."""
        return DeepStage(((*run[:2], WALKED),), first=self.first, last=False)

    def steps(self, made: Callable[[Pair], tuple[Run, ...]]) -> list[tuple[DeepStage, int]]:
        """What makes a stack of the first and the last block one of all: two that follow each other, in a stack that `made` says,
        and how often."""
        assert self.ends is not None
        return [(DeepStage(made(pair), self.first, False), count) for pair, count in (*self.pairs, (self.ends, -1))]

    @property
    def left(self) -> tuple[int, ...]:
        """Of each run: blocks that are not walked."""
        if self.whole:
            return (0,) * len(self.runs)
        return tuple(count - min(count, WALKED) for _, _, count in self.runs)

    def items(self, start: int = 0) -> list[Item]:
        """Its blocks, one by one, under names of their own."""
        found: list[Item] = []
        for kind, mode, count in self.runs:
            found += [Item(kind, mode, name_of(start + len(found) + place)) for place in range(count)]
        return found

    def lasts(self, start: int = 0) -> list[str]:
        """Of each run: the name of its last block."""
        found, place = [], start
        for _, _, count in self.runs:
            place += count
            found.append(name_of(place - 1))
        return found

    def grown(self, lasts: Sequence[str], place: int | None = None) -> list[str | None]:
        """The last blocks of those runs that may stand for more blocks, or of the one at a place; None of others: what a block more
        of them adds is not asked."""
        grows = [not self.whole and count >= WALKED if place is None else number == place for number, (_, _, count) in enumerate(self.runs)]
        return [last if more else None for last, more in zip(lasts, grows, strict=True)]


def of_pair(pair: Pair) -> tuple[Run, ...]:
    """Two blocks; those that are alike are one run."""
    (kind, mode), other = pair
    return ((kind, mode, 2),) if other == pair[0] else ((kind, mode, 1), (*other, 1))


def before(name: str) -> str:
    """The block that comes before one."""
    return name_of(int(name.rpartition(".")[2]) - 1)


def between(pair: Pair) -> tuple[Run, ...]:
    """The same between two more: neither is where a stack turns back, and both run beside messages of others. The second of the
    pair is the second run."""
    first, second = pair
    return ((*first, 2), (*second, 1), (*second, 1))


def name_of(place: int) -> str:
    return f"stack.{place}"


def stage_of(runs: Sequence[Run], size: Callable[[int, str], tuple[bool, bool, int]], *, first: bool = True, last: bool = True) -> DeepStage:
    """Blocks in their runs; where there are many, those of one kind and residency as one run. Where these are still many, the
    largest kind of each residency, which stands for the others."""
    if len(runs) <= MOST_RUNS:
        return DeepStage(tuple(runs), first, last)
    counts: dict[tuple[int, str], int] = {}
    for kind, mode, count in runs:
        counts[kind, mode] = counts.get((kind, mode), 0) + count
    merged = [(kind, mode, count) for (kind, mode), count in counts.items()]
    if len(merged) <= MOST_RUNS:
        return DeepStage(tuple(merged), first, last)
    modes: dict[str, list[Run]] = {}
    for run in merged:
        modes.setdefault(run[1], []).append(run)
    row = [run[:2] for run in runs for _ in range(run[2])]
    pairs = tuple(sorted(Counter(pairwise(row)).items()))
    largest = [max(same, key=lambda run: size(*run[:2])) for same in modes.values()]
    others = tuple(tuple(sorted(run for run in same if run != one)) for same, one in zip(modes.values(), largest, strict=True))
    return DeepStage(tuple(largest), first, last, others, pairs, (row[0], row[-1]))


def inside(module: str, path: str) -> bool:
    return module == path or module.startswith(f"{path}.")


def periods(timeline: Timeline, last: str, phases: Container[str] | None = None) -> dict[str, float]:
    """How far apart a block and the one before it are on each stream, in whichever order they run.

    `phases` are those that count, where blocks run in several and once in each."""
    first = before(last)
    ran: dict[str, dict[str, list[tuple[float, float]]]] = {first: {}, last: {}}
    visit: dict[tuple[str, str], int] = {}
    """Tasks of a block on a stream until another one's come."""
    now: dict[str, str] = {}
    for task, start, finish in zip(timeline.tasks, timeline.start, timeline.finish, strict=True):
        if phases is not None and task.phase not in phases:
            continue
        stream = task.resource
        name = first if inside(task.module, first) else last if inside(task.module, last) else ""
        if now.get(stream, "") != name:
            left = now.get(stream, "")
            visit.setdefault((left, stream), len(ran.get(left, {}).get(stream, ())))
            now[stream] = name
        if name:
            ran[name].setdefault(stream, []).append((start, finish))
    found: dict[str, float] = {}
    for stream in (stream for stream in ran[last] if stream in ran[first]):
        mine, other = ran[last][stream], ran[first][stream]
        if stream != COMPUTE or phases is not None:  # of messages the last one counts
            found[stream] = abs(mine[-1][1] - other[-1][1])
            continue
        one, two = visit.get((last, stream), len(mine)), visit.get((first, stream), len(other))
        if len(mine) == len(other):  # the one where a stack turns back comes back to itself at once
            one = two = min(one, two)
        again = sum(finish - start for start, finish in mine[one:])  # what it has when it comes back to the block
        found[stream] = abs(mine[one - 1][1] - other[two - 1][1]) + again
    return found


def without(op: Op, gone: Container[int]) -> Op:
    """The op without what it does to some storages."""
    refs = [tuple(ref for ref in found if ref.storage not in gone) for found in (op.inputs, op.outputs)]
    return replace(op, inputs=refs[0], outputs=refs[1])


# ---------------------------------------------------------------------- bytes


@dataclass(frozen=True)
class Peak:
    """Of one rank, in the caching allocator."""

    reserved: int
    allocated: int


def replayed(trace: Trace, sizes: Sizes) -> Peak:
    """The highest points of a rank's first steps."""
    replay = Replay(trace, sizes)
    replay.start()
    for name in run_order(trace):
        replay.run(name)
    return Peak(replay.allocator.peak_reserved, replay.allocator.peak_allocated)


Pauses = Callable[[Sequence[Op]], Iterable[int]]
"""Places of a program, other than its end, at which no block runs: what is alive there is held for long."""


def deepened(trace: Trace, times: Mapping[str, More], pauses: Pauses) -> Trace:
    """A rank's trace in which some blocks (path → how many more) stand for others like them."""
    times = {path: more for path, more in times.items() if any(more)}
    if not times:
        return trace
    held = _long_held(trace, times, pauses)
    storages = dict(trace.storages)
    twins: dict[int, int] = {}
    for number, path in held.items():
        storage = trace.storages[number]
        twins[number] = len(twins) + _next(trace)
        more = times[path][storage.role not in LASTING]
        storages[twins[number]] = storage._replace(nbytes=round(more * _taken(storage)))
    programs = {name: Program(name, tuple(_with(op, twins) for op in program.ops)) for name, program in trace.programs.items()}
    resident = tuple(n for number in trace.resident for n in ((number, twins[number]) if number in twins else (number,)))
    return replace(trace, programs=programs, storages=storages, resident=resident)


def held_bytes(trace: Trace, path: str, pauses: Pauses) -> More:
    """Of a block, in a rank's trace: bytes that last, and that its forward keeps."""
    found = [0.0, 0.0]
    for number in _long_held(trace, (path,), pauses):
        storage = trace.storages[number]
        found[storage.role not in LASTING] += _taken(storage)
    return found[0], found[1]


def more_of(stage: DeepStage, held: Callable[[Run], More]) -> list[More]:
    """Of each run: how many times what its last block holds there is besides."""
    found = []
    for place, (run, left) in enumerate(zip(stage.runs, stage.left, strict=True)):
        others = stage.others[place] if stage.others else ()
        mine = held(run) if others else (0.0, 0.0)
        sums = [sum(other[2] * held(other)[which] for other in others) for which in (0, 1)]
        lasting, kept = (left + (total / one if one else 0.0) for total, one in zip(sums, mine, strict=True))
        if sums[1] and mine[0] and not mine[1]:  # what nothing of the run comes and goes with, lasts
            lasting += sums[1] / mine[0]
        found.append((lasting, kept))
    return found


def _long_held(trace: Trace, paths: Container[str], pauses: Pauses) -> dict[int, str]:
    """Storages of some blocks that are there while other blocks run → the block."""
    blocks: dict[str, None] = dict.fromkeys(("", *_blocks(trace)))
    where: dict[str, str] = {}

    def of(module: str) -> str:
        if module not in where:
            where[module] = unit_of(module, blocks)  # type: ignore[arg-type]
        return where[module]

    held = {number for number in trace.resident if of(trace.storages[number].module) in paths}
    held |= {n for n, s in trace.storages.items() if s.role == types.OPTIMIZER and not s.host and of(s.module) in paths}
    for program in trace.programs.values():
        held |= _held(program.ops, pauses(program.ops), trace.storages, paths, of)
    return {number: of(trace.storages[number].module) for number in held}


def _blocks(trace: Trace) -> Sequence[str]:
    blocks = trace.meta.get("blocks", ())
    assert isinstance(blocks, Sequence)
    return blocks


def _next(trace: Trace) -> int:
    return max(trace.storages) + 1


def _held(
    ops: Sequence[Op], pauses: Iterable[int], storages: Mapping[int, Storage], paths: Container[str], of: Callable[[str], str]
) -> set[int]:
    """Storages of some blocks that are alive where no block runs."""
    stops, alive, found = {*pauses, len(ops)}, set[int](), set[int]()
    for place, op in enumerate(ops):
        if place in stops:
            found |= alive
        if op.allocates:
            alive.update(n for n in op.allocates if of(storages[n].module) in paths)
        if op.frees:
            alive.difference_update(op.frees)
    return found | alive


def _taken(storage: Storage) -> int:
    """What a tensor takes of the allocator; one that stays and is large has a segment of its own."""
    stays = storage.role in (types.PARAMETER, types.OPTIMIZER)
    step = LARGE_ROUNDING if stays and storage.nbytes >= LARGE_EXACT else MIN_BLOCK
    return -(-storage.nbytes // step) * step


def _with(op: Op, twins: Mapping[int, int]) -> Op:
    born = [twins[n] for n in op.allocates if n in twins]
    gone = [twins[n] for n in op.frees if n in twins]
    if not born and not gone:
        return op
    return replace(op, allocates=(*op.allocates, *born), frees=(*op.frees, *gone))


def around_blocks(ops: Sequence[Op]) -> list[int]:
    """In a micro-batch: where forward has ended, and where backward has, before what is still held is let go."""
    late = [place for place, op in enumerate(ops) if op.phase in ("backward", "recompute")]
    if not late:
        return []
    ends = len(ops) - 1 if ops[-1].name.endswith("_wait") else len(ops)
    return [late[0], ends]


@lru_cache(maxsize=4096)
def runs_of(kinds: tuple[int, ...], modes: tuple[str, ...]) -> tuple[tuple[int, str, int], ...]:
    """Blocks as runs of alike ones."""
    return tuple((kind, mode, len(list(same))) for (kind, mode), same in groupby(zip(kinds, modes, strict=True)))
