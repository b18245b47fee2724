"""Prices of layouts: a sheet and a cluster behind what the search asks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from foretell.hardware.types import Cluster
from foretell.plan.legal import SPLIT_BACKWARD
from foretell.plan.precision import MIXED
from foretell.plan.types import LOOPED, Mesh
from foretell.price.network.collectives import Fabric, collective
from foretell.price.speeds import fabrics_of
from foretell.search.block_costs.ops import AFTER, BEFORE
from foretell.search.block_costs.sheet import Sheet, Works
from foretell.search.block_costs.work import Half, Work
from foretell.search.estimate.depth import Depth
from foretell.search.estimate.plan import Layout, Quick, composer, quick, recipe_for, works_of
from foretell.search.space.residency import KEPT, RecomputeOption, Ways
from foretell.search.space.stages import BlockStack
from foretell.search.traces.needed import PAIR

LARGE = 64
"""A micro-batch that leaves little to gain from a larger one."""


@dataclass
class SheetPricer:
    """A sheet on a cluster."""

    sheet: Sheet
    cluster: Cluster
    held: Depth = Depth.ALIVE
    """How bytes are found: what the caching allocator reserves is a few percent more, and takes longer to find."""
    recipe: str | None = None
    """The precision of the traces, if not each layout's own."""
    _bare: dict[object, float] = field(default_factory=dict)
    _stacks: dict[object, BlockStack] = field(default_factory=dict)
    _wires: dict[Mesh, tuple[str, dict[str, Fabric]]] = field(default_factory=dict)
    _seconds_of: dict[str, dict[tuple[str, int, str], float]] = field(default_factory=dict)
    """What split layers talk over → message → its seconds."""

    @property
    def blocks(self) -> tuple[str, ...]:
        return self.sheet.blocks

    def works(self, layout: Layout) -> Works:
        return works_of(layout, self.sheet, self.recipe)

    def quick(self, layout: Layout) -> Quick:
        return quick(layout, self.sheet, self.cluster, held=self.held, recipe=self.recipe)

    def optimist(self) -> SheetPricer:
        """What layouts cost by the traces that are there anyway: ranks that share parameters cast none and hold fewer bytes."""
        return replace(self, held=Depth.ALIVE, recipe=self.sheet.first, _bare={}, _stacks={})

    def limit(self, layout: Layout) -> float:
        mine = composer(self.sheet, self.cluster, layout.mesh)
        return mine.careful + mine.beside

    def stack(self, layout: Layout, treated: bool = False) -> BlockStack:
        """Bytes and seconds of blocks for one micro-batch; the same for layouts that differ elsewhere."""
        mesh = layout.mesh
        shared = (mesh.tp, mesh.cp, mesh.ep, mesh.dp_shard, mesh.spread > 1, self._fabrics(mesh)[0], mesh.pp > 1)
        key = (treated, self.recipe or recipe_for(layout), layout.micro_batch, shared, layout.compile, layout.precision, self._kept(layout))
        if key not in self._stacks:
            self._stacks[key] = self._made(layout, treated)
        return self._stacks[key]

    def rough(self, layout: Layout) -> float:
        """About `ideal`: as if every micro-batch took as long for each sample as the one that was traced."""
        return self._even(layout, PAIR[0])

    def ideal(self, layout: Layout) -> float:
        """Products and the rest on the device, evenly over the stages; messages of split layers, which nothing runs beside; and
        the waiting at both ends of a pipeline.

        A larger micro-batch takes less for each sample: the largest stands for all above those that were traced.
        """
        return self._even(layout, PAIR[0] if layout.micro_batch <= PAIR[0] else LARGE)

    def _even(self, layout: Layout, micro_batch: int) -> float:
        mesh = layout.mesh
        key = (mesh.tp, mesh.cp, mesh.ep, micro_batch, layout.precision, layout.compile)
        if key not in self._bare:
            data = max(2, mesh.ep) if self.cluster.count > 1 else 1
            like = replace(layout, mesh=Mesh(tp=mesh.tp, cp=mesh.cp, ep=mesh.ep, dp_shard=data), micro_batch=micro_batch)
            works = self.works(like)
            names: list[str | int] = [BEFORE, AFTER, *self.sheet.kinds]
            halves = [half for work in map(works.work, names) for half in (work.forward, work.backward)]
            self._bare[key] = (sum(half.seconds for half in halves) + self._sent(halves, mesh)) / micro_batch
        each = self._bare[key] * layout.micro_batch / layout.mesh.pp
        waits = 0.0 if layout.schedule in SPLIT_BACKWARD else (layout.mesh.pp - 1) / layout.interleave
        return each * (layout.accumulate + waits)

    def _fabrics(self, mesh: Mesh) -> tuple[str, dict[str, Fabric]]:
        """What split layers talk over, in words and by axis."""
        if mesh.tp * mesh.cp * mesh.ep == 1 or self.cluster.matrix is not None:  # where ranks are put is not known yet
            return "", {}
        if mesh not in self._wires:
            found = {axis: fabric for axis, fabric in fabrics_of(mesh, self.cluster).items() if axis in ("tp", "cp", "ep")}
            self._wires[mesh] = repr(found), found
        return self._wires[mesh]

    def _sent(self, halves: Iterable[Half], mesh: Mesh) -> float:
        """Seconds of the messages of split layers, which nothing runs beside."""
        words, fabrics = self._fabrics(mesh)
        known = self._seconds_of.setdefault(words, {})
        total = 0.0
        for half in halves:
            for kind, nbytes, times, axis in half.messages:
                if axis in fabrics:
                    seconds = known.get((kind, nbytes, axis))
                    if seconds is None:
                        seconds = known[kind, nbytes, axis] = collective(kind, nbytes, fabrics[axis]).seconds
                    total += seconds * times
        return total

    # ------------------------------------------------------------------ making

    def _made(self, layout: Layout, treated: bool) -> BlockStack:
        works, kinds = self.works(layout), self.sheet.kinds
        seconds, held, state = (dict[int, float]() for _ in range(3))
        ways: dict[int, Ways] = {}
        for kind in dict.fromkeys(kinds):
            seconds[kind], held[kind], state[kind] = self._piece(works, kind, layout)
            ways[kind] = self._ways(works, kind, layout.mesh) if treated else (KEPT,)
        return BlockStack(
            seconds=tuple(seconds[kind] for kind in kinds), held=tuple(held[kind] for kind in kinds),
            state=tuple(state[kind] for kind in kinds), ways=tuple(ways[kind] for kind in kinds),
            before=self._piece(works, BEFORE, layout), after=self._piece(works, AFTER, layout),
            stream=float(works.boundary), beside=self._beside(works, layout),
        )  # fmt: skip

    def _piece(self, works: Works, key: str | int, layout: Layout) -> tuple[float, float, float]:
        work, mesh = works.work(key), layout.mesh
        summed, whole = self._kept(layout)
        state = works.state(key, mesh.dp_shard * mesh.cp, data=mesh.spread > 1, summed=summed, whole=whole)
        return self._seconds(work, mesh), float(max(0, work.forward.net)), float(state)

    def _beside(self, works: Works, layout: Layout) -> tuple[float, float]:
        """What is outside of all tensors; and beside a block that is run, or what comes after all of them, their own temporary
        tensors and whole parameters."""
        around = composer(self.sheet, self.cluster, layout.mesh).beside
        shares = layout.mesh.dp_shard * layout.mesh.cp > 1 and not self._kept(layout)[1]

        def of(key: str | int, units: int) -> float:
            work = works.work(key)
            gathered = units * works.whole(key) if shares else 0
            return float(max(work.forward.peak - work.forward.net, work.backward.peak) + gathered)

        block = max((of(kind, 2) for kind in set(self.sheet.kinds)), default=0.0)  # a model may have none
        return around + block, around + max(of(AFTER, 1), block - max(0, works.work(AFTER).forward.net))

    @staticmethod
    def _kept(layout: Layout) -> tuple[str | None, bool]:
        """The dtype in which whole gradients are added up, where they are; and whether parameters stay whole after forward."""
        if layout.mesh.dp_shard * layout.mesh.cp == 1:
            return None, False
        piped = layout.mesh.pp > 1 and layout.accumulate > 1
        dtype = "float32" if layout.precision in MIXED else "bfloat16"
        return dtype if piped else None, layout.schedule in LOOPED or layout.reshard is False

    def _ways(self, works: Works, kind: int, mesh: Mesh) -> Ways:
        keep = works.work(kind)
        kept, found = self._seconds(keep, mesh), [KEPT]
        for mode in works.modes(kind)[1:]:
            work = works.work(kind, mode)
            saves = float(keep.forward.net - (work.forward.net - work.lingering))
            if saves > 0:
                found.append(RecomputeOption(saves, max(0.0, self._seconds(work, mesh) - kept), mode))
        return tuple(found)

    def _seconds(self, work: Work, mesh: Mesh) -> float:
        return work.forward.seconds + work.backward.seconds + self._sent((work.forward, work.backward), mesh)
