"""Quick costs where devices are unlike: a stage is as quick as its slowest device, and holds what its smallest one does.

    one sheet for each kind of device ─► events of every stage from the sheet of its slowest device
                                      ─► bytes of every stage against the room of its smallest device

`simulate.plan` costs a plan by the same two rules. Bytes are told as though every device were the smallest: what a larger
one has more is taken off, so that one limit holds for all stages. `shown` gives them as they are.

`fill_by_speed` cuts a pipeline with `mixed.share_best`: every order of the groups, and blocks shared by how long each
takes on each kind of device. It keeps the better of that and the cuts that like devices would have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from foretell.errors import UserError
from foretell.hardware.types import Cluster, Device
from foretell.plan.legal import SPLIT_BACKWARD
from foretell.plan.types import Mesh, Plan
from foretell.price.heterogeneous import slowest_at, smallest_at
from foretell.search.block_costs.sheet import Sheet, Works
from foretell.search.estimate.depth import Depth, Peak
from foretell.search.estimate.pipeline import Order, Pipe
from foretell.search.estimate.plan import Composer, Layout, Ops, Quick, composer
from foretell.search.heterogeneous.pipeline import Bytes, SharedBlocks, islands, share_best
from foretell.search.space.fill import Filled, fill
from foretell.search.space.price import SheetPricer
from foretell.search.space.stages import BlockStack, in_flight

BEYOND = 0.03
"""Layouts are filled when their compute alone is at most this much above the quickest that was found."""
MODES = ("keep", "selective", "recompute")


@dataclass(frozen=True)
class Kinds:
    """Which devices decide at each place of the pipeline."""

    slowest: tuple[str, ...]
    """For seconds."""
    smallest: tuple[str, ...]
    """For memory."""


@dataclass
class MixedPricer:
    """Sheets of unlike devices on one cluster; what `space_fill.Pricer` asks for."""

    cluster: Cluster
    sheet_of: Callable[[Cluster], Sheet]
    """A cluster → the sheet of its `device`."""
    held: Depth = Depth.ALIVE
    each: dict[str, SheetPricer] = field(default_factory=dict)
    """Device → prices as though all were like it."""
    least: float = float("inf")
    """Seconds a sample of the quickest layout of all devices so far."""
    _kinds: dict[tuple[Mesh, tuple[int, ...]], Kinds] = field(default_factory=dict)
    _shared: dict[object, SharedBlocks | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for device in self.cluster.devices if not self.each else ():
            seen = replace(self.cluster, device=device)
            self.each[device.name] = SheetPricer(self.sheet_of(seen), seen, held=self.held)

    @property
    def main(self) -> SheetPricer:
        """Of the smallest device."""
        return self.each[self.cluster.device.name]

    @property
    def blocks(self) -> tuple[str, ...]:
        return self.main.blocks

    def kinds(self, layout: Layout) -> Kinds:
        key = layout.mesh, layout.placement
        if key not in self._kinds:
            plan = Plan(model={}, hardware="", mesh=layout.mesh, placement=layout.placement)
            self._kinds[key] = Kinds(
                tuple(device.name for device in slowest_at(plan, self.cluster)),
                tuple(device.name for device in smallest_at(plan, self.cluster)),
            )
        return self._kinds[key]

    # ------------------------------------------------------------------ what a search asks

    def optimist(self) -> MixedPricer:
        return replace(self, each={name: one.optimist() for name, one in self.each.items()}, _kinds={}, _shared={})

    def quick(self, layout: Layout) -> Quick:
        kinds = self.kinds(layout)
        if layout.mesh.pp > 1:
            return self._piped(layout, kinds)
        slow, small = self.each[kinds.slowest[0]], self.each[kinds.smallest[0]]
        found = slow.quick(layout)
        if slow is small:
            return found
        held = small.quick(layout)
        return replace(
            found, memory_bytes=held.memory_bytes, margin_bytes=held.margin_bytes, best_margin_bytes=held.best_margin_bytes,
            stage_memory=held.stage_memory,
        )  # fmt: skip

    def shown(self, layout: Layout) -> tuple[int, ...]:
        """Bytes at each place of the pipeline, as its devices show them."""
        more = [self._room(name, layout) - self._room(self.cluster.device.name, layout) for name in self.kinds(layout).smallest]
        return tuple(bytes_ + extra for bytes_, extra in zip(self.quick(layout).stage_memory, more, strict=True))

    def limit(self, layout: Layout) -> float:
        return self.main.limit(layout)

    def stack(self, layout: Layout, treated: bool = False) -> BlockStack:
        return self.main.stack(layout, treated)

    def rough(self, layout: Layout) -> float:
        return self._together(layout, SheetPricer.rough)

    def ideal(self, layout: Layout) -> float:
        return self._together(layout, SheetPricer.ideal)

    def _together(self, layout: Layout, one: Callable[[SheetPricer, Layout], float]) -> float:
        """Seconds of stages that each do as much of the work as they are quick; of several a rank, that are cut evenly."""
        names = self.kinds(layout).slowest
        seconds = {name: one(self.each[name], layout) for name in set(names)}
        if layout.interleave > 1:
            return max(seconds.values())
        return len(names) / sum(1 / seconds[name] for name in names)

    # ------------------------------------------------------------------ pipelines

    def _piped(self, layout: Layout, kinds: Kinds) -> Quick:
        modes = layout.modes or ("keep",) * len(self.blocks)
        pipes = {name: self._pipe(name, layout, modes) for name in {*kinds.slowest, *kinds.smallest}}
        timed, held = ([pipes[name] for name in names] for names in (kinds.slowest, kinds.smallest))
        main = self.main
        return _Unlike(self._composer(main, layout), layout, main.works(layout), modes, timed, held).cost(self.held)

    def _pipe(self, name: str, layout: Layout, modes: Sequence[str]) -> Pipe:
        one = self.each[name]
        return Pipe(self._composer(one, layout), layout, one.works(layout), modes)

    def _composer(self, one: SheetPricer, layout: Layout) -> Composer:
        return composer(one.sheet, one.cluster, layout.mesh, layout.placement)

    def _room(self, name: str, layout: Layout) -> int:
        """Bytes that a rank on such a device may reserve."""
        return self._composer(self.each[name], layout).careful

    # ------------------------------------------------------------------ by speed

    def shares(self, layout: Layout) -> bool:
        """Whether a layout is cut by speed: pipelines of all devices with one stage a rank."""
        return layout.mesh.pp > 1 and layout.interleave == 1 and layout.mesh.world == self.cluster.count

    def hopeless(self, layout: Layout) -> bool:
        """Whether the best cuts of a layout that keeps everything take clearly longer than what was found, messages aside."""
        shared = self.by_speed(layout, "keep") if self.shares(layout) and self.least < float("inf") else None
        if shared is None or layout.schedule in SPLIT_BACKWARD:
            return False
        return shared.step_seconds(layout.accumulate) / layout.global_batch > self.least * (1 + BEYOND)

    def by_speed(self, layout: Layout, mode: str, less: float = 0.0) -> SharedBlocks | None:
        """Cuts and order of the groups for a pipeline of one stage a rank; None where none fits.

        `less` are bytes of every device that are not to be used.
        """
        mesh = layout.mesh
        key = (mesh, layout.micro_batch, layout.accumulate, layout.schedule, layout.precision, layout.compile, mode, round(less))
        if key not in self._shared:
            self._shared[key] = self._share(layout, mode, less)
        return self._shared[key]

    def _share(self, layout: Layout, mode: str, less: float) -> SharedBlocks | None:
        mesh, flights = layout.mesh, in_flight(layout.schedule or "1f1b", layout.mesh.pp, 1, layout.accumulate)
        main = self.main.stack(layout, mode != "keep")
        seconds = {name: _seconds(one.stack(layout), main, mode) for name, one in self.each.items()}
        plain = replace(layout, placement=())

        def beside(device: Device) -> int:
            return int(device.memory_bytes - self._room(device.name, plain) + less)

        try:
            found = islands(self.cluster, mesh.world // mesh.pp, beside_bytes=beside)
            return share_best(
                found, _bytes(main, mode), lambda name, block: seconds[name][block],
                micro_batches=layout.accumulate, in_flight=lambda stage, stages: flights[stage],
            )  # fmt: skip
        except UserError:  # groups that make no whole stages, fewer blocks than stages, too little memory
            return None


class _Unlike(Pipe):
    """A pipeline whose ranks are each priced by their own devices."""

    def __init__(
        self, main: Composer, layout: Layout, works: Works, modes: Sequence[str], timed: Sequence[Pipe], kept: Sequence[Pipe]
    ) -> None:
        super().__init__(main, layout, works, modes)
        self.alone, self.kept = timed, kept

    def timed(self, order: Order, walked: int, memories: Sequence[Peak]) -> Quick:
        found = super().timed(order, walked, memories)
        return replace(found, joules=self._joules(found.seconds))

    def _joules(self, seconds: float) -> float | None:
        """Of all devices: each place of the pipeline draws what its own devices draw."""
        total = 0.0
        for rank, pipe in enumerate(self.alone):
            drawn = pipe.composer.joules_of([(pipe.ops(rank), self.update(rank))], seconds)
            if drawn is None:
                return None
            total += drawn / self.ranks
        return total

    def events(self, index: int) -> Mapping[str, float]:
        return self.alone[self.where[index]].events(index)

    def update(self, rank: int) -> float:
        return self.alone[rank].update(rank)

    def ops(self, rank: int) -> Ops:
        return self.alone[rank].ops(rank)

    def memory(self, rank: int, order: Order, held: Depth) -> Peak:
        mine = self.kept[rank]
        found, more = mine.memory(rank, order, held), mine.composer.careful - self.composer.careful
        return Peak(found.reserved - more, found.allocated - more) if more else found


def _seconds(stack: BlockStack, main: BlockStack, mode: str) -> list[float]:
    """Of each block in a mode; what runs before and after the blocks is with the first and the last.

    Computing a block again is taken to cost the same share of it as on the smallest device (`main`).
    """
    more = [next((way.seconds for way in ways if way.mode == mode), 0.0) for ways in main.ways]
    found = [
        seconds * (1 + extra / base if base else 1.0)
        for seconds, base, extra in zip(stack.seconds, main.seconds, more, strict=True)
    ]
    found[0] += stack.before[0]
    found[-1] += stack.after[0]
    return found


def _bytes(stack: BlockStack, mode: str) -> list[Bytes]:
    saves = [next((way.saves for way in ways if way.mode == mode), 0.0) for ways in stack.ways]
    held = [max(0.0, bytes_ - saved) for bytes_, saved in zip(stack.held, saves, strict=True)]
    state = list(stack.state)
    for place, (_, more_held, more_state) in ((0, stack.before), (-1, stack.after)):
        held[place] += more_held
        state[place] += more_state
    return [Bytes(round(kept), round(flying)) for kept, flying in zip(state, held, strict=True)]


# ---------------------------------------------------------------------- filling


def fill_by_speed(
    layout: Layout, pricer: MixedPricer, most: float = float("inf"), roomy: float = 0.0, *, both: bool = True
) -> Filled | None:
    """The quickest of `space_fill.fill` with the cuts of like devices, and with cuts by speed in the best order of groups.

    Without `both`, the first is tried only where the second does not fit, of the second what fits first is taken, and
    None is the answer where compute alone takes longer than the quickest layout so far.
    """
    bare = replace(layout, cuts=(), modes=(), placement=())
    if not both and pricer.hopeless(bare):
        return None
    found = list(_by_speed(bare, pricer, most, roomy, both))
    if both or not any(one.fits for one in found):
        plain = fill(bare, pricer, most, roomy)
        found += [plain] if plain is not None else []
    best = min(found, key=_order, default=None)
    if best is not None and best.fits and bare.mesh.world == pricer.cluster.count:
        pricer.least = min(pricer.least, best.quick.seconds / bare.global_batch)
    return best


def _by_speed(bare: Layout, pricer: MixedPricer, most: float, roomy: float, every: bool) -> Iterator[Filled]:
    if not pricer.shares(bare):
        return
    less = max(0.0, pricer.limit(bare) - most)
    for mode in MODES:
        shared = pricer.by_speed(bare, mode, less)
        if shared is None:
            continue
        one = fill(replace(bare, placement=shared.placement), pricer, most, roomy, cuts=shared.cuts)
        if one is not None:
            yield one
            if one.fits and (not every or set(one.layout.modes) <= {"keep", mode}):
                return  # what computes more again is slower


def _order(one: Filled) -> tuple[float, float]:
    return one.short, one.quick.seconds
