"""How one chunk is updated: on the device where its states are, through the device, or by the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from foretell.runtime.offload.cpu import Workers
from foretell.runtime.offload.forms import ElementRun, StepSettings, update
from foretell.runtime.offload.lanes import Lanes, Mark
from foretell.runtime.offload.layout import CPU, DEVICE, DISK, Chunk, OffloadUnit
from foretell.runtime.offload.memory.store import ChunkSlot, Store


@dataclass
class Pending:
    """A unit whose update is under way."""

    grads: dict[str, Tensor] = field(default_factory=dict)
    """On the device, alive until they are used."""
    on_host: frozenset[str] = frozenset()
    """Parameters whose gradients are in host memory."""
    ready: Mark = None
    """When the gradients on the device are there."""
    here: Mark = None
    """When those in host memory are there."""
    done: Mark = None
    """When the device's part of the update is."""
    chunks: list[Future[Mark]] = field(default_factory=list)
    """What the CPU still works on."""

    @property
    def names(self) -> frozenset[str]:
        return self.on_host | self.grads.keys()


class Updater:
    """Puts updates into the lanes. `scale`, `skip` and `settings` are those of the step."""

    def __init__(self, store: Store, lanes: Lanes, weights: Mapping[str, Tensor], steps: Mapping[str, Tensor], workers: Workers | None) -> None:
        self.store, self.lanes, self.weights, self.steps, self.workers = store, lanes, weights, steps, workers
        self.scale: Tensor | None = None
        self.skip: Tensor | None = None
        self.counts: Tensor | None = None
        """1 where the step counts, 0 where it is skipped."""
        self.settings = StepSettings(lr=0.0)
        self.last: Mark = None
        """When the last states went down."""
        self.started: dict[str, None] = {}
        """Units whose update in this step has begun, in this order."""
        self._next = 0

    @torch.no_grad()
    def start(self, unit: OffloadUnit, pending: Pending) -> None:
        """The part of a unit that the device updates. Units whose states stay and others may be started by two threads at once:
        they share neither lane nor scratch."""
        lane, names = self.lanes.home if unit.tier == DEVICE else self.lanes.work, pending.names
        self.started[unit.path] = None
        if not names:
            return
        with lane.here():
            lane.wait(pending.ready)
            steps = [self.steps[name] for name in unit.sizes if name in names]
            if self.counts is None:
                torch._foreach_add_(steps, 1.0)
            else:  # by the op's whole name: a tensor of one element would else be taken for a number, and the device asked for it
                torch.ops.aten._foreach_add_.Tensor(steps, self.counts)
        for chunk in unit.chunks:
            if chunk.engine == CPU:
                continue
            if unit.tier == DEVICE:
                with lane.here():
                    self._update(chunk, pending, self.store.there[unit.path, chunk.begin], None, self.store.wide_at_home)
            else:
                self._through(unit, chunk, pending)
        pending.done = self.last if unit.streamed else lane.mark()

    def _through(self, unit: OffloadUnit, chunk: Chunk, pending: Pending) -> None:
        """A chunk's states come up, are updated and go down."""
        lanes, slot = self.lanes, self.store.slots[self._next]
        self._next = (self._next + 1) % len(self.store.slots)
        key, here = (unit.path, chunk.begin), slot.cut(chunk.elements)
        read = self._read(key) if unit.tier == DISK else None
        if slot.free is not None:
            slot.free.synchronize()  # no further ahead: what is needed sooner may become ready
        there = self.store.there[key] if read is None else read.result()
        with lanes.up.here():
            for name, tensor in here.items():
                tensor.copy_(there[name], non_blocking=True)
            if unit.streamed:
                self._bring(unit, chunk, pending, slot)
            come = lanes.up.mark()
        with lanes.work.here():
            lanes.work.wait(come)
            self._update(chunk, pending, here, slot if unit.streamed else None, self.store.wide)
            updated = lanes.work.mark()
        with lanes.down.here():
            lanes.down.wait(updated)
            for name, tensor in here.items():
                there[name].copy_(tensor, non_blocking=True)
            if unit.streamed:
                self.store.weights[unit.path][chunk.begin : chunk.end].copy_(slot.weight[: chunk.elements], non_blocking=True)
            slot.free = self.last = lanes.down.mark()
        if unit.tier == DISK:
            assert self.store.stage is not None
            self.store.stage.put(key, there, after=self.last.synchronize if self.last is not None else None)

    def _read(self, key: tuple[str, int]) -> Future[dict[str, Tensor]]:
        """Fetch a chunk from disk, and begin to read those that come next as far as there are buffers: the unit's own, those of
        units that forward needs later, those that it needs sooner and that backward has not left yet; at the end of a step
        those that came first in it."""
        stage, begins, paths = self.store.stage, self.store.begins, list(self.store.begins)
        assert stage is not None
        found, at = stage.fetch(key), paths.index(key[0])
        left = [path for path in [*paths[at + 1 :], *reversed(paths[:at])] if path not in self.started]
        next_step = [path for path in list(self.started) if path in begins] if not left else []
        coming = [(key[0], begin) for begin in begins[key[0]] if begin > key[1]]
        for other in chain(coming, ((path, begin) for path in left or next_step for begin in begins[path])):
            if not stage.ahead(other):
                break
        return found

    def _bring(self, unit: OffloadUnit, chunk: Chunk, pending: Pending, slot: ChunkSlot) -> None:
        """What else a streamed unit's update needs: gradients, and weights unless all of them are written anew."""
        if pending.on_host:
            self.lanes.up.wait(pending.here)
            slot.grad[: chunk.elements].copy_(self.store.grads[unit.path, chunk.begin], non_blocking=True)
        if self.store.keeps_weights or any(piece.name not in pending.names for piece in chunk.pieces):
            slot.weight[: chunk.elements].copy_(self.store.weights[unit.path][chunk.begin : chunk.end], non_blocking=True)

    def _update(self, chunk: Chunk, pending: Pending, kept: Mapping[str, Tensor], slot: ChunkSlot | None, wide: Tensor) -> None:
        runs = []
        for piece in chunk.pieces:
            inside, own = slice(piece.at, piece.at + piece.elements), slice(piece.begin, piece.begin + piece.elements)
            if piece.name in pending.grads:
                grad = flat(pending.grads[piece.name])[own]
            elif piece.name in pending.on_host and slot is not None:
                grad = slot.grad[inside]
            else:
                continue
            weight = self.weights[piece.name][own] if slot is None else slot.weight[inside]
            states = {name: array[self.store.form.run(name, piece.at, piece.elements)] for name, array in kept.items()}
            runs.append(ElementRun(weight=weight, grad=grad, kept=states, step=self.steps[piece.name]))
        update(self.store.form, runs, wide, self.settings, scale=self.scale, skip=self.skip)

    # ------------------------------------------------------------ gradients in host memory

    def stage(self, unit: OffloadUnit, grads: Mapping[str, Tensor]) -> Mark:
        """Bring gradients to the host: of a streamed unit all, else what the CPU updates. The mark says when they are there."""
        lanes = self.lanes
        ready = lanes.compute.mark()
        with lanes.down.here(), torch.no_grad():
            lanes.down.wait(ready)
            for chunk, target in self._targets(unit):
                for piece in chunk.pieces:
                    if piece.name in grads:
                        source = flat(grads[piece.name])[piece.begin : piece.begin + piece.elements]
                        target[piece.at : piece.at + piece.elements].copy_(source, non_blocking=True)
            return lanes.down.mark()

    def fetch(self, unit: OffloadUnit, names: Sequence[str], shapes: Mapping[str, torch.Size], here: Mark) -> dict[str, Tensor]:
        """Gradients that are in host memory, on the device again: more is to be added to them."""
        found = {name: torch.empty(shapes[name], dtype=self.store.form.weight, device=self.store.device) for name in names}
        taken = self.lanes.compute.mark()
        with self.lanes.up.here(), torch.no_grad():
            self.lanes.up.wait(here)
            self.lanes.up.wait(taken)
            for chunk, source in self._targets(unit):
                for piece in chunk.pieces:
                    if piece.name in found:
                        target = found[piece.name].view(-1)[piece.begin : piece.begin + piece.elements]
                        target.copy_(source[piece.at : piece.at + piece.elements], non_blocking=True)
        self.lanes.compute.wait(self.lanes.up.mark())
        return found

    def _targets(self, unit: OffloadUnit) -> list[tuple[Chunk, Tensor]]:
        found = ((chunk, self.store.grads.get((unit.path, chunk.begin))) for chunk in unit.chunks)
        return [(chunk, target) for chunk, target in found if target is not None]

    # ------------------------------------------------------------ chunks that the CPU updates

    def by_cpu(self, unit: OffloadUnit, pending: Pending, steps: Mapping[str, int]) -> None:
        """Give the CPU what it updates of a unit, whose gradients go to the host if they are not there."""
        chunks = [chunk for chunk in unit.chunks if chunk.engine == CPU]
        if not chunks or not pending.names:
            return
        if not pending.on_host and pending.here is None:
            pending.here = self.stage(unit, pending.grads)
        pending.chunks = [self._ask(unit, chunk, pending, steps) for chunk in chunks]

    def _ask(self, unit: OffloadUnit, chunk: Chunk, pending: Pending, steps: Mapping[str, int]) -> Future[Mark]:
        assert self.workers is not None
        key, lane = (unit.path, chunk.begin), self.lanes.fresh
        weights = self.store.updated[key]
        pieces = [piece for piece in chunk.pieces if piece.name in pending.names]
        targets = {} if unit.streamed else {piece.name: self.weights[piece.name] for piece in pieces}

        def arrive() -> Mark:
            """New weights to the device, unless they come when they are used."""
            if not targets:
                return None
            with lane.here(), torch.no_grad():
                for piece in pieces:
                    target = targets[piece.name][piece.begin : piece.begin + piece.elements]
                    target.copy_(weights[piece.at : piece.at + piece.elements], non_blocking=True)
                return lane.mark()

        return self.workers.submit(
            pieces, weights, self.store.grads[key], self.store.there[key], {p.name: steps[p.name] for p in pieces},
            self.settings, pending.here, arrive,
        )  # fmt: skip


def flat(tensor: Tensor) -> Tensor:
    return tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)
