"""Who waits for whom, and for what: from where each rank is in each of its groups. Pure, and without torch or numpy.

Collectives of a group are numbered alike on all its ranks. So a rank that stands in number N waits for those of the group that have
not entered N; whoever is at the end of such a chain, and waits for nobody, is the one to look at:

    it has not entered N and is in no collective      the hang is outside of communication
    all have entered N, and nobody comes out          the hang is inside of communication: network, switch, library
    two have entered another N                        they are desynchronised: another op, type or size at the same number
    the chain closes on itself                        ranks use two groups in another order
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from foretell.decode import Mismatch, value_of
from foretell.runtime.detect.layout import ALIKE, OPS
from foretell.units import human_bytes

OUTSIDE, INSIDE, DESYNC, CYCLE = "outside of communication", "inside of communication", "desynchronised", "circular"
TITLES = {
    OUTSIDE: "hang outside of communication", INSIDE: "hang inside of communication", DESYNC: "the ranks are desynchronised",
    CYCLE: "the ranks wait in a circle",
}  # fmt: skip
LEAST_SECONDS = 5.0
"""No collective is late before that."""
DEVIATIONS = 10.0
RECENT = 6
"""Collectives of a group that a position tells of."""
_LISTED = 32
"""Ranks of a group that are listed; of a larger one, those that speak of it count."""


@dataclass(frozen=True)
class Entry:
    """A collective that a rank has entered."""

    sequence: int
    op: str
    dtype: str
    bytes: int
    shape: int = 0
    """A number for the shape; 0 = unknown."""

    def words(self) -> str:
        size = f" ({self.dtype}, {human_bytes(self.bytes)})" if self.bytes else ""
        return f"{self.op}{size}"

    def agrees(self, other: Entry) -> bool:
        """Whether both can be the same collective: the op, and what every rank must give alike."""
        if self.op != other.op:
            return False
        if self.op not in OPS or OPS.index(self.op) not in ALIKE:
            return True
        shapes = self.shape == other.shape or not (self.shape and other.shape)
        return (self.dtype, self.bytes) == (other.dtype, other.bytes) and shapes


@dataclass(frozen=True)
class GroupPosition:
    """How far a rank has come in one group; `ranks` may be left out where there are many."""

    key: str
    name: str
    ranks: tuple[int, ...]
    entered: int
    recent: tuple[Entry, ...] = ()
    """The last that were entered, the oldest first."""

    def entry(self, sequence: int) -> Entry | None:
        return next((one for one in self.recent if one.sequence == sequence), None)


@dataclass(frozen=True)
class RankPosition:
    """Where a rank is."""

    groups: tuple[GroupPosition, ...] = ()
    key: str = ""
    """Group of the collective that it stands in; empty where it stands in none."""
    sequence: int = 0
    seconds: float = 0.0
    """For how long it has."""
    deadline: float = LEAST_SECONDS
    """After which that is too long."""
    place: str = ""
    """Host and device."""

    @property
    def blocked(self) -> bool:
        return bool(self.key)

    @property
    def late(self) -> bool:
        return self.blocked and self.seconds > self.deadline

    def group(self, key: str) -> GroupPosition | None:
        return next((one for one in self.groups if one.key == key), None)

    def to_json(self) -> list[Any]:
        """Short: it travels once a second."""
        groups = [[one.key, one.name, list(one.ranks[:_LISTED] if len(one.ranks) <= _LISTED else ()), one.entered,
                   [[e.sequence, e.op, e.dtype, e.bytes, e.shape] for e in one.recent]] for one in self.groups]  # fmt: skip
        return [groups, self.key, self.sequence, round(self.seconds, 2), round(self.deadline, 2), self.place]

    @classmethod
    def from_json(cls, data: Any) -> RankPosition | None:
        """None where it is none."""
        with suppress(Mismatch, TypeError, ValueError, IndexError):
            groups, key, sequence, seconds, limit, place = data
            return cls(tuple(_group(*one) for one in groups), str(key), _whole(sequence), float(seconds), float(limit), str(place)[:200])
        return None


def _group(key: Any, name: Any, ranks: Any, entered: Any, recent: Any) -> GroupPosition:
    entries = tuple(Entry(_whole(number), str(op), str(dtype), _whole(nbytes), _whole(shape)) for number, op, dtype, nbytes, shape in recent)
    return GroupPosition(str(key), str(name), value_of(tuple[int, ...], ranks), _whole(entered), entries)


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError("no count")
    return value


def deadline(seconds: Sequence[float], least: float = LEAST_SECONDS) -> float:
    """How long a collective may take that took so long before: the median and ten deviations, and at least `least`."""
    if not seconds:
        return least
    middle = statistics.median(seconds)
    return max(least, middle + DEVIATIONS * 1.4826 * statistics.median([abs(one - middle) for one in seconds]))


@dataclass(frozen=True, kw_only=True)
class HangReading:
    """What holds the ranks up."""

    kind: str
    culprits: tuple[int, ...]
    """Whom to look at; nobody where it is the network or the ranks together."""
    problem: str
    waiting: tuple[int, ...]
    """Ranks that stand in a collective."""
    graph: tuple[str, ...]
    """Who waits for whom, a line each."""
    seconds: float
    """For how long the first of them has waited."""
    late: bool
    """Whether all that wait have waited longer than they ever should."""

    def words(self) -> str:
        return f"{TITLES[self.kind]}: {self.problem}"


def read_hang(positions: Mapping[int, RankPosition]) -> HangReading | None:
    """What holds these ranks up, if any of them waits."""
    blocked = {rank: one for rank, one in positions.items() if one.blocked}
    if not blocked:
        return None
    edges = {rank: _waits_for(rank, positions) for rank in blocked}
    seconds, late = max(one.seconds for one in blocked.values()), all(one.late for one in blocked.values())
    graph = tuple(_graph(positions, edges))
    for kind, culprits, problem in _readings(positions, blocked, edges):
        return HangReading(kind=kind, culprits=culprits, problem=problem, waiting=tuple(blocked), graph=graph, seconds=seconds, late=late)
    return None


def _readings(
    positions: Mapping[int, RankPosition], blocked: Mapping[int, RankPosition], edges: Mapping[int, tuple[int, ...]]
) -> Iterator[tuple[str, tuple[int, ...], str]]:
    odd = _desync(positions, blocked)
    if odd is not None:
        yield odd
    ends = sorted({end for rank in blocked for end in _ends(rank, edges)})
    free = tuple(end for end in ends if end not in blocked)
    if free:
        yield OUTSIDE, free, _never(free, positions, blocked, edges)
    inside = [end for end in ends if end in blocked]
    if inside:
        at = blocked[inside[0]]
        what = _what(at, positions[inside[0]])
        yield INSIDE, (), f"all ranks of it have entered {what}, and {ranks_words(inside)} {'has' if len(inside) == 1 else 'have'} not come out of it"
    circle = _circle(edges)
    if circle:
        told = "; ".join(f"rank {rank} is in {_what(blocked[rank], positions[rank])}" for rank in circle[:4])
        yield CYCLE, tuple(circle), f"{ranks_words(circle)} wait for each other in different collectives: {told}"


def _waits_for(rank: int, positions: Mapping[int, RankPosition]) -> tuple[int, ...]:
    """Who has not entered what this rank stands in."""
    here = positions[rank]
    group = here.group(here.key)
    members = group.ranks if group is not None and group.ranks else tuple(other for other, one in positions.items() if one.group(here.key))
    missing = []
    for other in members:
        if other == rank or other not in positions:
            continue
        theirs = positions[other].group(here.key)
        if theirs is None or theirs.entered < here.sequence:
            missing.append(other)
    return tuple(missing)


def _ends(rank: int, edges: Mapping[int, tuple[int, ...]]) -> Iterator[int]:
    """Ranks at the ends of all chains from here: those that wait for nobody."""
    seen, ahead = set(), [rank]
    while ahead:
        one = ahead.pop()
        if one in seen:
            continue
        seen.add(one)
        nexts = edges.get(one, ())
        if not nexts:
            yield one
        ahead += nexts


def _circle(edges: Mapping[int, tuple[int, ...]]) -> list[int]:
    """Ranks that wait for themselves, by way of others: each can reach itself."""

    def reaches(rank: int) -> bool:
        seen: set[int] = set()
        ahead = list(edges.get(rank, ()))
        while ahead:
            one = ahead.pop()
            if one == rank:
                return True
            if one not in seen:
                seen.add(one)
                ahead += edges.get(one, ())
        return False

    return [rank for rank in sorted(edges) if reaches(rank)]


def _desync(positions: Mapping[int, RankPosition], blocked: Mapping[int, RankPosition]) -> tuple[str, tuple[int, ...], str] | None:
    """The lowest number at which ranks of a group have entered collectives that cannot be the same."""
    for key in dict.fromkeys(one.key for one in blocked.values()):
        found = first_difference({rank: group for rank, one in positions.items() if (group := one.group(key)) is not None})
        if found is not None:
            sequence, parts = found
            name = next(group.name for one in positions.values() if (group := one.group(key)) is not None)
            odd = _fewest(parts)
            told = " and ".join(f"{ranks_words(ranks)} called {entry.words()}" for entry, ranks in parts)
            return DESYNC, odd, f"at collective {sequence} of {name} {told}"
    return None


def first_difference(groups: Mapping[int, GroupPosition]) -> tuple[int, list[tuple[Entry, tuple[int, ...]]]] | None:
    """The number, and who called what there."""
    for sequence in sorted({entry.sequence for group in groups.values() for entry in group.recent}):
        parts: list[tuple[Entry, list[int]]] = []
        for rank, group in sorted(groups.items()):
            entry = group.entry(sequence)
            if entry is None:
                continue
            same = next((ranks for other, ranks in parts if other.agrees(entry)), None)
            if same is None:
                parts.append((entry, [rank]))
            else:
                same.append(rank)
        if len(parts) > 1:
            shown = [(entry, tuple(ranks)) for entry, ranks in parts]
            return sequence, _told_apart(shown)
    return None


def _told_apart(parts: list[tuple[Entry, tuple[int, ...]]]) -> list[tuple[Entry, tuple[int, ...]]]:
    """Where words are equal, the shapes differ: say so."""
    if len({entry.words() for entry, _ in parts}) == len(parts):
        return parts
    return [(Entry(entry.sequence, f"{entry.op} of another shape" if place else entry.op, entry.dtype, entry.bytes), ranks)
            for place, (entry, ranks) in enumerate(parts)]  # fmt: skip


def _fewest(parts: Iterable[tuple[Entry, tuple[int, ...]]]) -> tuple[int, ...]:
    """The ranks that are alone with what they called; all of them where no side has a majority."""
    sizes = sorted(parts, key=lambda part: len(part[1]))
    if len(sizes[-1][1]) > sum(len(ranks) for _, ranks in sizes[:-1]):
        return tuple(sorted(rank for _, ranks in sizes[:-1] for rank in ranks))
    return tuple(sorted(rank for _, ranks in sizes for rank in ranks))


# --- words -----------------------------------------------------------------------------------------------------------


def _what(at: RankPosition, known: RankPosition) -> str:
    group = known.group(at.key)
    entry = group.entry(at.sequence) if group is not None else None
    name = group.name if group is not None else at.key
    op = entry.op if entry is not None else "collective"
    size = f" ({entry.dtype}, {human_bytes(entry.bytes)})" if entry is not None and entry.bytes else ""
    return f"{op} {at.sequence} of {name}{size}"


def _never(
    free: Sequence[int], positions: Mapping[int, RankPosition], blocked: Mapping[int, RankPosition], edges: Mapping[int, tuple[int, ...]]
) -> str:
    first = next(rank for rank in blocked if set(edges[rank]) & set(free))
    waits = "waits" if len(blocked) == 1 else "wait"
    return f"{ranks_words(free)} never entered {_what(blocked[first], positions[first])}, in which {ranks_words(sorted(blocked))} {waits}"


def _graph(positions: Mapping[int, RankPosition], edges: Mapping[int, tuple[int, ...]]) -> Iterator[str]:
    for rank, here in sorted(positions.items()):
        if rank in edges:
            whom = f"for {ranks_words(edges[rank])}" if edges[rank] else "which all of its ranks have entered"
            since = f" {here.seconds:.0f} s" if here.seconds else ""
            yield f"rank {rank} waits{since} in {_what(here, here)} {whom}"
        else:
            last = max((group for group in here.groups if group.recent), key=lambda group: group.entered, default=None)
            done = f"; its last was {last.recent[-1].op} {last.entered} of {last.name}" if last is not None else ""
            yield f"rank {rank} waits in no collective{done}"


def ranks_words(ranks: Sequence[int]) -> str:
    names = ", ".join(str(rank) for rank in ranks[:8]) + (" and more" if len(ranks) > 8 else "")
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
