"""A deep stack of blocks from a short one: seconds by what one block more adds, bytes by what the blocks left out would hold.

    walked     │ 0 │ 1 │ 2 │                        lowered, laid on the timeline, replayed
    all        │ 0 │ 1 │ 2 │ ····· 77 more ····· │

Seconds: those of the walked stack, and for every block that was left out as much as lies between two neighbours, on each
stream and on the host. Bytes: whatever a walked block holds while others run (parameters, optimizer state, gradients, what
its forward keeps) has a twin as large as those of all blocks that were left out, which comes and goes with it. So every
peak is right: before backward, at its end, at the update.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from foretell.lower.fsdp.units import unit_of
from foretell.quantities import COMPUTE
from foretell.search.short import Item
from foretell.simulate.memory.allocator import LARGE_EXACT, LARGE_ROUNDING, MIN_BLOCK
from foretell.simulate.memory.memory import run_order
from foretell.simulate.memory.replay import Replay, Sizes
from foretell.simulate.time.streams import Timeline
from foretell.trace import types
from foretell.trace.types import Op, Program, Storage, Trace

WALKED = 2
"""Blocks of a run that are walked one by one."""
MOST_RUNS = 8
"""Runs that are walked in their order; if there are more, blocks of one kind and residency are taken together."""
Run = tuple[int, str, int]
"""Kind, residency and how many in a row."""


@dataclass(frozen=True)
class Stage:
    """The blocks of one stage, as runs of alike ones; and whether it has what is before and after the blocks."""

    runs: tuple[Run, ...]
    first: bool = True
    last: bool = True

    @property
    def walked(self) -> Stage:
        """As many blocks of each run as are walked."""
        return replace(self, runs=tuple((kind, mode, min(count, WALKED)) for kind, mode, count in self.runs))

    @property
    def left(self) -> tuple[int, ...]:
        """Of each run: blocks that are not walked."""
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


def name_of(place: int) -> str:
    return f"stack.{place}"


def together(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Runs; where there are many, those of one kind and residency as one."""
    if len(runs) <= MOST_RUNS:
        return tuple(runs)
    found: dict[tuple[int, str], int] = {}
    for kind, mode, count in runs:
        found[kind, mode] = found.get((kind, mode), 0) + count
    return tuple((kind, mode, count) for (kind, mode), count in found.items())


def inside(module: str, path: str) -> bool:
    return module == path or module.startswith(f"{path}.")


def periods(timeline: Timeline, last: str, phases: Container[str] | None = None) -> dict[str, float]:
    """How far apart a block and the one before it are on each stream, in whichever order they run.

    `phases` are those that count, where blocks run in several and once in each."""
    before = name_of(int(last.rpartition(".")[2]) - 1)
    ends: dict[str, dict[str, float]] = {before: {}, last: {}}
    again: dict[str, float] = {}
    """Seconds of compute that the block has when it comes back to it; of messages the last one counts."""
    now: dict[str, str] = {}
    left: set[tuple[str, str]] = set()
    for task, start, finish in zip(timeline.tasks, timeline.start, timeline.finish, strict=True):
        if phases is not None and task.phase not in phases:
            continue
        stream = task.resource
        name = before if inside(task.module, before) else last if inside(task.module, last) else ""
        if now.get(stream, "") != name:
            left.add((now.get(stream, ""), stream))
            now[stream] = name
        if name and ((name, stream) not in left or stream != COMPUTE or phases is not None):
            ends[name][stream] = finish
        elif name == last:
            again[stream] = again.get(stream, 0.0) + finish - start
    both = [stream for stream in ends[last] if stream in ends[before]]
    return {stream: abs(ends[last][stream] - ends[before][stream]) + again.get(stream, 0.0) for stream in both}


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


def deepened(trace: Trace, times: Mapping[str, int], pauses: Callable[[Sequence[Op]], Iterable[int]]) -> Trace:
    """A rank's trace in which some blocks (path → how many more) stand for others like them.

    `pauses` are places of a program, other than its end, at which no block runs: what is alive there is held for long.
    """
    times = {path: more for path, more in times.items() if more}
    if not times:
        return trace
    blocks: dict[str, None] = dict.fromkeys(("", *_blocks(trace)))
    where: dict[str, str] = {}

    def of(module: str) -> str:
        if module not in where:
            where[module] = unit_of(module, blocks)  # type: ignore[arg-type]
        return where[module]

    held = {number for number in trace.resident if of(trace.storages[number].module) in times}
    held |= {n for n, s in trace.storages.items() if s.role == types.OPTIMIZER and not s.host and of(s.module) in times}
    for program in trace.programs.values():
        held |= _held(program.ops, pauses(program.ops), trace.storages, times, of)
    storages = dict(trace.storages)
    twins: dict[int, int] = {}
    for number in held:
        storage = trace.storages[number]
        lasting = storage.role in (types.PARAMETER, types.OPTIMIZER)
        twins[number] = len(twins) + _next(trace)
        storages[twins[number]] = storage._replace(nbytes=times[of(storage.module)] * _room(storage.nbytes, lasting))
    programs = {name: Program(name, tuple(_with(op, twins) for op in program.ops)) for name, program in trace.programs.items()}
    resident = tuple(n for number in trace.resident for n in ((number, twins[number]) if number in twins else (number,)))
    return replace(trace, programs=programs, storages=storages, resident=resident)


def _blocks(trace: Trace) -> Sequence[str]:
    blocks = trace.meta.get("blocks", ())
    assert isinstance(blocks, Sequence)
    return blocks


def _next(trace: Trace) -> int:
    return max(trace.storages) + 1


def _held(
    ops: Sequence[Op], pauses: Iterable[int], storages: Mapping[int, Storage], times: Mapping[str, int], of: Callable[[str], str]
) -> set[int]:
    """Storages of some blocks that are alive where no block runs."""
    stops, alive, found = {*pauses, len(ops)}, set[int](), set[int]()
    for place, op in enumerate(ops):
        if place in stops:
            found |= alive
        if op.allocates:
            alive.update(n for n in op.allocates if of(storages[n].module) in times)
        if op.frees:
            alive.difference_update(op.frees)
    return found | alive


def _room(nbytes: int, lasting: bool) -> int:
    """What a tensor takes of the allocator; one that stays and is large has a segment of its own."""
    step = LARGE_ROUNDING if lasting and nbytes >= LARGE_EXACT else MIN_BLOCK
    return -(-nbytes // step) * step


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
