"""AdamW whose states are on the device or in host memory, unit by unit, and updated just in time.

    backward ─► norm ─► unit 0: states up ─► update ─► states down       up, work and down are streams of their own;
                        unit 1:      states up ─► update ─► states down  a ring of buffers is between them
                        ...
    next forward of unit i waits for its update, and for nothing else

Nothing is stale: every weight is updated with the same gradients, scale and step as if all had been updated at once. Without
clipping there is no norm to wait for, and a unit's update begins as soon as backward has left it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from foretell.plan.states import SLOTS
from foretell.runtime.offload.arena import Arena, bytes_for
from foretell.runtime.offload.cpu import Workers
from foretell.runtime.offload.forms import MASTER, REST, Form, Run, Settings, take_apart, update
from foretell.runtime.offload.lanes import Lanes, Mark, passed
from foretell.runtime.offload.layout import CPU, DEVICE, HOST, Chunk, Unit
from foretell.runtime.offload.pump import Pump
from foretell.runtime.offload.watch import Look, shared


class _Slot:
    """Device memory for one chunk of states."""

    def __init__(self, form: Form, elements: int, device: torch.device) -> None:
        self.kept = {name: torch.empty(elements, dtype=dtype, device=device) for name, dtype in form.kept.items()}
        self.free: Mark = None
        self._cuts: dict[int, dict[str, Tensor]] = {}

    def cut(self, elements: int) -> dict[str, Tensor]:
        if elements not in self._cuts:
            self._cuts[elements] = {name: flat[:elements] for name, flat in self.kept.items()}
        return self._cuts[elements]


class _Pending:
    """A unit whose update is under way: its gradients are alive until it is done."""

    def __init__(self) -> None:
        self.grads: dict[str, Tensor] = {}
        self.done: Mark = None
        self.chunks: list[Future[Mark]] = []
        """What the CPU still works on."""
        self.ready: Mark = None
        """When the gradients are there."""


class Offloaded(torch.optim.Optimizer):
    """AdamW over units. `begin` starts an update, `need` makes a unit's weights the new ones, `settle` all of them."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], units: Sequence[Unit], form: Form, *, device: torch.device,
        lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2,
        decoupled: bool = True, slots: int = SLOTS, threads: int | None = None, arena: Arena | None = None,
        source: Callable[[str], Tensor] | None = None, hold: int | None = None,
    ) -> None:  # fmt: skip
        """`hold`: bytes of gradients that may wait for their update before backward does; `source` gives a parameter's first
        values where the model does not have them yet (built on the meta device); `arena` is host memory that is there."""
        self.parameters, self.units, self.form, self.device = dict(parameters), tuple(units), form, device
        self.unit_of = {name: unit.path for unit in units for name in unit.sizes}
        self.decoupled = decoupled
        super().__init__(
            [p for unit in units for p in (self.parameters[name] for name in unit.sizes)],
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
        )
        self.lanes = Lanes(device)
        moving = [unit for unit in units if unit.tier != DEVICE]
        by_cpu = {unit.path: [c for c in unit.chunks if c.engine == CPU] for unit in moving}
        self.arena = (arena or self._arena(moving, by_cpu)) if moving else None
        longest = max((chunk.elements for unit in units for chunk in unit.chunks), default=0)
        through = any(chunk.engine != CPU for unit in moving for chunk in unit.chunks)
        self.slots = [_Slot(form, longest, device) for _ in range(slots)] if through else []
        self.wide = torch.empty(longest if form.wide else 0, dtype=torch.float32, device=device)
        self.kept: dict[str, dict[str, Tensor]] = {unit.path: self._place(unit) for unit in units}
        self.workers = Workers(form, threads) if any(by_cpu.values()) else None
        self.staged = {
            (path, chunk.begin): self._take(chunk.elements, torch.bfloat16 if form.wide else torch.float32)
            for path, chunks in by_cpu.items()
            for chunk in chunks
        }
        self._there = {
            (unit.path, chunk.begin): {name: flat[chunk.begin : chunk.end] for name, flat in self.kept[unit.path].items()}
            for unit in units
            for chunk in unit.chunks
        }
        order = {unit.path: number for number, unit in enumerate(units)}
        self.pump = Pump(self._start, order, threaded=device.type == "cuda")
        self.pending: dict[str, _Pending] = {}
        self._next_slot = 0
        self._down: Mark = None
        self._handles: list[Any] = []
        self.early = False
        """Whether a unit's update begins as soon as backward has left it: where nothing is clipped."""
        self.hold = hold
        self._scale: Tensor | None = None
        self._skip: Tensor | None = None
        self._left: dict[str, set[str]] = {}
        self._settings = Settings(lr=lr)
        self._started: set[str] = set()
        self._more: Callable[[], bool] = lambda: False
        self._first: set[str] = set()
        """Units that something uses before they are called: they are updated before forward begins."""
        self._here: dict[str, Mark] = {}
        """Units whose gradients are on their way to the CPU since backward left them."""
        self._stepped: set[str] = set()
        self._steps = {name: torch.zeros((), device=device) for name in self.parameters}
        self._host_steps: dict[str, int] = dict.fromkeys(self.parameters, 0)
        self._weights: dict[str, Tensor] = {}
        self._adopt(source or (lambda name: self.parameters[name].detach()))

    # ------------------------------------------------------------ memory

    def _arena(self, moving: Sequence[Unit], by_cpu: Mapping[str, Sequence[Chunk]]) -> Arena:
        sizes = [unit.elements * dtype.itemsize for unit in moving for dtype in self.form.kept.values()]
        staged = 2 if self.form.wide else 4
        sizes += [chunk.elements * staged for chunks in by_cpu.values() for chunk in chunks]
        return Arena(bytes_for(sizes), register=self.device.type == "cuda")

    def _take(self, elements: int, dtype: torch.dtype) -> Tensor:
        assert self.arena is not None
        return self.arena.take(elements, dtype)

    def _place(self, unit: Unit) -> dict[str, Tensor]:
        if unit.tier == DEVICE:
            return {n: torch.zeros(unit.elements, dtype=t, device=self.device) for n, t in self.form.kept.items()}
        assert unit.tier == HOST, unit.tier
        return {name: self._take(unit.elements, dtype) for name, dtype in self.form.kept.items()}

    @torch.no_grad()
    def _adopt(self, source: Callable[[str], Tensor]) -> None:
        """Take the weights over: where they are bf16, what they were before is kept exactly."""
        for unit in self.units:
            for name, size in unit.sizes.items():
                parameter, start = self.parameters[name], unit.starts[name]
                kept = {key: flat[start : start + size] for key, flat in self.kept[unit.path].items()}
                whole = source(name)
                if self.form.wide:
                    if REST in kept:
                        exact = whole.float().reshape(-1).to(self.device)
                        rounded = torch.empty_like(exact, dtype=torch.bfloat16)
                        rest = torch.empty_like(exact, dtype=torch.int16)
                        take_apart(exact, rounded, rest)
                        kept[REST].copy_(rest)
                        _become(parameter, rounded.view(whole.shape))
                    else:
                        kept[MASTER].copy_(whole.reshape(-1))
                        _become(parameter, whole.to(self.device, torch.bfloat16))
                elif whole is not parameter or whole.device != self.device:
                    _become(parameter, whole.to(self.device))
                self._weights[name] = _flat(parameter.detach())
                state = {key: value.view(whole.shape) for key, value in kept.items()}
                self.state[parameter] = {"step": self._steps[name], **state}

    # ------------------------------------------------------------ hooks

    def attach(self, root: nn.Module, accumulate: Callable[[], bool] | None = None) -> None:
        """Make units wait for their updates from now on; `accumulate` says whether more micro-batches follow."""

        paths = [unit.path for unit in self.units if unit.path]
        self._first = shared(root, self.unit_of, paths)
        look = Look({id(self.parameters[name]): unit.path for unit in self.units if unit.path for name in unit.sizes})

        def enters(path: str) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                self.need(path)
                if look.watch is not None:
                    look.enter()

            return hook

        def begins(*_: Any) -> None:
            for path in ("", *self._first):
                self.need(path)
            if look.watch is not None:
                look.begin()

        def ends(*_: Any) -> None:
            if look.watch is not None:
                self._first |= look.end()

        for path in paths:
            module = root.get_submodule(path)
            self._handles.append(module.register_forward_pre_hook(enters(path), prepend=True))
            self._handles.append(module.register_forward_hook(lambda *_: look.leave() if look.watch is not None else None, always_call=True))
        self._handles.append(root.register_forward_pre_hook(begins, prepend=True))
        self._handles.append(root.register_forward_hook(ends, always_call=True))
        self._more = accumulate or (lambda: False)
        watched = {name for unit in self.units for name in unit.sizes if self.early or any(c.engine == CPU for c in unit.chunks)}
        for name in watched:
            hook = self._arrived(name)
            self._handles.append(self.parameters[name].register_post_accumulate_grad_hook(hook))

    def _arrived(self, name: str) -> Callable[[Tensor], None]:
        path = self.unit_of[name]
        unit = next(unit for unit in self.units if unit.path == path)

        def hook(_: Tensor) -> None:
            if self._more():
                return
            left = self._left.setdefault(path, set(unit.sizes))
            left.discard(name)
            if left:
                return
            if self.early:
                self._release()
                self._collect(unit)
                self._offer(unit)
            else:
                self._here[path] = self._stage(unit, {n: g for n in unit.sizes if (g := self.parameters[n].grad) is not None})

        return hook

    def expect(self, skip: Tensor | None) -> None:
        """Before backward where nothing is clipped: whether the update may happen is known."""
        if self.early:
            self._fresh(None, skip)

    # ------------------------------------------------------------ an update

    @torch.no_grad()
    def begin(self, scale: Tensor | None = None, skip: Tensor | None = None) -> None:
        """Start the update with the gradients that are there, multiplied by `scale`; nothing changes where `skip` is 1."""
        if not self.early:
            self._fresh(scale, skip)
        self._left = {}
        left = [unit for unit in self.units if unit.path not in self._started]
        for unit in left:
            self._collect(unit)
        for unit in left:
            self._offer(unit)

    def _offer(self, unit: Unit) -> None:
        """Hand a unit to those who update it."""
        if self.workers is not None:
            self._ask_cpu(unit)
        self.pump.offer(unit)

    def _fresh(self, scale: Tensor | None, skip: Tensor | None) -> None:
        for path in list(self.pending):
            self.need(path)
        self._started = set()
        self._scale = scale.reshape(1).float() if scale is not None else None
        self._skip = skip.reshape(()).float() if skip is not None else None
        self.lanes.up.wait(self._down)
        if self.workers is not None:
            if self._stepped and not self.workers.skipped:
                for name in self._stepped:
                    self._host_steps[name] += 1
            self._stepped.clear()
            self.workers.expect(self._scale, self._skip, self.device, self.lanes.compute.mark)
        group = self.param_groups[0]
        self._settings = Settings(
            lr=float(group["lr"]), beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"],
            weight_decay=group["weight_decay"], decoupled=self.decoupled,
        )  # fmt: skip

    def _collect(self, unit: Unit) -> None:
        """Keep a unit's gradients apart: they are alive until they are used."""
        self._started.add(unit.path)
        pending = self.pending.setdefault(unit.path, _Pending())
        for name in unit.sizes:
            parameter = self.parameters[name]
            if parameter.grad is not None:
                pending.grads[name], parameter.grad = parameter.grad, None
        pending.ready = self.lanes.compute.mark()

    def _ask_cpu(self, unit: Unit) -> None:
        """Give the CPU what it updates of a unit."""
        pending = self.pending[unit.path]
        chunks = [chunk for chunk in unit.chunks if chunk.engine == CPU]
        if chunks and pending.grads:
            here = self._here.pop(unit.path) if unit.path in self._here else self._stage(unit, pending.grads)
            pending.chunks = [self._by_cpu(unit, chunk, pending.grads, here) for chunk in chunks]

    @torch.no_grad()
    def _start(self, unit: Unit) -> None:
        """In the pump's thread: put the update of a unit into the lanes."""
        pending = self.pending[unit.path]
        grads, lanes = pending.grads, self.lanes
        if not grads:
            return
        with lanes.work.here():
            lanes.work.wait(pending.ready)
            steps = [self._steps[name] for name in grads]
            torch._foreach_add_(steps, 1.0)
            if self._skip is not None:
                torch._foreach_sub_(steps, self._skip)
        for chunk in unit.chunks:
            if chunk.engine == CPU:
                continue
            if unit.tier == DEVICE:
                with lanes.work.here():
                    self._update(unit, chunk, grads, self._there[unit.path, chunk.begin])
            else:
                self._through(unit, chunk, grads)
        pending.done = lanes.work.mark()

    def _through(self, unit: Unit, chunk: Chunk, grads: Mapping[str, Tensor]) -> None:
        """A chunk's states come up, are updated and go down."""
        lanes, slot = self.lanes, self.slots[self._next_slot]
        self._next_slot = (self._next_slot + 1) % len(self.slots)
        there, here = self._there[unit.path, chunk.begin], slot.cut(chunk.elements)
        if slot.free is not None:
            slot.free.synchronize()  # no further ahead: what is needed sooner may become ready
        with lanes.up.here():
            for name, tensor in here.items():
                tensor.copy_(there[name], non_blocking=True)
            come = lanes.up.mark()
        with lanes.work.here():
            lanes.work.wait(come)
            self._update(unit, chunk, grads, here)
            updated = lanes.work.mark()
        with lanes.down.here():
            lanes.down.wait(updated)
            for name, tensor in here.items():
                there[name].copy_(tensor, non_blocking=True)
            slot.free = self._down = lanes.down.mark()

    def _update(self, unit: Unit, chunk: Chunk, grads: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> None:
        runs = [
            Run(
                weight=self._weights[piece.name][piece.begin : piece.begin + piece.elements],
                grad=_flat(grads[piece.name])[piece.begin : piece.begin + piece.elements],
                kept={name: flat[piece.at : piece.at + piece.elements] for name, flat in kept.items()},
                step=self._steps[piece.name],
            )
            for piece in chunk.pieces
            if piece.name in grads
        ]
        update(self.form, runs, self.wide, self._settings, scale=self._scale, skip=self._skip)

    # ------------------------------------------------------------ chunks that the CPU updates

    def _stage(self, unit: Unit, grads: Mapping[str, Tensor]) -> Mark:
        """Bring the gradients of a unit's chunks that the CPU updates to the host; when they are there."""
        chunks = [chunk for chunk in unit.chunks if chunk.engine == CPU]
        lanes = self.lanes
        ready = lanes.compute.mark()
        with lanes.down.here(), torch.no_grad():
            lanes.down.wait(ready)
            for chunk in chunks:
                staged = self.staged[unit.path, chunk.begin]
                for piece in chunk.pieces:
                    if piece.name in grads:
                        source = _flat(grads[piece.name])[piece.begin : piece.begin + piece.elements]
                        staged[piece.at : piece.at + piece.elements].copy_(source, non_blocking=True)
            return lanes.down.mark()

    def _by_cpu(self, unit: Unit, chunk: Chunk, grads: Mapping[str, Tensor], here: Mark) -> Future[Mark]:
        """A chunk that the CPU updates, whose new weights then come up."""
        assert self.workers is not None
        kept = self._there[unit.path, chunk.begin]
        staged, lane = self.staged[unit.path, chunk.begin], self.lanes.fresh
        pieces = [piece for piece in chunk.pieces if piece.name in grads]
        weights = {piece.name: self._weights[piece.name] for piece in pieces}
        steps = {piece.name: self._host_steps[piece.name] + 1 for piece in pieces}
        self._stepped.update(steps)

        def arrive() -> Mark:
            with lane.here(), torch.no_grad():
                for piece in pieces:
                    target = weights[piece.name][piece.begin : piece.begin + piece.elements]
                    target.copy_(staged[piece.at : piece.at + piece.elements], non_blocking=True)
                return lane.mark()

        return self.workers.submit(pieces, staged, kept, steps, self._settings, here, arrive)

    # ------------------------------------------------------------ waiting

    def need(self, path: str) -> None:
        """From here on the compute stream sees the new weights of a unit."""
        pending = self.pending.get(path)
        if pending is None:
            return
        self.pump.wait(path)
        del self.pending[path]
        for chunk in pending.chunks:
            self.lanes.compute.wait(chunk.result())
        self.lanes.compute.wait(pending.done)
        pending.grads.clear()

    def _release(self) -> None:
        """Forget gradients of updates that are done; wait for some where more are kept than may be."""
        waiting = {path: pending for path, pending in self.pending.items() if pending.grads}
        held = sum(grad.nbytes for pending in waiting.values() for grad in pending.grads.values())
        for path, pending in waiting.items():
            over = self.hold is not None and held > self.hold
            if over:
                self.pump.wait(path)
                for chunk in pending.chunks:
                    self.lanes.compute.wait(chunk.result())
            if over or (pending.done is not None and not pending.chunks and passed(pending.done)):
                self.lanes.compute.wait(pending.done)
                held -= sum(grad.nbytes for grad in pending.grads.values())
                pending.grads.clear()

    def settle(self) -> None:
        """Finish whatever is under way: weights and states are as after a plain step, for the host too."""
        for path in list(self.pending):
            self.need(path)
        if self._down is not None:
            self._down.synchronize()

    # ------------------------------------------------------------ what an optimizer is

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.begin()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients under way are kept apart; those that are left are forgotten."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy in place: states stay where they are."""
        self.settle()
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
            for parameter, index in zip(group["params"], saved["params"], strict=True):
                for key, value in state_dict["state"].get(index, {}).items():
                    if key in self.state[parameter]:
                        self.state[parameter][key].copy_(torch.as_tensor(value))
        self._host_steps = {name: int(step) for name, step in self._steps.items()}
        self._stepped.clear()

    def close(self) -> None:
        """End what is under way and give the host memory back; also after a failure, so nothing is waited for in vain."""
        for handle in self._handles:
            handle.remove()
        self.pump.close()
        if self.workers is not None:
            self.workers.close()
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # of a device that failed
                torch.cuda.synchronize(self.device)
        if self.arena is not None:
            self.arena.close()


def _become(parameter: nn.Parameter, value: Tensor) -> None:
    """Other values, perhaps on another device and in another format, for the same parameter."""
    if parameter.is_meta:
        torch.utils.swap_tensors(parameter, nn.Parameter(value, parameter.requires_grad))
    else:
        parameter.data = value


def _flat(tensor: Tensor) -> Tensor:
    return tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)


def every(units: Iterable[Unit], tier: str) -> int:
    """Elements whose states are in a tier."""
    return sum(unit.elements for unit in units if unit.tier == tier)
