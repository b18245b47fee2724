"""Bytes of one rank at their highest, from a sheet: what stays, and a walk over forward and backward.

Three pools, as the caching allocator has them: compute, gathers and scattered gradients; each has its own highest point,
and what one pool has freed another cannot use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from foretell.search.quick_stage import Stage, Way, keys_of
from foretell.search.sheet import Unit, Works
from foretell.search.sheet_ops import AFTER, BEFORE

SEGMENT = 2 << 20


@dataclass(frozen=True)
class Bytes:
    """Of one rank, in the caching allocator."""

    least: int
    """Alive at once, at the highest point."""
    reserved: int
    """With what the pools hold apart."""
    static: int
    """Parameters, optimizer state, buffers, batches."""
    activations: int
    """Kept from forward to backward, at the highest point."""


@dataclass(frozen=True)
class Flight:
    """What a pipeline adds to the memory of a rank."""

    profiles: tuple[tuple[int, ...], ...]
    """Micro-batches of each of the rank's stages in flight, and those that wait for weights' gradients, where most."""
    micro_batches: int
    buffers: int
    """Bytes received and handed back, all micro-batches together."""
    looped: bool
    sent: int = 0
    """Bytes that a stage holds of each micro-batch in flight because they were sent."""


class Keeper:
    """Memory of a rank with one stage, or several in a pipeline."""

    def __init__(self, works: Works, way: Way, accumulate: int) -> None:
        self.works, self.way, self.accumulate = works, way, accumulate
        material = works.material
        self.workspaces = works.prices.workspaces(
            ops for piece in material.pieces.values() for ops in (piece.forward, piece.backward)
        )

    def unit(self, key: int | str) -> Unit:
        return self.works.unit(key, self.way.shards, data=self.way.data)

    def units(self, stages: Iterable[tuple[Stage, str]]) -> list[tuple[Unit, int]]:
        return [
            (self.unit(key), count)
            for stage, root in stages
            for key, count in keys_of(stage, root)
        ]

    def static(self, units: Sequence[tuple[Unit, int]]) -> int:
        material = self.works.material
        weights = sum((unit.kept + unit.state) * count for unit, count in units)
        return weights + material.buffers + material.inputs * self.accumulate + self.workspaces

    # ------------------------------------------------------------------ one stage, no pipeline

    def alone(self, stage: Stage, root: str = "root") -> Bytes:
        units = self.units([(stage, root)])
        static = self.static(units)
        data, more = self.way.data, self.accumulate > 1
        whole = sum(unit.whole_gradient * count for unit, count in units)
        held = 0 if data or not more else whole
        peak, kept = self._walk(stage, root, fresh=not held)
        gather, reduce = self._pools(units) if data else (0, 0)
        if data and self.way.replicas > 1 and more:
            reduce += sum(unit.partial * count for unit, count in units)
        update = sum((unit.gradient if data else unit.whole_gradient) * count for unit, count in units)
        compute = static + held + max(peak, 0 if data else update)
        return Bytes(least=compute + gather, reserved=_up(compute) + _up(gather) + _up(reduce), static=static, activations=kept)

    def _pools(self, units: Sequence[tuple[Unit, int]]) -> tuple[int, int]:
        """Highest points of what is gathered and of scattered gradients."""
        if self.way.shards > 1:
            sizes = [part for unit, count in units for _ in range(min(count, 2)) for part in unit.parts if part.tensors]
            pairs = [sizes[0].gather_output + sizes[0].gather_input] if sizes else [0]
            pairs += [a.gather_output + b.gather_input + b.gather_output for a, b in pairwise(sizes)]
            gather = max(pairs)
        else:
            gather = 0
        reduce = sum(unit.gradient * count for unit, count in units)
        largest = max((unit.gradient for unit, _ in units), default=0) if self.accumulate > 1 else 0
        return gather, reduce + largest + max((unit.reduce_output for unit, _ in units), default=0)

    def _walk(self, stage: Stage, root: str, *, fresh: bool) -> tuple[int, int]:
        """The highest point of compute's pool above what stays, and what was kept there."""
        work, data, reshard = self.works.work, self.way.data, self.way.reshard
        live = self.unit(root).whole if data else 0
        high = kept = lingering = 0
        if stage.first:
            half = work(BEFORE).forward
            high, live = max(high, live + half.peak), live + half.net
        for kind, mode, count in stage.runs:
            one = work(kind, mode)
            unit = self.unit(kind) if data else None
            whole = unit.whole if unit else 0
            staying = 0 if reshard is True else whole if reshard is False else whole // int(reshard)
            each = one.forward.net + staying + one.lingering
            for place in (0, count - 1):
                high = max(high, live + place * each + (whole if data else 0) + one.forward.peak)
            live += count * each
            lingering += count * one.lingering
        if stage.last:
            half = work(AFTER).forward
            high, live = max(high, live + half.peak), live + half.net
        live -= lingering
        kept = live
        if stage.last:
            late = work(AFTER)
            high, live = max(high, live + late.backward.peak), live + late.backward.net - (0 if fresh else late.gradients)
        held = 0
        for kind, mode, count in reversed(stage.runs):
            one = work(kind, mode)
            unit = self.unit(kind) if data else None
            for place in (0, count - 1):
                if unit is None:
                    each = one.backward.net - (0 if fresh else one.gradients)
                    high = max(high, live + place * each + one.backward.peak)
                    continue
                back = unit.whole if reshard is False else 0
                each = one.backward.net - one.gradients - back
                now = live + place * each + (0 if reshard is False else unit.whole)
                beside = held if place == 0 and count > 1 else unit.largest_reduced
                high = max(high, now + one.backward.peak + (beside if place else held))
                high = max(high, live + place * each + one.backward.net - back + unit.largest_reduced)
            live += count * each
            held = unit.largest_reduced if unit is not None and unit.trained else 0
        if stage.first:
            early = work(BEFORE)
            high, live = max(high, live + early.backward.peak + held), live + early.backward.net
        if data and self.unit(root).trained:
            high = max(high, live + self.unit(root).largest_reduced)
        return high, kept

    # ------------------------------------------------------------------ stages of a pipeline

    def piped(self, stages: Sequence[tuple[Stage, str]], flight: Flight) -> Bytes:
        """A rank with one stage or several, micro-batches in flight."""
        units = self.units(stages)
        static = self.static(units) + flight.buffers
        data = self.way.data
        sums = sum((unit.summed if data else unit.whole_gradient) * count for unit, count in units)
        whole = sum(unit.whole * count for unit, count in units) if data else 0
        each = [self._kept(stage) + flight.sent for stage, _ in stages]
        each += [self._left(stage) for stage, _ in stages]
        high = kept = 0
        events = [self._event(stage, whole if flight.looped else 0) for stage, _ in stages]
        for profile in flight.profiles:
            carried = sum(count * size for count, size in zip(profile, each, strict=True))
            for place, (top, bottom) in enumerate(events):
                if profile[place]:
                    at_end = carried - each[place] + whole + bottom
                    high = max(high, carried + top, at_end, carried + (0 if self.way.reshard is True else whole))
            kept = max(kept, carried)
        gather, reduce = self._pools(units) if data else (0, 0)
        if data and flight.looped and self.way.shards > 1:
            gather = max(gather, *(sum(unit.gather_output * n for unit, n in self.units([one])) for one in stages))
        closing = whole + max((unit.largest_reduced for unit, _ in units), default=0) if data else 0
        compute = static + sums + max(high, closing)
        least = compute + min(gather, 2 * max((unit.gather_output for unit, _ in units), default=0))
        return Bytes(least=least, reserved=_up(compute) + _up(gather) + _up(reduce), static=static, activations=kept)

    def _kept(self, stage: Stage) -> int:
        """What a stage keeps of one micro-batch."""
        found = sum(self.works.work(kind, mode).forward.net * count for kind, mode, count in stage.runs)
        for key, here in ((BEFORE, stage.first), (AFTER, stage.last)):
            found += self.works.work(key).forward.net if here else 0
        return max(0, found)

    def _left(self, stage: Stage) -> int:
        """What one micro-batch leaves between gradients of inputs and of weights."""
        if stage.first:
            return 0  # all of its backward is one
        found = sum(self.works.work(kind, mode).left * count for kind, mode, count in stage.runs)
        return found + (self.works.work(AFTER).left if stage.last else 0)

    def _event(self, stage: Stage, whole: int) -> tuple[int, int]:
        """Highest points of a backward at its beginning, above all that is kept, and at its end."""
        work = self.works.work
        data = self.way.data
        top = bottom = 0
        units = {kind: self.unit(kind).whole if data else 0 for kind, _, _ in stage.runs}
        if stage.last:
            late = work(AFTER)
            top = max(late.backward.peak, late.forward.peak - late.forward.net) + whole
        for place, (kind, mode, _) in enumerate(reversed(stage.runs)):
            one = work(kind, mode)
            peak = one.backward.peak + (whole or 2 * units[kind])
            top = max(top, peak) if not place else top
            bottom = one.backward.peak + max(0, -one.backward.net)
            forward = one.forward.peak - one.forward.net
            top = max(top, forward + (whole or 2 * units[kind]))
        if stage.first:
            bottom = max(bottom, work(BEFORE).backward.peak)
        return top, bottom


def _up(nbytes: int) -> int:
    return -(-nbytes // SEGMENT) * SEGMENT


def flights(counts: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Those of some counts that no other one exceeds everywhere."""
    found: list[tuple[int, ...]] = []
    for one in sorted(set(counts), key=lambda row: -sum(row)):
        if not any(all(a >= b for a, b in zip(other, one, strict=True)) for other in found):
            found.append(one)
    return tuple(found)
