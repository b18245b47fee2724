"""Through the space of layouts, the most promising first, until no other can be better.

Every layout has seconds that it cannot go below: its products, on so many ranks, with the pipeline's unavoidable
waiting. Layouts are filled and costed about in that order; one whose least is clearly above the best that was found
is left: it cannot win. What does not fit at a micro-batch is not tried with a larger one.
Ways to compile and to give parameters back are then varied around the best layouts of different kinds.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from foretell.errors import UserError
from foretell.hardware.types import Cluster
from foretell.plan.legal import SPLIT_BACKWARD
from foretell.plan.types import Mesh
from foretell.search.estimate.plan import Layout
from foretell.search.solve import engine
from foretell.search.solve.front import TIGHT, Point, complaint, point_of, score
from foretell.search.space import layouts as space
from foretell.search.space.constraints import SearchConstraints
from foretell.search.space.fill import Filled, Pricer, fill, least_seconds

BEYOND, BEYOND_LOOPED = 0.1, 0.0
"""Layouts are costed when their least is at most this much above the best: for runners-up that differ in kind. Of
schedules that wait less than the simple ones, only those that might win."""
MOST_RATIO = 1.05
"""How many times what its blocks alone take a layout is thought to take at least, however much those took that were costed."""
VARIED = 8
"""Layouts around which compiling and giving back are varied, besides the best of each number of devices."""

Progress = Callable[[str], None]
Filler = Callable[[Layout, Any, float, float], Filled | None]
"""Layout, its pricer, bytes at most, bytes up to which it is not tight → the layout made whole."""


@dataclass
class Explored:
    """What was found in the space."""

    points: list[Point] = field(default_factory=list)
    """That fit, in the order they were found."""
    nearest: Filled | None = None
    """Of what does not fit: the one with the fewest bytes too many."""
    misfits: dict[Mesh, Filled] = field(default_factory=dict)
    """Mesh of which nothing fitted → what came nearest."""
    unfit: int = 0
    """Layouts that do not fit, or hold more than one that does not."""
    left: Counter[str] = field(default_factory=Counter)
    """Other reason → how many layouts were left out for it."""
    costed: int = 0
    there: int = 0
    """Layouts of the space."""
    seconds: float = 0.0
    stopped: str = ""
    """Why not all was seen that may matter; empty where it was."""


@dataclass
class Explorer:
    """One search through the space."""

    room: space.Room
    pricer: Pricer
    tokens_per_sample: int = 1
    patience: float = float("inf")
    """Seconds after which the search ends with what it has."""
    progress: Progress = lambda _: None
    filler: Filler | None = None
    """What makes a layout whole; None: `space_fill.fill`."""
    optimist: Pricer | None = None
    found: Explored = field(default_factory=Explored)
    full: dict[tuple[Mesh, str], int] = field(default_factory=dict)
    """Mesh and schedule → micro-batch that did not fit."""
    leasts: dict[Layout, float] = field(default_factory=dict)
    ratio: float = 0.0
    """How many times that at least the layouts took that were costed; 0: none was."""
    heavy: set[object] = field(default_factory=set)
    """Layouts that do not fit with every block kept under the schedule that holds least."""
    best: float = float("inf")
    """Seconds of the best layout so far, scaled as the objective has it."""
    varying: bool = False
    """Whether what is tried is around the best layouts, which no bound holds for."""
    floors: dict[object, float] = field(default_factory=dict)
    """Mesh and batch → seconds of the simple schedule, without its waiting; with the schedule, those of shards alone."""

    @property
    def wishes(self) -> SearchConstraints:
        return self.room.wishes

    @property
    def cluster(self) -> Cluster:
        return self.room.cluster

    @property
    def costed(self) -> int:
        return self.found.costed

    def run(self) -> Explored:
        """All of it; Ctrl-C and the end of patience keep what was found."""
        began = time.monotonic()
        self.found.stopped = engine.search(self, patience=self.patience)
        self.found.seconds = time.monotonic() - began
        return self.found

    # ------------------------------------------------------------------ layouts

    def candidates(self) -> Iterator[Layout]:
        """Every layout, then compiling and giving back varied around the best of them."""
        compile = (self.wishes.compile or ("none",))[0]
        frames = [self._first_way(frame, compile) for frame in space.every(self.room)]
        self.found.there = len(frames)
        if None in frames:
            self.found.left["cannot be compiled as asked"] += frames.count(None)
        for group in self._groups([frame for frame in frames if frame is not None]):
            ordered = sorted(group, key=lambda frame: (self._scaled(self.pricer.rough(frame), frame), frame.micro_batch))
            self.best = float("inf")
            yield from sorted(ordered, key=lambda frame: (_apart(frame), _looped(frame)))
            if self.best < float("inf") and self.wishes.objective == "smallest":
                break
        self.varying = True
        yield from self._variants()

    def hopeless(self, one: Layout) -> bool:
        if self.varying:
            return self._ruled_out(one)
        lost = self._ruled_out(one) or self._loses_by_bound(one, self.best)
        self.found.unfit += lost and self.best == float("inf")
        return lost

    def cost(self, one: Layout) -> None:
        point = self._filled(one)
        if point is None or self.varying:
            return
        self._learn(one, point)
        if not complaint(point, self.wishes):
            self.best = min(self.best, self._scaled(point.seconds, one))

    def _learn(self, frame: Layout, point: Point) -> None:
        """What a layout took without its waiting; without messages of the data axes and what it computes again."""
        parts, least = point.quick.parts, self._least(frame)
        if least:
            self.ratio = max(1.0, min(self.ratio or MOST_RATIO, point.quick.seconds / least))
        self.floors[_core(frame)] = point.seconds - parts.get("bubble", 0.0)
        if frame.mesh.dp_replicate == 1:
            less = sum(seconds for name, seconds in parts.items() if name.startswith("dp_") or name == "recompute")
            self.floors[_core(frame), frame.schedule] = point.seconds - less

    def _loses_by_bound(self, frame: Layout, best: float) -> bool:
        """Whether a layout cannot come near the best: by its products, or by what a simpler schedule took without waiting.

        One that needs traces of its own is left where it cannot win.
        """
        if self._scaled(self.pricer.ideal(frame), frame) > best * (1 + BEYOND):
            return True
        whole = self.floors.get((_core(replace(frame, mesh=_all_shards(frame.mesh))), frame.schedule))
        if whole is not None and self._scaled(whole, frame) > best * (1 + BEYOND):
            return True
        if _looped(frame):
            floor = self.floors.get(_core(frame))
            if floor is None:  # the simple schedule did not fit, or could not win: no more than one a rank is held there
                return frame.schedule != self.wishes.schedule
            if self._scaled(floor, frame) > best * (1 + BEYOND_LOOPED):
                return True
        if best == float("inf"):
            return False
        least = self._least(frame) * (1.0 if _looped(frame) else max(1.0, self.ratio))
        if self._scaled(least, frame) > best * (1 + (BEYOND_LOOPED if _looped(frame) else BEYOND)):
            return True
        return _apart(frame) and self._loses(frame, best)

    def _least(self, frame: Layout) -> float:
        """By what its blocks alone take and hold."""
        if self.filler is not None:
            return 0.0
        if frame not in self.leasts:
            pricer = self._optimist if _apart(frame) else self.pricer  # nothing is traced for a bound
            self.leasts[frame] = least_seconds(frame, pricer, self._limit(frame))
        return self.leasts[frame]

    @property
    def _optimist(self) -> Pricer:
        if self.optimist is None:
            self.optimist = self.pricer.optimist()
        return self.optimist

    def _limit(self, frame: Layout) -> float:
        return min(self.pricer.limit(frame), self.cluster.device.memory_bytes * (1 - self.wishes.margin))

    def _loses(self, frame: Layout, best: float) -> bool:
        """Whether a layout cannot win, or does not fit, even by an optimist."""
        try:
            filled = (self.filler or fill)(frame, self._optimist, float("inf"), 0.0)
        except UserError:
            return False  # it says why when it is costed
        if filled is None:
            return False
        if not filled.fits:
            key = frame.mesh, self._tight_key(frame)
            self.full[key] = min(self.full.get(key, 1 << 62), frame.micro_batch)
        return not filled.fits or self._scaled(filled.quick.seconds, frame) > best

    def _first_way(self, frame: Layout, compile: str) -> Layout | None:
        ways = list(space.compiles(self.room, frame))
        return next((way for way in ways if way.compile == compile), ways[0] if ways else None)

    def _groups(self, frames: Sequence[Layout]) -> Iterable[list[Layout]]:
        """For the smallest: by devices, fewest first. Else all together."""
        if self.wishes.objective != "smallest":
            return [list(frames)]
        by_size: dict[int, list[Layout]] = {}
        for frame in frames:
            by_size.setdefault(frame.mesh.world, []).append(frame)
        return [by_size[size] for size in sorted(by_size)]

    def _scaled(self, seconds: float, layout: Layout) -> float:
        """For each sample; money and energy go with the seconds of all devices."""
        per_sample = seconds / layout.global_batch
        return per_sample * (layout.mesh.world if self.wishes.any_size else 1)

    def _filled(self, frame: Layout) -> Point | None:
        """Fill and cost one layout; None where it does not fit."""
        capacity = self.cluster.device.memory_bytes
        most = capacity * (1 - self.wishes.margin) if self.wishes.margin else float("inf")
        try:
            filled = (self.filler or fill)(frame, self.pricer, most, capacity * (1 - TIGHT))
        except UserError as error:  # what a schedule or a split cannot do
            self.found.left[error.problem] += 1
            return None
        if filled is None:
            self.found.left[f"the model cannot be cut into {frame.mesh.pp * frame.interleave} stages"] += 1
            return None
        if frame.schedule == "1f1b" and filled.tight is None and set(filled.layout.modes) != {"keep"}:
            self.heavy.add(_core(frame))
        self.found.costed += 1
        if self.found.costed % 64 == 0:
            self.progress(f"{self.found.costed} of {self.found.there} layouts costed")
        if not filled.fits:
            self.found.unfit += 1
            key = frame.mesh, self._tight_key(frame)
            self.full[key] = min(self.full.get(key, 1 << 62), frame.micro_batch)
            if self.found.nearest is None or filled.short < self.found.nearest.short:
                self.found.nearest = filled
            known = self.found.misfits.get(frame.mesh)
            if known is None or filled.short < known.short:
                self.found.misfits[frame.mesh] = filled
            return None
        point = point_of(filled, self.cluster, self.tokens_per_sample)
        self.found.points.append(point)
        if filled.tight is not None:
            self.found.points.append(point_of(filled.tight, self.cluster, self.tokens_per_sample))
        return point

    def _ruled_out(self, frame: Layout) -> bool:
        """Whether a smaller micro-batch did not fit, or more shards, or one stage a rank, or all kept where all must be: these
        hold less."""
        if frame.schedule in SPLIT_BACKWARD and _core(frame) in self.heavy:
            return True
        keys = [self._tight_key(frame)]
        if frame.mesh.pp > 1 and frame.schedule not in ("1f1b", "gpipe"):
            keys.append(self._tight_key(replace(frame, schedule="1f1b", interleave=1, reshard=True)))
        meshes = {frame.mesh, _all_shards(frame.mesh)}
        return any(frame.micro_batch >= self.full.get((mesh, key), 1 << 62) for key in keys for mesh in meshes)

    def _tight_key(self, frame: Layout) -> str:
        return f"{frame.schedule} {frame.interleave} {frame.reshard} {frame.compile} {frame.precision}"

    # ------------------------------------------------------------------ around the best

    def _variants(self) -> Iterator[Layout]:
        seen = {_variant(point.layout) for point in self.found.points}
        ordered = distinct(self.found.points, self.wishes)
        sizes = {point.devices: point for point in reversed(ordered)}
        chosen = {point.layout: point for point in (*ordered[:VARIED], *sizes.values())}
        for point in chosen.values():
            for way in space.compiles(self.room, space.bare(point.layout)):
                for frame in space.reshards(self.room, way):
                    if _variant(frame) not in seen:
                        seen.add(_variant(frame))
                        yield frame


def _all_shards(mesh: Mesh) -> Mesh:
    """The same without replicas."""
    return replace(mesh, dp_replicate=1, dp_shard=mesh.data)


def _apart(frame: Layout) -> bool:
    """Whether ranks share no parameters: they then compute otherwise, and need traces that the others do not."""
    return frame.mesh.world > 1 and frame.mesh.spread == 1


def _looped(frame: Layout) -> bool:
    """Whether a schedule waits less than the simple ones, and holds more."""
    return frame.interleave > 1 or frame.schedule in SPLIT_BACKWARD


def _core(frame: Layout) -> object:
    return frame.mesh, frame.micro_batch, frame.accumulate, frame.precision


def _variant(frame: Layout) -> object:
    return frame.mesh, frame.micro_batch, frame.schedule, frame.interleave, frame.compile, frame.reshard, frame.precision


def distinct(points: Sequence[Point], wishes: SearchConstraints) -> list[Point]:
    """The best of every kind, the best first: a kind is a mesh, a precision, what is computed again, and how it is compiled."""
    ordered = sorted(points, key=lambda point: score(point, wishes))
    return engine.each_kind((point for point in ordered if not complaint(point, wishes)), lambda point: kind(point.layout))


def kind(layout: Layout) -> Hashable:
    looped = layout.schedule if layout.mesh.pp > 1 else None
    return layout.mesh, looped, tuple(sorted(set(layout.modes) - {"keep"})), layout.compile, layout.reshard, layout.precision
