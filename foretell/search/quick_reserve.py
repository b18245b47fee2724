"""How much more the caching allocator reserves than is alive at once: a short stack of blocks, replayed.

Between steps, state of the optimizer and whole parameters take parts of large blocks that logits had, and the next logits
need new ones. That depends on sizes and order, not on how many blocks there are: two of each run stand for all, and what
they reserve beyond the sum of their own pools is taken for the whole stack. The replay is that of `simulate.memory.replay`, with
what fully_shard allocates around each block.
"""

from __future__ import annotations

from collections.abc import Sequence

from foretell.lower.fsdp.units import GATHER_STREAM, REDUCE_STREAM
from foretell.search.quick_memory import Flight, Keeper
from foretell.search.quick_stage import Stage, Way
from foretell.search.sheet import Works
from foretell.search.sheet_modes import KEEP, in_mode
from foretell.search.sheet_ops import AFTER, BEFORE
from foretell.simulate.memory.allocator import CachingAllocator
from foretell.simulate.memory.replay import GEMMS
from foretell.trace import types
from foretell.trace.types import Op, Program, TensorSpec
from foretell.units import DTYPE_BYTES

STEPS = 2
"""The first, which makes the optimizer's state, and one more."""
LARGE = 1 << 20
"""Smaller tensors have a pool of their own, which hardly counts."""
EACH = 2
"""Blocks of a run that are replayed."""


def shortened(stage: Stage) -> Stage:
    return Stage(tuple((kind, mode, min(count, EACH)) for kind, mode, count in stage.runs), stage.first, stage.last)


def slack(works: Works, way: Way, stage: Stage, root: str, accumulate: int, *, piped: bool = False) -> int:
    """Bytes reserved beyond the highest points of the pools; `piped`: of a stage that adds whole gradients up."""
    short = shortened(stage)
    most = _Replay(works, way, short, root, accumulate > 1, piped and way.data).peak()
    keeper = Keeper(works, way, min(accumulate, 2))
    if piped and way.data:
        alone = keeper.piped([(short, root)], Flight(((1, 0),), 2, 0, looped=False))
    else:
        alone = keeper.alone(short, root)
    return max(0, most - alone.reserved)


class _Replay:
    def __init__(self, works: Works, way: Way, stage: Stage, root: str, more: bool, piped: bool) -> None:
        self.works, self.way, self.stage, self.root, self.more = works, way, stage, root, more
        self.piped = piped
        self.sums: dict[int, list[int]] = {}
        """Whole gradients of a stage, added up over micro-batches."""
        self.allocator = CachingAllocator(None)
        self.alive: dict[tuple[int, int], int] = {}
        self.open: dict[int, list[int]] = {}
        """Size → what one piece makes and another frees."""
        self.gradients: dict[int, list[int]] = {}
        self.kept_gradients: list[int] = []
        self.whole: dict[int, list[int]] = {}
        self.parts: dict[int, list[int]] = {}
        self.workspaces: set[str] = set()
        self.held_gather = self.held_reduce = -1
        self.blocks = [(kind, mode) for kind, mode, count in stage.runs for _ in range(count)]
        self.programs: dict[tuple[int | str, str], tuple[Program, Program, frozenset[int]]] = {}

    def peak(self) -> int:
        material = self.works.material
        keys: list[int | str] = [self.root, *(kind for kind, _ in self.blocks)]
        for key in keys:
            for _, mine, _, _ in self._shards(key):
                self._take(mine.nbytes)
        for size in (material.buffers, *[material.inputs] * (1 + self.more)):
            self._take(size)
        for step in range(STEPS):
            for again in range(1 + self.more):
                self._micro(bool(again))
            if step == 0:
                slots = round(self.works.slots)
                for key in keys:
                    for _, mine, trained, _ in self._shards(key):
                        for _ in range(slots if trained else 0):
                            self._take(mine.nbytes)
            self._drop(self.kept_gradients)
            self.kept_gradients = []
        return self.allocator.peak_reserved

    def _take(self, nbytes: int, stream: int = 0) -> int:
        return self.allocator.malloc(nbytes, stream) if nbytes > LARGE else -1

    def _drop(self, handles: Sequence[int]) -> None:
        for handle in handles:
            if handle >= 0:
                self.allocator.free(handle)

    def _shards(self, key: int | str) -> list[tuple[TensorSpec, TensorSpec, bool, int]]:
        return self.works.shards(key, self.way.shards, data=self.way.data)

    # ------------------------------------------------------------------ one micro-batch

    def _micro(self, again: bool) -> None:
        last = len(self.blocks)
        self._gather(-1, self.root, forward=True)
        if self.stage.first:
            self._run(-1, BEFORE, KEEP, 0)
        for place, (kind, mode) in enumerate(self.blocks):
            self._gather(place, kind, forward=True)
            self._run(place, kind, mode, 0)
            if self.way.data and self.way.reshard is not False:
                self._reshard(place, kind)
        if self.stage.last:
            self._run(last, AFTER, KEEP, 0)
        self._drop([self.held_gather])
        self.held_gather = -1
        ahead = self._prefetch(last - 1)
        if self.stage.last:
            self._run(last, AFTER, KEEP, 1)
        for place in range(last - 1, -1, -1):
            kind, mode = self.blocks[place]
            if self.way.data and place not in self.whole:
                self._copy_out(place, kind)
                self._drop([ahead])
                ahead = self._prefetch(place - 1)
            self._run(place, kind, mode, 1)
            self._reduce(place, kind, again)
        if self.stage.first:
            self._run(-1, BEFORE, KEEP, 1)
        self.gradients.setdefault(-1, []).extend(self.gradients.pop(last, []))
        self._reduce(-1, self.root, again)
        self._drop([self.held_reduce])
        self.held_reduce = -1
        for handles in self.open.values():
            self._drop(handles)
        self.open.clear()

    def _reshard(self, place: int, key: int | str) -> None:
        """Given back after forward, but for the part that fewer ranks keep together."""
        self._drop(self.whole.pop(place, []))
        if self.way.reshard is not True:
            sizes = [spec.nbytes // int(self.way.reshard) for spec, _, _, _ in self._shards(key)]
            self.parts[place] = [self._take(size) for size in sizes]

    def _gather(self, place: int, key: int | str, *, forward: bool) -> None:
        if not self.way.data or place in self.whole or not self._shards(key):
            return
        output = self._begin_gather(key)
        self._copy_out(place, key)
        self._drop([self.held_gather])
        self.held_gather = output

    def _begin_gather(self, key: int | str) -> int:
        if self.way.shards == 1:
            return -1
        unit = self.works.unit(key, self.way.shards, data=True)
        parts = unit.parts
        for part in parts:
            source = self._take(part.gather_input, GATHER_STREAM)
            output = self._take(part.gather_output, GATHER_STREAM)
            self._drop([source] if part is parts[-1] else [source, output])
        return output

    def _prefetch(self, place: int) -> int:
        if not self.way.data or place < 0 or place in self.whole:
            return -1
        return self._begin_gather(self.blocks[place][0])

    def _copy_out(self, place: int, key: int | str) -> None:
        sizes = [ranks * mine.numel * DTYPE_BYTES[spec.dtype] for spec, mine, _, ranks in self._shards(key)]
        self.whole[place] = [self._take(size) for size in sizes]
        self._drop(self.parts.pop(place, []))

    def _reduce(self, place: int, key: int | str, again: bool) -> None:
        mine = self.gradients.pop(place, [])
        if not self.way.data:
            if again:
                self._drop(mine)
            else:
                self.kept_gradients += mine
            return
        if self.piped and not again:  # gradients are taken over, parameters stay whole
            summed = self.works.reduce
            specs = [spec for spec, _, trained, _ in self._shards(key) if trained]
            self.sums[place] = [self._take(spec.numel * DTYPE_BYTES[summed or spec.dtype]) for spec in specs]
            self._drop(mine)
            return
        if self.piped:
            self._drop(mine)
            mine = self.sums.pop(place, [])
        self._drop([*self.whole.pop(place, []), self.held_reduce])
        self.held_reduce = -1
        unit = self.works.unit(key, self.way.shards, data=True)
        if not unit.trained:
            return
        self.held_reduce = self._take(unit.largest_reduced)
        self._drop(mine)
        scattered = self._take(unit.reduce_output, REDUCE_STREAM)
        made = self._take(unit.gradient, REDUCE_STREAM)
        self._drop([scattered])
        if again and not self.piped:
            self._drop([made])
        else:
            self.kept_gradients.append(made)

    # ------------------------------------------------------------------ ops

    def _program(self, key: int | str, mode: str) -> tuple[Program, Program, frozenset[int]]:
        found = self.programs.get((key, mode))
        if found is None:
            material = self.works.material
            phases = in_mode(material.pieces[key], mode, material.storages)
            late = (*phases.again, *phases.backward)
            mortal = frozenset(number for op in (*phases.forward, *late) for number in op.frees)
            found = self.programs[key, mode] = (Program("", phases.forward), Program("", late), mortal)
        return found

    def _run(self, place: int, key: int | str, mode: str, half: int) -> None:
        program = self._program(key, mode)
        storages, mortal = self.works.material.storages, program[2]
        malloc, free = self.allocator.malloc, self.allocator.free
        for op, stages, extra in self.works.prices.sizes.events(program[1] if half else program[0]):
            for number in op.allocates:
                storage = storages[number]
                if storage.host or storage.nbytes <= LARGE:
                    continue
                handle = malloc(storage.nbytes + extra)
                extra = 0
                if storage.role == types.GRADIENT:
                    self.gradients.setdefault(place, []).append(handle)
                elif number in mortal:
                    stale = self.alive.pop((place, number), None)
                    if stale is not None:
                        free(stale)
                    self.alive[place, number] = handle
                else:
                    self.open.setdefault(storage.nbytes, []).append(handle)
            if op.name in GEMMS:
                self._workspace(op)
            for stage in stages:
                for handle in [malloc(size) for size in stage if size > LARGE]:
                    free(handle)
            for number in op.frees:
                gone = self.alive.pop((place, number), None)
                if gone is None and (waiting := self.open.get(storages[number].nbytes)):
                    gone = waiting.pop()
                if gone is not None:
                    free(gone)

    def _workspace(self, op: Op) -> None:
        thread = "forward" if op.phase == "forward" else "backward"
        if thread not in self.workspaces:
            self.workspaces.add(thread)
            self.allocator.malloc(self.works.prices.sizes.cublas_workspace_bytes)
        if op.name == "aten.addmm.default" and "lt" not in self.workspaces:
            self.workspaces.add("lt")
            self.allocator.malloc(1 << 20)
