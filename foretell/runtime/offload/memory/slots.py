"""Stretches of memory that are taken and given back in any order, cut from as few pieces as the first step shows to be needed."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from foretell.runtime.offload.memory.arena import bytes_for


class SlotBacking(Protocol):
    """An arena, or a file on disk."""

    nbytes: int

    def close(self) -> None: ...


P = TypeVar("P", bound=SlotBacking)


class OffsetSpace:
    """Offsets from 0 on, first fit; without a size there is always room."""

    def __init__(self, nbytes: int | None = None) -> None:
        self._free = [(0, nbytes if nbytes is not None else 1 << 62)]
        self.high = 0
        """The highest end of anything that was taken."""

    def take(self, nbytes: int) -> int | None:
        for place, (begin, end) in enumerate(self._free):
            if end - begin >= nbytes:
                self._free[place : place + 1] = [(begin + nbytes, end)] if end - begin > nbytes else []
                self.high = max(self.high, begin + nbytes)
                return begin
        return None

    def give(self, offset: int, nbytes: int) -> None:
        insort(self._free, (offset, offset + nbytes))
        joined: list[tuple[int, int]] = []
        for begin, end in self._free:
            if joined and joined[-1][1] == begin:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((begin, end))
        self._free = joined


@dataclass(frozen=True)
class MemorySlot(Generic[P]):
    """A stretch of one piece."""

    piece: P
    offset: int
    nbytes: int
    ideal: int
    """Where it would be if all pieces were one."""


class Slots(Generic[P]):
    """Pieces made as they are needed, and made into one of exactly the bytes needed once nothing is in them."""

    def __init__(self, make: Callable[[int], P], *, least: int, one: bool = True) -> None:
        self._make, self._least, self._one = make, least, one
        self.pieces: list[tuple[P, OffsetSpace]] = []
        self._ideal = OffsetSpace()
        self.live = 0
        """Bytes that are taken now."""

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece, _ in self.pieces)

    @property
    def needed(self) -> int:
        """Bytes that one piece must have for all that was ever taken at once."""
        return self._ideal.high

    def reserve(self, nbytes: int) -> None:
        """One piece of so many bytes, where there is none yet."""
        if not self.pieces:
            self._add(nbytes)

    def _add(self, nbytes: int) -> None:
        piece = self._make(bytes_for([nbytes]))
        self.pieces.append((piece, OffsetSpace(piece.nbytes)))

    def room(self, nbytes: int) -> MemorySlot[P] | None:
        """A stretch, unless there is none."""
        nbytes = bytes_for([nbytes])
        for piece, space in self.pieces:
            offset = space.take(nbytes)
            if offset is not None:
                ideal = self._ideal.take(nbytes)
                assert ideal is not None
                self.live += nbytes
                return MemorySlot(piece, offset, nbytes, ideal)
        return None

    def take(self, nbytes: int) -> MemorySlot[P]:
        """A stretch; where there is none, one more piece is made."""
        found = self.room(nbytes)
        if found is None:
            self._add(max(bytes_for([nbytes]), self._least))
            found = self.room(nbytes)
            assert found is not None
        return found

    def give(self, slot: MemorySlot[P]) -> None:
        next(space for piece, space in self.pieces if piece is slot.piece).give(slot.offset, slot.nbytes)
        self._ideal.give(slot.ideal, slot.nbytes)
        self.live -= slot.nbytes

    def loose(self) -> bool:
        """Nothing is in them, and one piece of another size would do better."""
        return self._one and not self.live and self.needed > 0 and (len(self.pieces) > 1 or self.nbytes > 1.05 * self.needed)

    def tighten(self) -> None:
        """All pieces into one; nobody may still read or write them."""
        self.close()
        self._add(self.needed)

    def close(self) -> None:
        for piece, _ in self.pieces:
            piece.close()
        self.pieces = []
