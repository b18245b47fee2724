"""AdamW whose states are on the device, in host memory or on disk, unit by unit, and updated just in time.

    backward ─► norm ─► unit 0: states up ─► update ─► states down       up, work and down are streams of their own;
                        unit 1:      states up ─► update ─► states down  a ring of buffers is between them
                        ...
    next forward of unit i waits for its update, and for nothing else

Nothing is stale: every weight is updated with the same gradients, scale and step as if all had been updated at once. Without
clipping there is no norm to wait for, and a unit's update begins as soon as backward has left it.

Units may be streamed (`weights`): then their gradients go to host memory when backward has left them, and come up again with
the states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from foretell.errors import UserError
from foretell.plan.states import SLOTS, count_of
from foretell.runtime.offload import convert
from foretell.runtime.offload.chunk_updates import Pending, Updater, flat
from foretell.runtime.offload.cpu import Workers
from foretell.runtime.offload.forms import MASTER, REST, StateFormat, StepSettings, take_apart
from foretell.runtime.offload.lanes import Lanes, Mark, passed
from foretell.runtime.offload.layout import CPU, DEVICE, DISK, OffloadUnit
from foretell.runtime.offload.memory.arena import KEEP_FREE, Arena, available
from foretell.runtime.offload.memory.store import Store
from foretell.runtime.offload.pump import Pump
from foretell.runtime.offload.shards import part
from foretell.runtime.offload.watch import Look, shared
from foretell.runtime.offload.weights import Streamed, View
from foretell.runtime.train.numbers.clip import local
from foretell.units import human_bytes


class Offloaded(torch.optim.Optimizer):
    """AdamW over units. `begin` starts an update, `need` makes a unit's weights the new ones, `settle` all of them."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], units: Sequence[OffloadUnit], form: StateFormat, *, device: torch.device,
        lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2,
        decoupled: bool = True, slots: int = SLOTS, threads: int | None = None, arena: Arena | None = None,
        source: Callable[[str], Tensor] | None = None, hold: int | None = None, agree: Callable[[int], None] | None = None,
        folder: str | Path | None = None,
    ) -> None:  # fmt: skip
        """`hold`: bytes of gradients that may wait for their update before backward does; `source` gives a parameter's first
        values where the model does not have them yet (built on the meta device), of a sharded one this rank's piece; `arena` is
        host memory that is there, `agree` is asked whether as much as is needed may be taken; `folder` is where states on disk are."""
        self.parameters, self.units, self.form, self.device = dict(parameters), tuple(units), form, device
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in self.parameters.items()}
        self.unit_of = {name: unit.path for unit in units for name in unit.sizes}
        self._resident = {unit.path: unit for unit in units if unit.tier == DEVICE}
        """Updated when they are needed, by who needs them: the pump is left to those whose states have a way to go."""
        self._far = {name: unit for unit in units if unit.tier == DISK for name in unit.sizes}
        """Parameters whose states are on disk."""
        self.decoupled, self.hold = decoupled, hold
        super().__init__(
            [p for unit in units for p in (self.parameters[name] for name in unit.sizes)],
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
        )
        self.lanes = Lanes(device)
        self.store = Store(units, form, device, slots=slots, arena=arena, folder=folder, agree=agree)
        self.workers = Workers(form, threads) if self.store.updated else None
        self._weights: dict[str, Tensor] = {}
        self._steps = {name: torch.zeros((), device=device) for name in self.parameters}
        self.updater = Updater(self.store, self.lanes, self._weights, self._steps, self.workers)
        order = {unit.path: number for number, unit in enumerate(units)}
        self.pump = Pump(lambda unit: self.updater.start(unit, self.pending[unit.path]), order, threaded=device.type == "cuda")
        self.pending: dict[str, Pending] = {}
        self.early = False
        """Whether a unit's update begins as soon as backward has left it: where nothing is clipped."""
        self.sharded = any(isinstance(parameter, DTensor) for parameter in self.parameters.values())
        self.together: frozenset[str] = frozenset()
        """Units whose weights are gathered before their block is called."""
        self.before_gathers: Callable[[Mark], None] = lambda mark: None
        """Makes gathers of sharded weights wait for a mark."""
        self._handles: list[Any] = []
        self._left: dict[str, set[str]] = {}
        self._started: set[str] = set()
        self._more: Callable[[], bool] = lambda: False
        self._first: set[str] = set()
        """Units that something uses before they are called: they are updated before forward begins."""
        self._here: dict[str, Mark] = {}
        """Units whose gradients are in host memory, or on their way, since backward left them."""
        self._norms: dict[str, dict[str, Tensor]] = {}
        """Of gradients of streamed units, which are not on the device any more."""
        self._leaving: list[tuple[Mark, list[Tensor]]] = []
        self._host_steps: dict[str, int] = dict.fromkeys(self.parameters, 0)
        self._stepped: set[str] = set()
        self._adopt(source or (lambda name: local(self.parameters[name].detach())))
        views = {
            unit.path: [View(p, unit.starts[name], p.shape) for name in unit.sizes for p in (self.parameters[name],)]
            for unit in units if unit.streamed
        }  # fmt: skip
        self.streamed = Streamed(self.store.weights, views, self.lanes.fresh, self.lanes.compute, device, self.need)

    @property
    def arena(self) -> Arena | None:
        return self.store.arena

    # ------------------------------------------------------------ first values

    @torch.no_grad()
    def _adopt(self, source: Callable[[str], Tensor]) -> None:
        """Take the weights over: where they are bf16, what they were before is kept exactly."""
        for unit in self.units:
            for name in unit.sizes:
                parameter, kept = self.parameters[name], self.store.fresh(unit, name)
                whole = source(name)
                value = self._rounded(whole, kept)
                if unit.streamed:
                    home = self.store.weights[unit.path][unit.starts[name] : unit.starts[name] + whole.numel()]
                    home.copy_(value.reshape(-1))
                    value = home.view(whole.shape)
                if isinstance(parameter, DTensor):
                    local(parameter.detach()).copy_(value)
                elif value is not parameter or value.device != parameter.device:
                    _become(parameter, value)
                self.store.write(unit, name, kept)
                if unit.tier == DISK:  # what these are like; `revealed` has them themselves
                    kept = {k: torch.empty(count_of(k, whole.numel()), dtype=t, device="meta") for k, t in self.form.kept.items()}
                state = {
                    key: part(value.view(whole.shape), parameter) if value.numel() == whole.numel() else value for key, value in kept.items()
                }
                self.state[parameter] = {"step": self._steps[name], **state}
        self._locate()
        self._mirror()

    def _locate(self) -> None:
        """Where this rank's weights are: `fully_shard` may have put its pieces elsewhere since, when the model was first called."""
        for name, parameter in self.parameters.items():
            self._weights[name] = flat(local(parameter.detach()))

    def _rounded(self, whole: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        """The weight that the model computes with; states take what it does not hold."""
        if REST in kept:
            exact = whole.to(self.device, torch.float32, copy=True).reshape(-1)
            rounded, rest = torch.empty_like(exact, dtype=torch.bfloat16), torch.empty_like(exact, dtype=torch.int16)
            take_apart(exact, rounded, rest)
            kept[REST].copy_(rest)
            return rounded.view(whole.shape)
        if MASTER in kept:
            kept[MASTER].copy_(whole.reshape(-1))
            return whole.to(self.device, torch.bfloat16)
        return whole.to(self.device)

    @torch.no_grad()
    def _mirror(self) -> None:
        """Weights that the CPU needs for its updates, as they are on the device."""
        for unit in self.units:
            for chunk in unit.chunks:
                if chunk.engine != CPU or unit.streamed or not self.store.keeps_weights:
                    continue
                target = self.store.updated[unit.path, chunk.begin]
                for piece in chunk.pieces:
                    target[piece.at : piece.at + piece.elements].copy_(self._weights[piece.name][piece.begin : piece.begin + piece.elements])

    # ------------------------------------------------------------ hooks

    def attach(self, root: nn.Module, accumulate: Callable[[], bool] | None = None) -> None:
        """Make units wait for their updates from now on; `accumulate` says whether more micro-batches follow."""
        paths = [unit.path for unit in self.units if unit.path]
        self._first = shared(root, self.unit_of, paths) | self.together
        owner = {id(self.parameters[name]): unit.path for unit in self.units if unit.path for name in unit.sizes}
        look = Look(owner, self._used)

        def enters(path: str) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                if look.watch is not None:
                    look.enter()
                if path in self.streamed.views:
                    self._drop()
                    self.streamed.enter(path)
                else:
                    self.need(path)

            return hook

        def leaves(path: str) -> Callable[..., None]:
            def hook(_: nn.Module, __: Any, output: Any = None) -> None:
                if path in self.streamed.views:
                    self.streamed.leave(path, output, self._back)
                if look.watch is not None:
                    look.leave()

            return hook

        def begins(*_: Any) -> None:
            for path in ("", *self._first):
                self._used(path)
            if look.watch is not None:
                look.begin()

        def ends(*_: Any) -> None:
            if look.watch is not None:
                self._first |= look.end()

        for path in paths:
            module = root.get_submodule(path)
            self._handles.append(module.register_forward_pre_hook(enters(path), prepend=True))
            self._handles.append(module.register_forward_hook(leaves(path), always_call=True))
        self._handles.append(root.register_forward_pre_hook(begins, prepend=True))
        self._handles.append(root.register_forward_hook(ends, always_call=True))
        self._more = accumulate or (lambda: False)
        for unit in () if self.sharded else self.units:  # `fully_shard` has gradients summed on streams of its own until backward ends
            if self.early or unit.streamed or any(chunk.engine == CPU for chunk in unit.chunks):
                for name in unit.sizes:
                    self._handles.append(self.parameters[name].register_post_accumulate_grad_hook(self._arrived(unit, name)))

    def _used(self, path: str) -> None:
        """A unit whose weights are used without, or before, a call of its block."""
        if path in self.streamed.views:
            self.streamed.keep(path)
        else:
            self.need(path)

    def _arrived(self, unit: OffloadUnit, name: str) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            if self._more() and not unit.streamed:
                return
            left = self._left.setdefault(unit.path, set(unit.sizes))
            left.discard(name)
            if left:
                return
            del self._left[unit.path]
            if self.early and not self._more():
                self._release()
                self._collect(unit)
                self._offer(unit)
            elif unit.streamed:
                self._send_down(unit)
            else:
                self._here[unit.path] = self.updater.stage(unit, self._grads(unit))

        return hook

    def _back(self, path: str) -> None:
        """Before backward of a streamed unit: what was there of its gradients comes back."""
        norms = self._norms.pop(path, None)
        if not norms:
            return
        unit = next(unit for unit in self.units if unit.path == path)
        shapes = {name: self.parameters[name].shape for name in norms}
        for name, grad in self.updater.fetch(unit, list(norms), shapes, self._here.pop(path)).items():
            self.parameters[name].grad = grad

    def _grads(self, unit: OffloadUnit) -> dict[str, Tensor]:
        found = ((name, self.parameters[name].grad) for name in unit.sizes)
        return {name: local(grad) for name, grad in found if grad is not None}

    @torch.no_grad()
    def _send_down(self, unit: OffloadUnit) -> None:
        """Gradients of a streamed unit leave the device; their norms are kept."""
        grads = self._grads(unit)
        if not grads:
            return
        norms = torch._foreach_norm(list(grads.values()), 2, dtype=torch.float32)
        self._norms.setdefault(unit.path, {}).update(zip(grads, norms, strict=True))
        self._drop()
        mark = self._here[unit.path] = self.updater.stage(unit, grads)
        self._leaving.append((mark, list(grads.values())))
        for name in grads:
            self.parameters[name].grad = None

    def _drop(self) -> None:
        """Forget gradients that are in host memory by now: compute goes on when they are, and may use their memory."""
        for mark, _ in self._leaving:
            self.lanes.compute.wait(mark)
        self._leaving.clear()

    def norms(self) -> dict[str, Tensor]:
        """Norms of gradients that are not on the device any more, after the last backward."""
        for unit in self.units:
            if unit.streamed and not self.early:
                self._send_down(unit)
        return {name: norm for norms in self._norms.values() for name, norm in norms.items()}

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
        self.norms()
        self._drop()
        self._left = {}
        self.streamed.go_home()
        left = [unit for unit in self.units if unit.path not in self._started]
        for unit in left:
            self._collect(unit)
        for unit in left:
            self._offer(unit)

    def _fresh(self, scale: Tensor | None, skip: Tensor | None) -> None:
        for path in list(self.pending):
            self.need(path)
        self._started = set()
        if self.sharded:
            self._locate()
        now = self.updater
        now.started.clear()
        now.scale = scale.reshape(1).float() if scale is not None else None
        now.skip = skip.reshape(()).float() if skip is not None else None
        now.counts = 1.0 - now.skip if now.skip is not None else None
        self.lanes.up.wait(now.last)
        if self.workers is not None:
            if self._stepped and not self.workers.skipped:
                for name in self._stepped:
                    self._host_steps[name] += 1
            self._stepped.clear()
            self.workers.expect(now.scale, now.skip, self.device, self.lanes.compute.mark)
        group = self.param_groups[0]
        now.settings = StepSettings(
            lr=float(group["lr"]), beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"],
            weight_decay=group["weight_decay"], decoupled=self.decoupled,
        )  # fmt: skip

    def _collect(self, unit: OffloadUnit) -> None:
        """Keep a unit's gradients apart: they are alive until they are used."""
        self._started.add(unit.path)
        pending = self.pending.setdefault(unit.path, Pending())
        pending.grads = self._grads(unit)
        for name in pending.grads:
            self.parameters[name].grad = None
        pending.on_host = frozenset(self._norms.pop(unit.path, ()))
        pending.here = self._here.pop(unit.path, None)
        pending.ready = self.lanes.compute.mark()

    def _offer(self, unit: OffloadUnit) -> None:
        """Hand a unit to those who update it."""
        pending = self.pending[unit.path]
        if self.workers is not None and any(chunk.engine == CPU for chunk in unit.chunks):
            self.updater.by_cpu(unit, pending, {name: self._host_steps[name] + 1 for name in pending.names})
            self._stepped |= pending.names
        if unit.tier != DEVICE or self.early:
            self.pump.offer(unit, pending.ready if self.early else None)

    # ------------------------------------------------------------ waiting

    def need(self, path: str) -> None:
        """From here on the compute stream sees the new weights of a unit; of a streamed one, whoever brings it up."""
        pending = self.pending.get(path)
        if pending is None:
            return
        self.pump.wait(path)
        if path in self._resident and path not in self.updater.started:
            self.updater.start(self._resident[path], pending)
        del self.pending[path]
        lane = self.streamed.lane if path in self.streamed.views else self.lanes.compute
        for mark in (*(chunk.result() for chunk in pending.chunks), pending.done):
            lane.wait(mark)
            self.before_gathers(mark)
        if lane is not self.lanes.compute and pending.grads:
            self.lanes.compute.wait(pending.done)
        pending.grads.clear()

    def _release(self) -> None:
        """Forget gradients of updates that are done; wait for some where more are kept than may be."""
        waiting = {path: pending for path, pending in self.pending.items() if pending.grads}
        held = sum(grad.nbytes for pending in waiting.values() for grad in pending.grads.values())
        order = {unit.path: number for number, unit in enumerate(self.units)}
        for path in sorted(waiting, key=lambda path: (waiting[path].done is None, order[path])):  # as the pump takes them
            pending = waiting[path]
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
        if self.updater.last is not None:
            self.updater.last.synchronize()
        self.store.settle()
        self.streamed.go_home()  # also what was looked at since

    # ------------------------------------------------------------ what an optimizer is

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.begin()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients under way are kept apart; those that are left are forgotten."""
        for parameter in self.parameters.values():
            parameter.grad = None
        self._norms.clear()
        self._here.clear()

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        found, states = super().state_dict(), self.revealed() if self._far else {}
        for group, packed in zip(self.param_groups, found["param_groups"], strict=True):
            found["state"].update({index: states[p] for p, index in zip(group["params"], packed["params"], strict=True) if p in states})
        return found

    def revealed(self) -> dict[Tensor, dict[str, Any]]:
        """All states as ordinary tensors: a copy of those on disk, for which there must be memory."""
        self.settle()
        nbytes, there = int(sum(unit.sizes[name] for name, unit in self._far.items()) * self.form.nbytes), available()
        if self._far and there is not None and nbytes > there - KEEP_FREE:
            raise UserError(
                f"{human_bytes(nbytes)} of optimizer states are on disk, and {human_bytes(there)} of host memory can be had for a copy",
                "save a checkpoint, which needs none",
            )
        return {p: self._opened(p) for p in self.state}

    def _opened(self, parameter: Tensor) -> dict[str, Any]:
        """A parameter's states: where they are, or a copy of what is on disk."""
        own, name = self.state[parameter], self._names[parameter]
        if name not in self._far:
            return own
        return {**own, **{
            key: part(value.view(local(own[key]).shape), parameter) for key, value in self.store.arrays(self._far[name], name).items()
        }}

    def read(self, name: str, key: str, begin: int, end: int) -> Tensor:
        """Elements of a parameter's state that is on disk, after `settle`."""
        return self.store.read(self._far[name], name, key, begin, end)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy in place: states stay where they are. A value may be something to call for it, one parameter at a time."""
        self.settle()
        for group, packed in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in packed.items() if key != "params"})
            for parameter, index in zip(group["params"], packed["params"], strict=True):
                saved = state_dict["state"].get(index, {})
                if not saved:
                    continue
                saved = {key: value() if callable(value) else value for key, value in saved.items()}
                own, name = self._opened(parameter), self._names[parameter]
                for key, value in saved.items():
                    if key in own:
                        local(own[key]).copy_(local(torch.as_tensor(value)))
                self._convert(parameter, own, saved)
                if name in self._far:
                    self.store.write(self._far[name], name, {key: local(own[key]) for key in self.form.kept})
        self._mirror()
        self._host_steps = {name: int(step) for name, step in self._steps.items()}
        self._stepped.clear()

    def _convert(self, parameter: nn.Parameter, own: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
        """What was saved in another form."""
        own, saved = {key: local(value) for key, value in own.items()}, {key: local(torch.as_tensor(value)) for key, value in saved.items()}
        convert.weights(local(parameter.detach()).reshape(-1), own, saved)
        convert.moments(self._names[parameter], own, saved)

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
        self.store.close()


def _become(parameter: nn.Parameter, value: Tensor) -> None:
    """Other values, perhaps on another device and in another format, for the same parameter."""
    if parameter.is_meta:  # whoever writes to the values must not seem to change what autograd has saved
        torch.utils.swap_tensors(parameter, nn.Parameter(value.new_empty(0), parameter.requires_grad))
    parameter.data = value
