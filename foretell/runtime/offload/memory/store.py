"""Memory of an optimizer: which array of which unit is where.

    on the device   states of units that stay; a ring of slots that the others pass through
    in the arena    states of the others; streamed units' weights and gradients; gradients of what the CPU updates
    on disk         states of units that the arena has no room for; they pass through a ring of its buffers
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from foretell.errors import UserError
from foretell.plan.states import BUFFERS, count_of
from foretell.runtime.offload.forms import MASTER, REST, StateFormat
from foretell.runtime.offload.lanes import Mark
from foretell.runtime.offload.layout import CPU, DEVICE, DISK, HOST, Chunk, OffloadUnit
from foretell.runtime.offload.memory.arena import KEEP_FREE, Arena, available, bytes_for
from foretell.runtime.offload.memory.disk import DiskFile
from foretell.runtime.offload.memory.folder import free, in_memory
from foretell.runtime.offload.memory.stage import StagingBuffers, needs
from foretell.units import human_bytes


class ChunkSlot:
    """Device memory for one chunk: its states, and for streamed units its weights and gradients."""

    def __init__(self, form: StateFormat, elements: int, device: torch.device, *, streamed: bool) -> None:
        self.kept = {name: torch.empty(count_of(name, elements), dtype=dtype, device=device) for name, dtype in form.kept.items()}
        count = elements if streamed else 0
        self.weight, self.grad = (torch.empty(count, dtype=form.weight, device=device) for _ in range(2))
        self.free: Mark = None
        self._cuts: dict[int, dict[str, Tensor]] = {}

    def cut(self, elements: int) -> dict[str, Tensor]:
        if elements not in self._cuts:
            self._cuts[elements] = {name: flat[: count_of(name, elements)] for name, flat in self.kept.items()}
        return self._cuts[elements]


class Store:
    """Arrays by unit, and by unit and chunk."""

    def __init__(
        self, units: Sequence[OffloadUnit], form: StateFormat, device: torch.device, *, slots: int, arena: Arena | None = None,
        folder: str | Path | None = None, agree: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        """`agree` is asked whether so many bytes of host memory may be taken, where any are."""
        self.form, self.device = form, device
        self.far = {(unit.path, chunk.begin): chunk.elements for unit in units if unit.tier == DISK for chunk in unit.chunks}
        """Unit and chunk whose states are on disk, in the order of forward → its elements."""
        self.begins = {unit.path: [chunk.begin for chunk in unit.chunks] for unit in units if unit.tier == DISK}
        """Unit whose states are on disk → where its chunks begin."""
        buffers = min(BUFFERS, len(self.far))
        ring, on_disk = needs(self.far, form.kept, buffers)
        sizes = [size for unit in units for size in self._on_host(unit)] + ([ring] if ring else [])
        if sizes and agree is not None:
            agree(bytes_for(sizes))
        self.shelf = shelf(on_disk, folder) if self.far else None
        self.arena = (arena or Arena(bytes_for(sizes), register=device.type == "cuda")) if sizes else None
        self.stage = StagingBuffers(self.shelf, self.arena, self.far, form.kept, buffers) if self.shelf and self.arena else None
        self.kept = {unit.path: self._states(unit) for unit in units}
        self.weights = {unit.path: self._take(unit.elements, form.weight) for unit in units if unit.streamed}
        """Path of a streamed unit → its weights in host memory."""
        self.grads: dict[tuple[str, int], Tensor] = {}
        """Unit and chunk → gradients in host memory: of streamed units, and of what the CPU updates."""
        self.updated: dict[tuple[str, int], Tensor] = {}
        """Unit and chunk that the CPU updates → its weights in host memory; where nothing asks for the old ones, the
        new ones take the gradients' place."""
        self.there: dict[tuple[str, int], dict[str, Tensor]] = {}
        """Unit and chunk → its states."""
        for unit in units:
            for chunk in unit.chunks:
                self._cut(unit, chunk)
        moving = [chunk for unit in units if unit.tier != DEVICE for chunk in unit.chunks if chunk.engine != CPU]
        longest = max((chunk.elements for chunk in moving), default=0)
        self.slots = [ChunkSlot(form, longest, device, streamed=bool(self.weights)) for _ in range(slots if moving else 0)]
        staying = max((chunk.elements for unit in units if unit.tier == DEVICE for chunk in unit.chunks), default=0)
        self.wide, self.wide_at_home = (torch.empty(n * form.scratch, dtype=torch.float32, device=device) for n in (longest, staying))
        """Scratch of updates: of states that come and go, and of those that stay."""

    def _on_host(self, unit: OffloadUnit) -> Iterator[int]:
        width = self.form.weight.itemsize
        if unit.tier == HOST:
            yield from (count_of(name, unit.elements) * dtype.itemsize for name, dtype in self.form.kept.items())
        if unit.streamed:
            yield unit.elements * width
        for chunk in unit.chunks:
            if unit.streamed or chunk.engine == CPU:
                yield chunk.elements * width
            if chunk.engine == CPU and not unit.streamed and self.keeps_weights:
                yield chunk.elements * width

    @property
    def keeps_weights(self) -> bool:
        """Whether an update needs the weights of before: without whole masters."""
        return MASTER not in self.form.kept

    def _take(self, elements: int, dtype: torch.dtype) -> Tensor:
        assert self.arena is not None
        return self.arena.take(elements, dtype)

    def _states(self, unit: OffloadUnit) -> dict[str, Tensor]:
        if unit.tier == DEVICE:
            return {n: torch.zeros(count_of(n, unit.elements), dtype=t, device=self.device) for n, t in self.form.kept.items()}
        if unit.tier == DISK:
            return {}
        assert unit.tier == HOST, unit.tier
        return {name: self._take(count_of(name, unit.elements), dtype) for name, dtype in self.form.kept.items()}

    def _cut(self, unit: OffloadUnit, chunk: Chunk) -> None:
        key = (unit.path, chunk.begin)
        if unit.tier != DISK:
            self.there[key] = {
                name: flat[self.form.part(name, chunk.begin, chunk.elements)] for name, flat in self.kept[unit.path].items()
            }
        if unit.streamed or chunk.engine == CPU:
            self.grads[key] = self._take(chunk.elements, self.form.weight)
        if chunk.engine != CPU:
            return
        if unit.streamed:
            self.updated[key] = self.weights[unit.path][chunk.begin : chunk.end]
        else:
            self.updated[key] = self._take(chunk.elements, self.form.weight) if self.keeps_weights else self.grads[key]

    def slice_of(self, unit: OffloadUnit, name: str) -> dict[str, Tensor]:
        """A parameter's states."""
        begin = unit.starts[name]
        return {key: flat[self.form.part(key, begin, unit.sizes[name])] for key, flat in self.kept[unit.path].items()}

    # ------------------------------------------------------------ parameters whose states are on disk

    def fresh(self, unit: OffloadUnit, name: str) -> dict[str, Tensor]:
        """A parameter's states, all zero; of those on disk what `write` shall put there first."""
        if unit.tier != DISK:
            return self.slice_of(unit, name)
        return {key: torch.zeros(unit.sizes[name], dtype=dtype) for key, dtype in self.form.kept.items() if key in (MASTER, REST)}

    def arrays(self, unit: OffloadUnit, name: str) -> dict[str, Tensor]:
        """A parameter's states: where they are, or a copy of what is on disk."""
        if unit.tier != DISK:
            return self.slice_of(unit, name)
        return {key: self.read(unit, name, key, 0, count_of(key, unit.sizes[name])) for key in self.form.kept}

    def read(self, unit: OffloadUnit, name: str, key: str, begin: int, end: int) -> Tensor:
        """Entries of a parameter's array that is on disk."""
        assert self.stage is not None
        into = torch.empty(end - begin, dtype=self.form.kept[key])
        for asked in [
            self.stage.read(place, key, at, into[own : own + count]) for place, at, own, count in _runs(unit, name, key, begin, end)
        ]:
            asked.result()
        return into

    def write(self, unit: OffloadUnit, name: str, arrays: Mapping[str, Tensor]) -> None:
        """A parameter's states as they are to be on disk from now on; others are where they are written."""
        if unit.tier != DISK:
            return
        assert self.stage is not None
        for asked in [
            self.stage.write(place, key, at, values.reshape(-1)[own : own + count])
            for key, values in arrays.items()
            for place, at, own, count in _runs(unit, name, key, 0, values.numel())
        ]:
            asked.result()

    def settle(self) -> None:
        """Until all states are where they belong."""
        if self.stage is not None:
            self.stage.settle()

    def close(self) -> None:
        """Give everything back: the disk first, which still writes from the arena."""
        if self.shelf is not None:
            self.shelf.close()
        if self.arena is not None:
            self.arena.close()


def _runs(unit: OffloadUnit, name: str, key: str, begin: int, end: int) -> Iterator[tuple[tuple[str, int], int, int, int]]:
    """Where a run of a parameter's array is: chunk, first entry in the chunk, first in the run, how many."""
    for chunk in unit.chunks:
        for piece in chunk.pieces:
            first = count_of(key, piece.begin)
            low, high = max(begin, first), min(end, first + count_of(key, piece.elements))
            if piece.name == name and low < high:
                yield (unit.path, chunk.begin), count_of(key, piece.at) + low - first, low - begin, high - low


def shelf(nbytes: int, folder: str | Path | None) -> DiskFile:
    """Room on disk; a folder whose files are in host memory themselves must leave enough of that."""
    where = Path(folder or tempfile.gettempdir())
    free(where)  # says if there is no such folder
    there = available() if in_memory(where) else None
    if there is not None and nbytes > there - KEEP_FREE:
        raise UserError(
            f"the plan keeps {human_bytes(nbytes)} on disk in {where}, which is in host memory, and {human_bytes(there)} of that can be had",
            "name a folder on a disk, such as --scratch /data/scratch",
        )
    return DiskFile(nbytes, where)
