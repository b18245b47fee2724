"""Replay a trace through the caching allocator: live bytes over time, and who owns the peak.

    resident ─► first step ─► steady step ─► steady step      each op: outputs, scratch, then what dies
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from foretell.price.kernels.scratch import extra_output_bytes
from foretell.price.kernels.scratch import stages as scratch_stages
from foretell.simulate.memory.allocator import CachingAllocator, LiveAllocator
from foretell.trace.fold.merged import BIASED_PRODUCT, MERGED, NO_PRODUCT, PRODUCT, about
from foretell.trace.types import Op, Program, Trace

WORKSPACE = "workspace"
SCRATCH = "scratch"

GEMMS = frozenset(
    f"aten.{name}" for name in (
        "mm.default", "addmm.default", "bmm.default", "baddbmm.default", "addbmm.default", "mv.default",
        "addmv.default", "dot.default", "_addmm_activation.default", "matmul.default", "linear.default",
    )
)  # fmt: skip
"""Ops that make cuBLAS allocate its workspace, once for every thread that calls it; the last two are of ragged tensors."""


BIASED = frozenset(("aten.addmm.default", "aten.linear.default"))
_CALLS = GEMMS | {MERGED}
CUBLASLT_WORKSPACE_BYTES = 1 << 20
"""Taken once, at the first product with a bias: torch 2.11 on an H200."""


SCRATCH_FIRST = frozenset({"aten._cudnn_rnn.default"})
"""Ops that make their last output while they hold their scratch: cuDNN's reserve comes after its workspace."""


Holders = dict[tuple[str, str], int]
"""(role, module) → bytes."""
Stages = tuple[tuple[int, ...], ...]
Event = tuple[Op, Stages, int]


@dataclass(frozen=True)
class Sizes:
    """What an op needs besides what the trace says, on one kind of device."""

    capability: tuple[int, int]
    cublas_workspace_bytes: int
    live: bool = False
    """A CPU: tensors come and go as they are, and what its kernels need beside them is not known."""
    _stages: dict[Any, tuple[Stages, int]] = field(default_factory=dict, compare=False, repr=False)
    _events: dict[int, tuple[Program, list[Event]]] = field(default_factory=dict, compare=False, repr=False)

    def events(self, program: Program) -> list[Event]:
        """The ops of a program that touch memory, with their scratch; worked out once for all replays."""
        known = self._events.get(id(program))
        if known is None or known[0] is not program:
            found = [(op, *self.scratch(op)) for op in program.ops]
            kept = [event for event in found if event[0].allocates or event[0].frees or event[1] or event[0].name in _CALLS]
            known = self._events[id(program)] = (program, kept)
        return known[1]

    def scratch(self, op: Op) -> tuple[Stages, int]:
        """Stages of scratch (none: empty) and extra output bytes, the same for ops of equal name, shapes and attributes."""
        key = (op.name, tuple([ref.spec for ref in op.inputs]), tuple([ref.spec for ref in op.outputs]), op.attrs)
        found = self._stages.get(key)
        if found is None:
            stages = () if self.live else scratch_stages(op, self.capability)
            found = self._stages[key] = (stages if any(stages) else (), 0 if self.live else extra_output_bytes(op))
        return found


class Moment(NamedTuple):
    """A look at a replay."""

    allocated: int
    rounds: int
    """Programs begun."""
    place: int
    """Of the op in the last of them; one op may be there twice."""
    op: Op | None
    buffers: tuple[int, ...]
    alive: int
    """Storages."""
    workspace: int


class Replay:
    """One process on one device, from start to the end of the last step it was asked for."""

    def __init__(self, trace: Trace, sizes: Sizes, *, limit: int | None = None, expandable: bool = False) -> None:
        self.trace, self.sizes = trace, sizes
        self.allocator: CachingAllocator | LiveAllocator = (
            LiveAllocator() if sizes.live else CachingAllocator(limit, expandable=expandable)
        )
        self.blocks: dict[int, int] = {}
        self._workspaces: set[str] = set()
        self._workspace_bytes = 0
        self.rounds: list[list[Event]] = []
        """What was run, program by program."""
        self._place = 0
        self._at_peak: Callable[[Op | None, tuple[int, ...]], None] | None = None
        self._repeated: Callable[[int], None] | None = lambda _: None

    def watch(self, look: Callable[[Op | None, tuple[int, ...]], None], repeated: Callable[[int], None] | None = None) -> None:
        """Call `look(op, scratch)` wherever memory may be at its highest.

        A program that leaves memory as it found it is not run again and again: `repeated` is told how many more times it ran
        (0: it begins). Without, every run is looked at.
        """
        self._at_peak, self._repeated = look, repeated

    def start(self) -> None:
        """Bring in what lives before the step."""
        for number in self.trace.resident:
            self._allocate(number, 0)

    def run(self, name: str) -> None:
        """Run a named schedule of the trace, such as `first_step`."""
        for program, times in self.trace.schedule[name]:
            events = self.sizes.events(self.trace.programs[program])
            repeated = self._repeated if self.allocator.tell is None and times > 2 else None
            state: object = None
            for done in range(1, times + 1):
                if repeated is not None:
                    repeated(0)
                self.rounds.append(events)
                for self._place, (op, stages, extra) in enumerate(events):
                    self._step(op, stages, extra)
                if repeated is not None and done < times:
                    before, state = state, self.state()
                    if state == before:
                        repeated(times - done)
                        break

    def state(self) -> object:
        """All that decides what comes next: where it is equal, equal programs do the same."""
        return self.allocator.state(self.blocks), self._workspace_bytes

    def _step(self, op: Op, stages: Stages, extra: int) -> None:
        if stages or op.name in _CALLS:
            self._with_scratch(op, stages, extra)
        else:
            for number in op.allocates:
                self._allocate(number, extra)
                extra = 0
            if self._at_peak is not None:
                self._at_peak(op, ())
        blocks, free = self.blocks, self.allocator.free
        for number in op.frees:
            handle = blocks.pop(number, None)
            if handle is not None:
                free(handle)

    def _with_scratch(self, op: Op, stages: Stages, extra: int) -> None:
        """What an op makes and what it needs beside that, or products, which have a workspace."""
        count, last = len(op.allocates), len(stages) - 1
        held: list[int] = []
        for position, number in enumerate(op.allocates):
            if position == count - 1 and stages and op.name in SCRATCH_FIRST:
                held = [self.allocator.malloc(size) for size in stages[0]]
            self._allocate(number, extra)
            extra = 0
            if position < last and position < count - 1:
                self._scratch(op, stages[position])
        if op.name in _CALLS and not self.sizes.live:
            self._workspace(op)
        if held:
            if self._at_peak is not None:
                self._at_peak(op, stages[0])
            for buffer in reversed(held):
                self.allocator.free(buffer)
        elif stages:
            for stage in stages[max(0, min(last, count - 1)) :]:
                self._scratch(op, stage)
        elif self._at_peak is not None:
            self._at_peak(op, ())

    def _scratch(self, op: Op, buffers: tuple[int, ...]) -> None:
        handles = [self.allocator.malloc(size) for size in buffers]
        if self._at_peak is not None:
            self._at_peak(op, buffers)
        for handle in reversed(handles):
            self.allocator.free(handle)

    def _allocate(self, number: int, extra: int) -> None:
        storage = self.trace.storages[number]
        if storage.host and not self.sizes.live:
            return
        stale = self.blocks.pop(number, None)
        if stale is not None:
            self.allocator.free(stale)
        self.blocks[number] = self.allocator.malloc(storage.nbytes + extra, storage.stream)

    def _workspace(self, op: Op) -> None:
        products = about(op).products if op.name == MERGED else BIASED_PRODUCT if op.name in BIASED else PRODUCT
        if products == NO_PRODUCT:
            return
        thread = "backward" if op.phase in ("backward", "recompute") else "main"
        if thread not in self._workspaces:
            self._workspaces.add(thread)
            self.allocator.malloc(self.sizes.cublas_workspace_bytes)
            self._workspace_bytes += self.sizes.cublas_workspace_bytes
        if products == BIASED_PRODUCT and "lt" not in self._workspaces:
            self._workspaces.add("lt")
            self.allocator.malloc(CUBLASLT_WORKSPACE_BYTES)
            self._workspace_bytes += CUBLASLT_WORKSPACE_BYTES

    def holders(self) -> dict[tuple[str, str], int]:
        """(role, module) → bytes alive now."""
        return self._held_by(self.blocks, self._workspace_bytes)

    def _held_by(self, alive: Iterable[int], workspace: int) -> Holders:
        found: Holders = {}
        for number in alive:
            storage = self.trace.storages[number]
            key = (storage.role, storage.module)
            found[key] = found.get(key, 0) + storage.nbytes
        if workspace:
            found[(WORKSPACE, "")] = workspace
        return found

    def moment(self, op: Op | None, buffers: tuple[int, ...]) -> Moment:
        """Where a look is, to come back to."""
        return Moment(self.allocator.allocated, len(self.rounds), self._place, op, buffers, len(self.blocks), self._workspace_bytes)

    def holders_then(self, moment: Moment) -> Holders:
        """Who was alive at a moment of this run: what came and went is followed again, without an allocator."""
        storages = self.trace.storages
        alive = {number: None for number in self.trace.resident if self.sizes.live or not storages[number].host}
        for begun, events in enumerate(self.rounds[: moment.rounds], 1):
            for place, (op, _, _) in enumerate(events):
                here = place == moment.place and begun == moment.rounds
                for number in op.allocates:
                    if here and len(alive) == moment.alive:
                        break
                    if self.sizes.live or not storages[number].host:
                        alive.pop(number, None)
                        alive[number] = None
                if here:
                    break
                for number in op.frees:
                    alive.pop(number, None)
        found = self._held_by(alive, moment.workspace)
        if moment.buffers:
            found[(SCRATCH, moment.op.module if moment.op else "")] = sum(moment.buffers)
        return found


def peak_live(trace: Trace, schedules: Iterable[str]) -> int:
    """Most bytes of tensors alive at once: what a run on a CPU holds."""
    replay = Replay(trace, Sizes((0, 0), 0, live=True))
    replay.start()
    for name in schedules:
        replay.run(name)
    return replay.allocator.peak_allocated


class Reached(Exception):
    """The replay came to the point that was looked for."""


def holders_at(trace: Trace, sizes: Sizes, schedules: Iterable[str], allocated: int) -> tuple[Holders, Op | None]:
    """Who is alive when allocated memory first reaches this height, and the op that makes it do so."""
    replay = Replay(trace, sizes)
    found: list[tuple[Holders, Op | None]] = []

    def look(op: Op | None, buffers: tuple[int, ...]) -> None:
        if replay.allocator.allocated >= allocated:
            holders = replay.holders()
            if buffers:
                holders[(SCRATCH, op.module if op else "")] = sum(buffers)
            found.append((holders, op))
            raise Reached

    replay.watch(look, lambda _: None)
    try:
        replay.start()
        for name in schedules:
            replay.run(name)
    except Reached:
        return found[0]
    return replay.holders(), None


POINTS = 64
"""Points of the curve of one phase."""


class Curve:
    """Highest allocated and reserved bytes in stretches of a run, few enough to draw."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self.points: list[tuple[int, int]] = []
        self.highest: Moment | None = None
        """Where allocated bytes were first highest."""
        self._most = 0
        self._begin = 0
        replay.watch(self._look, self._repeated)

    def _look(self, op: Op | None, buffers: tuple[int, ...]) -> None:
        allocator = self.replay.allocator
        allocated = allocator.allocated
        if allocated > self._most:
            self._most, self.highest = allocated, self.replay.moment(op, buffers)
        self.points.append((allocated, allocator.reserved))

    def _repeated(self, times: int) -> None:
        if times:
            self.points += self.points[self._begin :] * times
        self._begin = len(self.points)

    def take(self) -> tuple[tuple[int, int], ...]:
        """The curve since the last call."""
        points, self.points = self.points, []
        width = max(1, -(-len(points) // POINTS))
        return tuple(
            (max(a for a, _ in points[i : i + width]), max(r for _, r in points[i : i + width]))
            for i in range(0, len(points), width)
        )
