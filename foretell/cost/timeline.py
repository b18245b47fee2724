"""Replay a trace through the caching allocator: live bytes over time, and who owns the peak.

    resident ─► first step ─► steady step ─► steady step      each op: outputs, scratch, then what dies
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from foretell.cost.allocator import CachingAllocator, OutOfMemory
from foretell.cost.scratch import extra_output_bytes, scratch
from foretell.trace.types import Op, Storage, Trace

WORKSPACE = "workspace"
SCRATCH = "scratch"

GEMMS = frozenset(
    f"aten.{name}" for name in (
        "mm.default", "addmm.default", "bmm.default", "baddbmm.default", "addbmm.default", "mv.default",
        "addmv.default", "dot.default", "_addmm_activation.default",
    )
)  # fmt: skip
"""Ops that make cuBLAS allocate its workspace, once for every thread that calls it."""


@dataclass(frozen=True, slots=True)
class Peak:
    """Highest point of a run of programs."""

    allocated: int
    reserved: int
    holders: Mapping[tuple[str, str], int]
    """(role, module) → bytes alive at the highest point of allocated memory."""
    op: str = ""
    module: str = ""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What an op needs besides what the trace says, on one kind of device."""

    capability: tuple[int, int]
    cublas_workspace_bytes: int


class Replay:
    """One process on one device, from start to the end of the last step it was asked for."""

    def __init__(self, trace: Trace, sizes: Sizes, *, limit: int | None = None, expandable: bool = False) -> None:
        self.trace, self.sizes = trace, sizes
        self.allocator = CachingAllocator(limit, expandable=expandable)
        self.blocks: dict[int, int] = {}
        self.failed: OutOfMemory | None = None
        self._workspaces: set[str] = set()
        self._scratch: dict[int, tuple[int, ...]] = {}
        self._workspace_bytes = 0
        self._at_peak: Callable[[Op | None, tuple[int, ...]], None] | None = None

    def start(self) -> None:
        """Bring in what lives before the step."""
        for number in self.trace.resident:
            self._allocate(number, 0)

    def run(self, name: str) -> None:
        """Run a named schedule of the trace, such as `first_step`."""
        for program, times in self.trace.schedule[name]:
            ops = self.trace.programs[program].ops
            for _ in range(times):
                for op in ops:
                    self._step(op)

    def _step(self, op: Op) -> None:
        if op.name in GEMMS:
            self._workspace(op)
        extra = extra_output_bytes(op) if op.allocates else 0
        for number in op.allocates:
            self._allocate(number, extra)
            extra = 0
        sizes = self._scratch.get(id(op))
        if sizes is None:
            sizes = self._scratch[id(op)] = scratch(op, self.sizes.capability)
        handles = [self.allocator.malloc(size) for size in sizes]
        if self._at_peak is not None:
            self._at_peak(op, sizes)
        for handle in handles:
            self.allocator.free(handle)
        for number in op.frees:
            handle = self.blocks.pop(number, None)
            if handle is not None:
                self.allocator.free(handle)

    def _allocate(self, number: int, extra: int) -> None:
        storage = self.trace.storages[number]
        if storage.host:
            return
        stale = self.blocks.pop(number, None)
        if stale is not None:
            self.allocator.free(stale)
        self.blocks[number] = self.allocator.malloc(storage.nbytes + extra)

    def _workspace(self, op: Op) -> None:
        thread = "backward" if op.phase in ("backward", "recompute") else "main"
        if thread not in self._workspaces:
            self._workspaces.add(thread)
            self.allocator.malloc(self.sizes.cublas_workspace_bytes)
            self._workspace_bytes += self.sizes.cublas_workspace_bytes


class Watched(Replay):
    """A replay that keeps who was alive at the highest point so far (slower)."""

    def __init__(self, trace: Trace, sizes: Sizes, *, limit: int | None = None, expandable: bool = False) -> None:
        super().__init__(trace, sizes, limit=limit, expandable=expandable)
        self.best = 0
        self.peak: tuple[str, str, dict[int, int], int] = ("", "", {}, 0)
        self._at_peak = self._look

    def _look(self, op: Op | None, sizes: tuple[int, ...]) -> None:
        allocated = self.allocator.allocated
        if allocated > self.best and op is not None:
            self.best = allocated
            self.peak = (op.name, op.module, dict(self.blocks), sum(sizes))


def peak_of(trace: Trace, sizes: Sizes, schedules: Iterable[str], *, expandable: bool = False) -> Peak:
    """Peak over these schedules run one after another, with its owners."""
    names = list(schedules)
    plain = Replay(trace, sizes, expandable=expandable)
    plain.start()
    for name in names:
        plain.run(name)
    return Peak(
        plain.allocator.peak_allocated, plain.allocator.peak_reserved, holders(trace, sizes, names, plain), "", ""
    )


def holders(trace: Trace, sizes: Sizes, schedules: list[str], done: Replay) -> dict[tuple[str, str], int]:
    """Who is alive when allocated memory first reaches its peak."""
    target = done.allocator.peak_allocated
    found: dict[tuple[str, str], int] = {}
    for live, scratch_bytes, workspace_bytes in _moments(trace, sizes, schedules, target):
        for number in live:
            storage: Storage = trace.storages[number]
            key = (storage.role, storage.module)
            found[key] = found.get(key, 0) + storage.nbytes
        found[(SCRATCH, "")] = scratch_bytes
        found[(WORKSPACE, "")] = workspace_bytes
        break
    return found


def _moments(
    trace: Trace, sizes: Sizes, schedules: list[str], target: int
) -> Iterator[tuple[set[int], int, int]]:
    replay = Watched(trace, sizes)
    replay.start()
    for name in schedules:
        replay.run(name)
    _, _, live, scratch_bytes = replay.peak
    del target
    yield set(live), scratch_bytes, replay._workspace_bytes
