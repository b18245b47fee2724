"""Which part of a whole tensor a rank has: boxes. No torch.

A rank's piece of a tensor is made by cutting the whole again and again: tensor parallelism takes its share of every
segment of one dimension, data parallelism then takes rows of what is left. Along each dimension the piece is a row of
runs of the whole; the boxes are their products.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

Shape = tuple[int, ...]
Run = tuple[int, int]
"""Where it begins in the whole, and how long it is."""


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a tensor."""

    offset: Shape
    size: Shape

    @property
    def volume(self) -> int:
        return prod(self.size)

    @property
    def end(self) -> Shape:
        return tuple(start + length for start, length in zip(self.offset, self.size, strict=True))

    def slices(self) -> tuple[slice, ...]:
        return tuple(map(slice, self.offset, self.end))

    def within(self, outer: Box) -> Box:
        """The same block, counted from where another begins."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.size)

    def meet(self, other: Box) -> Box | None:
        """What two blocks have in common."""
        starts = tuple(map(max, self.offset, other.offset))
        size = tuple(min(a, b) - start for a, b, start in zip(self.end, other.end, starts, strict=True))
        return Box(starts, size) if all(length > 0 for length in size) else None

    def __str__(self) -> str:
        return ",".join(f"{start}:{end}" for start, end in zip(self.offset, self.end, strict=True))


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


@dataclass(frozen=True, slots=True)
class TensorSpread:
    """One way a tensor is spread over ranks: rank `rank` of `ranks` gets its share along `dim`.

    With segments every one of them is shared evenly; without, rows are dealt out as `torch.chunk` does, the last
    ranks having fewer or none.
    """

    dim: int
    rank: int
    ranks: int
    segments: Shape = ()


@dataclass(frozen=True, slots=True)
class BoxPart:
    """A block of a rank's piece and where it lies in the whole."""

    local: Box
    whole: Box


def parts(shape: Sequence[int], cuts: Iterable[TensorSpread]) -> tuple[BoxPart, ...]:
    """What a rank has of a tensor, the cuts made one after the other; none if it has nothing. Of an empty tensor every
    rank has all."""
    if 0 in shape:
        return (BoxPart(whole(shape), whole(shape)),)
    dims: list[list[Run]] = [[(0, size)] for size in shape]
    for cut in cuts:
        dims[cut.dim] = _shared(dims[cut.dim], cut) if cut.segments else _chunk(dims[cut.dim], cut)
    runs = [_placed(_joined(along)) for along in dims]
    return tuple(
        BoxPart(
            Box(tuple(local for local, _, _ in chosen), tuple(length for _, _, length in chosen)),
            Box(tuple(start for _, start, _ in chosen), tuple(length for _, _, length in chosen)),
        )
        for chosen in product(*runs)
    )


def local_shape(shape: Sequence[int], cuts: Iterable[TensorSpread]) -> Shape:
    """The shape of a rank's piece."""
    sizes = list(shape)
    for cut in cuts:
        total = sizes[cut.dim]
        each = -(-total // cut.ranks)
        chunk = max(0, min(total, (cut.rank + 1) * each) - cut.rank * each)
        sizes[cut.dim] = sum(segment // cut.ranks for segment in cut.segments) if cut.segments else chunk
    return tuple(sizes)


def _chunk(runs: list[Run], cut: TensorSpread) -> list[Run]:
    total = sum(length for _, length in runs)
    each = -(-total // cut.ranks)
    return _taken(runs, cut.rank * each, min(total, (cut.rank + 1) * each))


def _shared(runs: list[Run], cut: TensorSpread) -> list[Run]:
    found: list[Run] = []
    at = 0
    for segment in cut.segments:
        each = segment // cut.ranks
        found += _taken(runs, at + cut.rank * each, at + (cut.rank + 1) * each)
        at += segment
    return found


def _taken(runs: list[Run], first: int, last: int) -> list[Run]:
    """Positions first to last of what the runs say in a row."""
    found, at = [], 0
    for start, length in runs:
        low, high = max(first, at), min(last, at + length)
        if low < high:
            found.append((start + low - at, high - low))
        at += length
    return found


def _joined(runs: list[Run]) -> list[Run]:
    """Runs that follow each other in the whole as one."""
    found: list[Run] = []
    for start, length in runs:
        if found and found[-1][0] + found[-1][1] == start:
            found[-1] = (found[-1][0], found[-1][1] + length)
        elif length:
            found.append((start, length))
    return found


def _placed(runs: list[Run]) -> list[tuple[int, int, int]]:
    """(where in the piece, where in the whole, how long)."""
    found, at = [], 0
    for start, length in runs:
        found.append((at, start, length))
        at += length
    return found


def uncovered(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """Why boxes are not exactly the whole, every element once; empty where they are."""
    outer = whole(shape)
    for box in boxes:
        if len(box.size) != len(outer.size) or any(a < 0 or b > c for a, b, c in zip(box.offset, box.end, outer.size, strict=True)):
            return f"the block {box} is not in it"
    volume = sum(box.volume for box in boxes)
    if volume < outer.volume:
        return f"{outer.volume - volume} of its {outer.volume} elements are in no file"
    return "" if volume == outer.volume and not _overlap(boxes) else "some of its elements are there twice"


def _overlap(boxes: Sequence[Box]) -> bool:
    """Whether any two have an element in common: swept along the first dimension."""
    if not boxes or not boxes[0].size:
        return len(boxes) > 1
    ordered = sorted((box for box in boxes if box.volume), key=lambda box: box.offset)
    open_: list[Box] = []
    for box in ordered:
        open_ = [other for other in open_ if other.end[0] > box.offset[0]]
        if any(box.meet(other) for other in open_):
            return True
        open_.append(box)
    return False
