"""How a tensor lies on the ranks of the tensor axis, and what a rule says about one call. Plain data, no torch.

A tensor is whole (every rank has all of it), split along one dimension, or partial (the ranks' tensors add up to it).
A split dimension may consist of several segments, each of which is split evenly: rank 1 of 2 holds of a fused
projection [q | k | v] the second half of q, of k and of v.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from foretell.trace.flow.calls import SliceKey

Shape = tuple[int, ...]
__all__ = [
    "PARTIAL",
    "Operand",
    "Partial",
    "Place",
    "Refine",
    "Refuse",
    "Result",
    "Setting",
    "Shape",
    "Shard",
    "SliceKey",
    "between",
    "broadcast",
    "divided",
    "edges",
    "global_shape",
    "local_shape",
    "operands",
    "replaced",
    "share",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shard:
    """Split along one dimension."""

    dim: int
    segments: tuple[int, ...]
    """Sizes of the pieces of that dimension; every rank has an equal share of each."""
    stream: bool = False
    """Of the activations between split regions: these may be gathered wherever they are needed whole."""

    @property
    def size(self) -> int:
        return sum(self.segments)

    def at(self, dim: int) -> Shard:
        return Shard(dim, self.segments, self.stream)


class Partial:
    """The ranks' tensors add up to it."""

    def __repr__(self) -> str:
        return "PARTIAL"


PARTIAL = Partial()
Place = Shard | Partial | None
"""None is whole."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What the rules need to know of the plan."""

    ranks: int
    sequence: bool = True
    loss: bool = True
    context: bool = False
    """It is positions that the ranks share, not layers: see `plan.context`."""

    def stream(self, shape: Shape) -> Shard | None:
        """How activations of this shape lie between split regions: along the positions, else along the samples."""
        if self.sequence and len(shape) >= 3:
            for dim in (1, 0):
                if shape[dim] and shape[dim] % self.ranks == 0:
                    return Shard(dim, (shape[dim],), True)
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """A tensor among the arguments of a call."""

    slot: int
    shape: Shape
    place: Place = None
    mask: bool = False
    """Whether it holds truth values, which an index counts."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a rule says: how each operand must lie, and how the outputs then do."""

    out: Place | tuple[Place, ...]
    """Of every output, or one for all of them."""
    want: Mapping[int, Place] = field(default_factory=dict)
    """Slot → place; operands that are not named must be whole."""
    args: tuple[Any, ...] | None = None
    """The arguments each rank gives, with operands in place of tensors; None where they are as they were."""
    kwargs: Mapping[str, Any] | None = None
    special: str = ""
    """Name of what is run instead of the op, where its local form is another op."""
    along: bool = False
    """Takes pieces of the split dimension apart (split, slice): see `spans`."""
    unread: frozenset[int] = frozenset()
    """Slots of operands of which nothing but shape, dtype or device is used."""
    spans: tuple[tuple[int, int], ...] = ()
    """For such a call: start and length within the split dimension, per output."""

    def places(self, count: int) -> tuple[Place, ...]:
        return self.out if isinstance(self.out, tuple) else (self.out,) * count


class Refuse(Exception):
    """A call that cannot run on split operands as they lie."""

    def __init__(self, reason: str, number: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.number = number
        """The size that does not divide, where that is the reason."""


class Refine(Refuse):
    """A call that could run if a split dimension were made of other segments."""

    def __init__(self, slot: int, segments: tuple[int, ...], reason: str, number: int | None = None) -> None:
        super().__init__(reason, number)
        self.slot, self.segments = slot, segments


def share(segments: Sequence[int], ranks: int) -> int:
    """How much of a split dimension one rank has."""
    return sum(segment // ranks for segment in segments)


def local_shape(shape: Shape, place: Place, ranks: int) -> Shape:
    """The shape of one rank's part."""
    if not isinstance(place, Shard):
        return shape
    return replaced(shape, place.dim, share(place.segments, ranks))


def global_shape(shape: Shape, place: Place) -> Shape:
    """The shape of the whole, from that of one rank's part."""
    return replaced(shape, place.dim, place.size) if isinstance(place, Shard) else shape


def replaced(shape: Sequence[int], dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def divided(segments: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """The same segments, if every one of them can be split evenly."""
    for segment in segments:
        if segment % ranks or segment == 0:
            raise Refuse(f"{segment} does not divide by {ranks}", segment)
    return segments


def edges(segments: Sequence[int]) -> tuple[int, ...]:
    """Where segments begin and end."""
    return (0, *accumulate(segments))


def between(cuts: Sequence[int]) -> tuple[int, ...]:
    """Segments between places."""
    ordered = sorted(set(cuts))
    return tuple(end - start for start, end in pairwise(ordered))


def operands(*values: Any) -> Iterator[Operand]:
    """Every tensor among the values, in the order they stand."""
    for value in values:
        if isinstance(value, Operand):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from operands(*value)
        elif isinstance(value, Mapping):
            yield from operands(*value.values())


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """The shape that elementwise ops give."""
    length = max((len(shape) for shape in shapes), default=0)
    columns = zip(*((1,) * (length - len(shape)) + shape for shape in shapes), strict=True) if shapes else ()
    return tuple(next((size for size in column if size != 1), 1) for column in columns)
