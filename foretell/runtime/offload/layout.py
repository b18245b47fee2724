"""Which parameters belong together, and in what pieces their states travel. Plain data, no torch.

A unit is a block, or everything outside the blocks: what becomes ready together and is needed together. Its states lie
one behind the other in one array of each kind, parameter by parameter, and travel in chunks: runs of elements of a unit,
whatever parameters these are of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from foretell.plan.states import ALIGN as ALIGN
from foretell.plan.states import CHUNK as CHUNK
from foretell.plan.states import DEVICE as DEVICE
from foretell.plan.states import DISK as DISK
from foretell.plan.states import HOST as HOST

GPU, CPU = "gpu", "cpu"


@dataclass(frozen=True)
class ParameterPiece:
    """A run of one parameter's elements inside a chunk."""

    name: str
    begin: int
    """In the parameter, flattened."""
    at: int
    """In the chunk."""
    elements: int


@dataclass(frozen=True)
class Chunk:
    """A run of a unit's elements."""

    begin: int
    """In the unit."""
    elements: int
    pieces: tuple[ParameterPiece, ...]
    engine: str = GPU

    @property
    def end(self) -> int:
        return self.begin + self.elements


@dataclass(frozen=True)
class OffloadUnit:
    """Parameters that become ready and are needed together."""

    path: str
    """Of the block; empty for everything outside the blocks."""
    sizes: Mapping[str, int]
    """Parameter → elements on this rank."""
    tier: str = DEVICE
    """Where optimizer states are between updates."""
    chunks: tuple[Chunk, ...] = ()
    starts: Mapping[str, int] = field(default_factory=dict)
    """Parameter → its first element in the unit's arrays."""

    elements: int = 0
    """Of its arrays; a little more than its parameters have."""
    streamed: bool = False
    """Whether its weights are in host memory too, and on the device only while they are used."""


def unit(
    path: str, sizes: Mapping[str, int], tier: str = DEVICE, *, chunk: int = CHUNK, cpu_share: float = 0.0, streamed: bool = False
) -> OffloadUnit:
    """A unit cut into chunks; of those on the host a share is updated by the CPU, evenly spread."""
    chunk = _aligned(chunk)
    starts, total = {}, 0
    for name, size in sizes.items():
        starts[name] = total
        total += _aligned(size)
    chunks = []
    owed = 0.0
    for begin in range(0, total, chunk):
        elements = min(chunk, total - begin)
        engine = GPU
        if tier == HOST:
            owed += cpu_share
            if owed >= 1.0 - 1e-9:
                engine, owed = CPU, owed - 1.0
        chunks.append(Chunk(begin, elements, tuple(_pieces(sizes, starts, begin, elements)), engine))
    return OffloadUnit(path, dict(sizes), tier, tuple(chunks), starts, total, streamed)


def _aligned(elements: int) -> int:
    return -(-elements // ALIGN) * ALIGN


def _pieces(sizes: Mapping[str, int], starts: Mapping[str, int], begin: int, elements: int) -> Iterator[ParameterPiece]:
    end = begin + elements
    for name, size in sizes.items():
        low, high = max(begin, starts[name]), min(end, starts[name] + size)
        if low < high:
            yield ParameterPiece(name, low - starts[name], low - begin, high - low)


def group(names: Sequence[str], blocks: Sequence[str]) -> dict[str, list[str]]:
    """Parameters by the block they are in; under "" those outside. A parameter has one name: its first."""
    found: dict[str, list[str]] = {"": [], **{block: [] for block in blocks}}
    for name in names:
        owner = next((block for block in blocks if name.startswith(f"{block}.")), "")
        found[owner].append(name)
    return {path: held for path, held in found.items() if held}
