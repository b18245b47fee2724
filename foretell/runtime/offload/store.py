"""Memory of an optimizer: which array of which unit is where.

    on the device   states of units that stay; a ring of slots that the others pass through
    in the arena    states of the others; streamed units' weights and gradients; gradients of what the CPU updates
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from foretell.runtime.offload.arena import Arena, bytes_for
from foretell.runtime.offload.forms import MASTER, Form
from foretell.runtime.offload.lanes import Mark
from foretell.runtime.offload.layout import CPU, DEVICE, HOST, Chunk, Unit


class Slot:
    """Device memory for one chunk: its states, and for streamed units its weights and gradients."""

    def __init__(self, form: Form, elements: int, device: torch.device, *, streamed: bool) -> None:
        self.kept = {name: torch.empty(elements, dtype=dtype, device=device) for name, dtype in form.kept.items()}
        count = elements if streamed else 0
        self.weight, self.grad = (torch.empty(count, dtype=form.weight, device=device) for _ in range(2))
        self.free: Mark = None
        self._cuts: dict[int, dict[str, Tensor]] = {}

    def cut(self, elements: int) -> dict[str, Tensor]:
        if elements not in self._cuts:
            self._cuts[elements] = {name: flat[:elements] for name, flat in self.kept.items()}
        return self._cuts[elements]


class Store:
    """Arrays by unit, and by unit and chunk."""

    def __init__(self, units: Sequence[Unit], form: Form, device: torch.device, *, slots: int, arena: Arena | None = None) -> None:
        self.form, self.device = form, device
        sizes = [size for unit in units for size in self._on_host(unit)]
        self.arena = (arena or Arena(bytes_for(sizes), register=device.type == "cuda")) if sizes else None
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
        longest = max((chunk.elements for unit in units for chunk in unit.chunks), default=0)
        self.slots = [Slot(form, longest, device, streamed=bool(self.weights)) for _ in range(slots if moving else 0)]
        self.wide = torch.empty(longest * form.scratch, dtype=torch.float32, device=device)

    def _on_host(self, unit: Unit) -> Iterator[int]:
        width = self.form.weight.itemsize
        if unit.tier == HOST:
            yield from (unit.elements * dtype.itemsize for dtype in self.form.kept.values())
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

    def _states(self, unit: Unit) -> dict[str, Tensor]:
        if unit.tier == DEVICE:
            return {n: torch.zeros(unit.elements, dtype=t, device=self.device) for n, t in self.form.kept.items()}
        assert unit.tier == HOST, unit.tier
        return {name: self._take(unit.elements, dtype) for name, dtype in self.form.kept.items()}

    def _cut(self, unit: Unit, chunk: Chunk) -> None:
        key = (unit.path, chunk.begin)
        self.there[key] = {name: flat[chunk.begin : chunk.end] for name, flat in self.kept[unit.path].items()}
        if unit.streamed or chunk.engine == CPU:
            self.grads[key] = self._take(chunk.elements, self.form.weight)
        if chunk.engine != CPU:
            return
        if unit.streamed:
            self.updated[key] = self.weights[unit.path][chunk.begin : chunk.end]
        else:
            self.updated[key] = self._take(chunk.elements, self.form.weight) if self.keeps_weights else self.grads[key]

    def slice_of(self, unit: Unit, name: str) -> dict[str, Tensor]:
        """A parameter's states."""
        begin = unit.starts[name]
        return {key: flat[begin : begin + unit.sizes[name]] for key, flat in self.kept[unit.path].items()}

    def close(self) -> None:
        if self.arena is not None:
            self.arena.close()
