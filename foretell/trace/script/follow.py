"""Where in a step a script is, told by its own calls; what it does from its first forward to the end of its first step, recorded.

    a module that learns is called    a micro-batch begins                        micro_first, then micro_next
    backward                          its second half, or several: a new micro-batch begins with the next forward after one
    clip_grad_norm_, unscale_, step   the update begins                           update_first
    the end of step                   the optimizer steps once more, with states  update, zero_grad
    the step after that               as the script takes it (`second`)           again, again_next, update_again; then the script is stopped

With several optimizers that take turns (GANs) all of a round is one program.
"""

from __future__ import annotations

import gc
import inspect
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from foretell.errors import ModelError
from foretell.trace import types
from foretell.trace.cuda.select import real_masks
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import Roles, finished, in_move_order
from foretell.trace.record.recorder import Recorder
from foretell.trace.record.step import Workload
from foretell.trace.sandbox.replaced import replaced
from foretell.trace.script.change import StepChange
from foretell.trace.script.made import KNOWN, name_of, optimizers, parameters_of, shapes_of, tied_names, whole
from foretell.trace.script.places import Places
from foretell.trace.script.second import AGAIN, AGAIN_NEXT, BETWEEN, UPDATE_AGAIN, Second, scheduled
from foretell.trace.script.words import ScriptCommand
from foretell.trace.script.world import ScriptWorld, asker, rows_of, sizes

_MICRO = ("micro_first", "micro_next")
_UPDATE = "update_first"
_ROUNDS = ("micro_first", "round")
"""Programs of steps in which several optimizers take turns."""


class StepDone(BaseException):
    """The step is over: the script need not go on."""


@dataclass
class FollowedStep:
    """What the script turned out to do; in the place of a `Step`."""

    model: nn.Module
    workload: Workload
    recipe: Recipe
    optimizer: Optimizer | None = None
    backwards: int = 1
    kernels: dict[str, int] = field(default_factory=dict)
    """None: a script's model is as the script has it."""


class Follower:
    """Knows from the script's own calls where in a step it is."""

    def __init__(self, recorder: Recorder, world: ScriptWorld, change: StepChange) -> None:
        self.recorder, self.world, self.change, self.places = recorder, world, change, Places()
        self.shapes: dict[str, tuple[list[int], str]] = {}
        self.tied: list[list[str]] = []
        self.named: dict[str, Any] = {}
        """How the script names its model, and which part of it is called."""
        self.found: FollowedStep | None = None
        self.roles: Roles | None = None
        self.done = self.stepped = False
        """Whether nothing more is needed of the script; whether its first step is over."""
        self.second = Second(recorder)
        self.micro_batch = 1
        """Samples of the first batch."""
        self._micros, self._name = 0, ""
        self._given: list[list[Any]] = []
        self._tentative = False
        """Whether the model that was found is in evaluation mode: the script may train it so, or only look at it."""
        self._ran = False
        """Whether backward ran since the micro-batch began."""
        self._clip: float | None = None
        self._trained: list[nn.Parameter] = []
        self._before: set[int] = set()
        """Storages that were there when the first step began, of the device or not."""
        self._program: AbstractContextManager[None] | None = None
        self._stack = ExitStack()
        self._casts = ExitStack()
        """Autocast that the script does not do by itself: from forward to backward."""
        self._before_step = 0
        self._follows = False
        self._left = 0
        """Ops up to the return of the outermost call."""
        self._closed = False
        """Whether the optimizer was given a closure."""
        self._rounds: dict[int, int] = {}
        """Optimizer → steps it has taken, where several take turns."""

    @contextmanager
    def following(self) -> Iterator[None]:
        hooks = [
            nn.modules.module.register_module_forward_pre_hook(self._called), nn.modules.module.register_module_forward_hook(self._returned),
            register_optimizer_step_pre_hook(self._stepping), register_optimizer_step_post_hook(self._stepped),
        ]  # fmt: skip
        try:
            with self._stack, self._casts, replaced(self._watched()):
                yield
        finally:
            self._end()
            for hook in hooks:
                hook.remove()

    def trace(self, script: ScriptCommand, capability: tuple[int, int] | None, release: str) -> types.Trace:
        """What was recorded; raises where no step was."""
        found, roles = self.found, self.roles
        if found is None:
            remedy = "a training loop calls a model, backward() and step()"
            raise ModelError(f"{script.name} ended without a module that learns being called", remedy)
        if roles is None:
            raise ModelError(f"{script.name} ended without backward()", "for inference name the model itself: foretell fit file.py:build --infer")
        if found.optimizer is None:
            raise ModelError(f"{script.name} ended before its first step", "an optimizer's step() is where a step ends")
        self._update_whole()
        whole_second = self.second.finish()
        self.recorder.assumed = {words for words in self.recorder.assumed if not words.startswith(" ")}  # of no op of the step
        self._seen_first()
        if self.world.ranks.world > 1 or self._rounds:  # what is compiled there has sends, or several models, in it
            self.recorder.compiled.clear()
        trace = finished(self.recorder, found, roles, capability, release)  # type: ignore[arg-type]
        recipe = replace(found.recipe, compile=str(trace.meta.get("compiles", "none")))
        trace = replace(trace, meta={**trace.meta, "recipe": recipe.to_json()})
        if not any(len(one) > 1 for one in trace.meta["batch"]):  # type: ignore[attr-defined]
            trace = replace(trace, meta={**trace.meta, "batch": self.world.row or self._given})  # nothing was moved
        trace = replace(trace, meta={**trace.meta, "trainable": sum({id(one): one.numel() for one in self._trained}.values())})
        if whole_second:
            return scheduled(trace, found.recipe.accumulate)
        return replace(trace, schedule={"first_step": ((_ROUNDS[0], 1),), "steady_step": ((_ROUNDS[1], 1),)}) if self._rounds else trace

    # ------------------------------------------------------------------ what is watched

    def _watched(self) -> Iterator[tuple[Any, str, Any]]:
        backward, scaler = torch.autograd.backward, torch.amp.GradScaler
        unscale, updated = scaler.unscale_, scaler.update

        def back(*args: Any, **kwargs: Any) -> None:
            self._casts.close()
            self.recorder.phase("backward")
            try:
                backward(*args, **kwargs)
            finally:
                self.recorder.phase("forward")
            self._ran_backward()

        grad, unscale_all = torch.autograd.grad, scaler._unscale_grads_  # type: ignore[attr-defined]

        def unscaled_all(scaling: Any, optimizer: Any, inverse: Any, found: Any, allow: bool) -> Any:
            """Where ranks share parameters in fp16, they stand for shards in fp32."""
            return unscale_all(scaling, optimizer, inverse, found, allow or bool(self.world.ranks.units) or bool(self.change.replaced))

        def gradients(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            """Of parameters, to be used as they are: another way to write backward."""
            given = inputs if isinstance(inputs, (list, tuple)) else (inputs,)
            if kwargs.get("create_graph") or not any(isinstance(one, nn.Parameter) for one in given):
                return grad(outputs, inputs, *args, **kwargs)
            self.recorder.phase("backward")
            try:
                return grad(outputs, inputs, *args, **kwargs)
            finally:
                self.recorder.phase("forward")
                self._ran_backward()

        def unscaled(scaling: Any, optimizer: Any) -> Any:
            self._updating()
            return unscale(scaling, optimizer)

        def update(scaling: Any, *args: Any, **kwargs: Any) -> Any:
            made = updated(scaling, *args, **kwargs)
            if self.done:
                raise StepDone
            return made

        yield torch.autograd, "backward", back
        yield torch.autograd, "grad", gradients
        yield scaler, "unscale_", unscaled
        yield scaler, "_unscale_grads_", unscaled_all
        yield scaler, "update", update
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            for owner in (nn.utils, nn.utils.clip_grad):
                yield owner, name, self._clipping(getattr(nn.utils.clip_grad, name))

    def _clipping(self, clip: Any) -> Any:
        named = inspect.signature(clip)

        def clipped(*args: Any, **kwargs: Any) -> Any:
            given = named.bind(*args, **kwargs).arguments
            self.places.note("clip")
            limit = float(given.get("max_norm", given.get("clip_value", 0.0)))
            self._clip = limit if math.isfinite(limit) else None  # without a limit it is a norm that is looked at
            self._updating()
            given["parameters"] = self.change.now(given["parameters"])
            return clip(**given)

        return clipped

    # ------------------------------------------------------------------ programs

    def _begin(self, name: str, phase: str) -> None:
        self._end()
        self._name, self._program = name, self.recorder.program(name)
        self._program.__enter__()
        self.recorder.phase(phase)

    def _end(self) -> None:
        if self._program is not None:
            self._program.__exit__(None, None, None)
        self._program, self._name = None, ""

    def _called(self, module: nn.Module, args: Any) -> None:
        """Before every call of a module: the outermost one that learns begins a micro-batch, unless one is under way."""
        if self.done:
            raise StepDone
        if self.recorder._stack:
            return
        if self.second.begun and self.second.late():
            self.once("the way to it takes long")
            raise StepDone
        if not self._learns(module):
            if self.second.begun and self._micros == 0 and self.second.without_gradients(module):
                self.world.notes.append(f"{asker()}: what is computed between steps without gradients is not counted")
            return
        if self.found is not None and not self._ran and not self.stepped and self._micros == 1 and self._idle(module):
            self._forget()
        if self.found is None:
            self._find(module, args)
            self._given = sizes(args)
            self._tentative = not module.training
        if self._rounds:
            if not self._name:
                self._begin(_ROUNDS[0], "forward")
        elif self._micros == 0 or self._ran:
            self._micros, self._ran = self._micros + 1, False
            if self.change.autocast:
                self._casts.enter_context(torch.autocast(self.world.device, getattr(torch, self.change.autocast)))
            if self.second.begun and self._micros == 1:
                assert self.found is not None
                self.second.forward(self.found.model)
                self.recorder.phase("forward")
            elif self._micros <= len(_MICRO):
                self._begin((AGAIN, AGAIN_NEXT)[self._micros - 1] if self.second.begun else _MICRO[self._micros - 1], "forward")
            else:
                self._end()  # as the one before

    def _learns(self, module: nn.Module) -> bool:
        """Whether a call of a module may be followed by backward; one in evaluation mode only where the first to be was."""
        if not torch.is_grad_enabled() or not any(one.requires_grad for one in module.parameters()):
            return False
        return module.training or self.found is None or self._tentative

    def _idle(self, module: nn.Module) -> bool:
        """Whether what was called before cannot be what is trained: it was in evaluation mode, or nothing of it is left (a look at
        shapes, a weight that is computed while the model is built)."""
        if self._tentative and module.training:
            return True
        rows, living = self.recorder.programs.get(self._name, []), self.recorder.living()
        made: set[int] = set()
        for place, row in enumerate(rows):
            if place < self._left or any(ref.storage in made for ref in row.inputs):
                made.update(row.allocates)
        return living.isdisjoint(made)

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        if len(self.recorder._stack) == 1 and self.recorder._rows is not None:
            self._left = len(self.recorder._rows)
            self.second.returned()

    def _forget(self) -> None:
        """Nothing was recorded yet: the micro-batch begins with the call that comes now."""
        self._end()
        self.recorder.programs.clear()
        self.found, self._micros, self._tentative = None, 0, False

    def _find(self, module: nn.Module, args: Any) -> None:
        """The script's modules, and what is on the device before its first forward."""
        model = whole(module)
        self._note_model(model, module)
        self.places.note_loader(*self.world.loader)
        self.change.apply(model, module, self.world.precision(module), self.recorder)
        inputs = self.world.on_device(model, self.recorder.placed)
        self.micro_batch = self.world.rows or rows_of(args) or rows_of(inputs) or 1
        self.found = FollowedStep(model, Workload(model, inputs), Recipe(precision="fp32"))
        self._resident = list(dict.fromkeys(self.recorder.storage_id(one) for one in (*in_move_order(model), *inputs)))
        there = [one for one in gc.get_objects() if type(one) is FakeTensor and one.layout is torch.strided]
        self._before = {self.recorder.storage_id(one) for one in there}
        self._follow_modules(model, module)
        several = optimizers()
        self._rounds = dict.fromkeys(several, 0) if len(several) > 1 else {}

    def _note_model(self, model: nn.Module, module: nn.Module) -> None:
        """Names and shapes, as the script has them."""
        self.shapes = {name: ([*one.shape], str(one.dtype).removeprefix("torch.")) for name, one in model.named_parameters()}
        self.tied = tied_names(model)
        inner = module
        while not (expression := self.places.expression(inner)) and len(children := list(inner.children())) == 1:
            inner = children[0]  # a wrapper's name is one of its own
        path = next((path for path, one in model.named_modules() if one is inner), "")
        outer = [name for name, _ in model.named_children()] if type(model) is nn.Module else []
        self.named = {"expression": expression, "path": path, "outer": outer, "called": type(module).__name__}

    def _follow_modules(self, model: nn.Module, first: nn.Module) -> None:
        """From the call on that is about to begin; its modules may have other names than those of a call before."""
        if self._follows:
            for path, one in model.named_modules():
                self.recorder._paths[id(one)] = path
            for path, parameter in model.named_parameters(remove_duplicate=False):
                self.recorder._parameter_paths[id(parameter)] = path.rpartition(".")[0]
            return
        self._follows = True
        self._stack.enter_context(real_masks(self.recorder))  # only now: libraries that it looks at are imported
        self._stack.enter_context(self.recorder.modules(model))
        self.recorder._enter(first, None)

    def _ran_backward(self) -> None:
        if self.found is None or self.done:
            return
        self._ran = True
        if self.second.begun:
            self.second.backward(self.found.model)
            return
        self.world.ranks.ran_backward(self._micros)
        if self.roles is None:
            self.roles = Roles(self.recorder, self.found, self._resident)  # type: ignore[arg-type]
            self.found.workload = Workload(self.found.model, shapes_of(self.found.workload.batch))
        if self._micros < 2:  # later ones add to what is there
            self.roles.note_gradients(self.found)  # type: ignore[arg-type]

    def _updating(self) -> None:
        """What follows belongs to the update: gradients are looked at, or the optimizer steps."""
        if self.found is None or self.done or self.roles is None:
            return
        if not self.second.begun:
            self.roles.note_gradients(self.found)  # type: ignore[arg-type]
        if self._rounds:
            self.recorder.phase("update")
        elif self._name not in (_UPDATE, UPDATE_AGAIN) and not (self.second.begun and self._micros == 0):
            self._begin(UPDATE_AGAIN if self.second.begun else _UPDATE, "update")

    def _stepping(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self.done:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self._closed = closure is not None
        self.places.note("step")
        if closure is not None:
            return (optimizer, self._within(closure), *args[2:]), {key: value for key, value in kwargs.items() if key != "closure"}
        self._updating()
        self._note_step()
        return None

    def _note_step(self) -> None:
        """What the update did before the step itself, it does again before later ones."""
        if not self.second.begun:
            self._before_step = len(self.recorder.programs.get(_UPDATE, ()))

    def _within(self, closure: Any) -> Any:
        """Forward and backward inside of `step`: the update begins when they are over."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with torch.enable_grad():
                made = closure(*args, **kwargs)
            self._updating()
            self._note_step()
            return made

        return run

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        found = self.found
        if found is None or self.done or self.roles is None:
            return
        if self.second.begun:
            self._stepped_again()
            return
        found.optimizer = optimizer
        self.world.ranks.stepped = self.world.ranks.stepped or asker()
        self._trained += [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
        if type(optimizer).__name__.lower() not in KNOWN:
            self.world.notes.append(f"the optimizer is the script's own, {type(optimizer).__name__}; where a name must stand for it, adamw does")
        found.recipe = Recipe(
            precision=self.world.precision(found.model), accumulate=1 if self._rounds else self._micros, clip=self._clip or None,
            optimizer=name_of(optimizer),
        )  # fmt: skip
        self.roles.note_optimizer(found)  # type: ignore[arg-type]
        if self._rounds:
            self._took_turn(optimizer)
            return
        self.stepped = self.done = True  # hooks have nothing to do with this one
        self._begin("update", "update")
        if self._closed:  # it would need the forward
            self.recorder.programs["update"] += self.recorder.programs[_UPDATE][self._before_step :]
        else:
            optimizer.step()
        self._end()
        self.done = False
        self._note_history(optimizer)
        self.second.begin(found.model)
        self.recorder.programs["zero_grad"] = [self.second.zero_grad()]
        self._micros, self._ran = 0, False
        self._begin(AGAIN, BETWEEN)

    def _note_history(self, optimizer: Optimizer) -> None:
        """L-BFGS keeps pairs of vectors up to so many: those that are not there yet will be."""
        pairs = getattr(optimizer, "param_groups", [{}])[0].get("history_size")
        if not isinstance(pairs, int):
            return
        assert self.roles is not None
        each = sum(one.numel() * one.element_size() for one in self._trained)
        there = max((len(state.get("old_dirs") or ()) for state in optimizer.state.values()), default=0)
        number = len(self.recorder.sizes)
        self.recorder.sizes[number], self.recorder.born_in[number] = 2 * max(0, pairs - there) * each, None
        self.roles.roles[number], self.roles.owners[number] = types.OPTIMIZER, ""
        self.roles.resident.append(number)
        self.world.notes.append(f"{type(optimizer).__name__} is counted with all {pairs} pairs of its history")

    def _stepped_again(self) -> None:
        if self._micros == 0:  # nothing was learned since: another part of the first step
            return
        self._end()
        self.recorder._last = None  # what the script lets go of from now on, it does because it is stopped
        self.second.done = self.done = True
        if not self.world.scales:
            raise StepDone

    def once(self, why: str) -> None:
        """The script takes one step only, or no second one that can be followed."""
        if self.stepped and not self.done and not self._rounds:
            self.world.notes.append(f"only the first step was followed ({why}): gradients are taken to be freed at its end")

    def _took_turn(self, optimizer: Optimizer) -> None:
        """A round is over when every optimizer has stepped; the second one is recorded with states that are there."""
        self.recorder.phase("forward")
        key = parameters_of(optimizer)
        self._rounds[key] = self._rounds.get(key, 0) + 1
        if min(self._rounds.values()) == 1 and self._name == _ROUNDS[0]:
            self._begin(_ROUNDS[1], "forward")
        elif min(self._rounds.values()) >= 2:
            self.done = True
            self._end()
            raise StepDone

    # ------------------------------------------------------------------ afterwards

    def _update_whole(self) -> None:
        """A later update clips and unscales as the first one did, and steps with states that are there."""
        programs = self.recorder.programs
        if self._rounds:
            return
        programs["update"] = programs[_UPDATE][: self._before_step] + programs["update"][1:]

    def _seen_first(self) -> None:
        """What the step reads and did not make was there before: a batch that was never moved, a table of its own.

        The batch of a later micro-batch takes the place of the first one's; what was there when the first step began has its own.
        """
        assert self.roles is not None
        known = set(self.roles.resident)
        moved: dict[int, int] = {}
        batch = [one for one in self.roles.resident if self.roles.roles.get(one) == types.INPUT]
        for name, rows in self.recorder.programs.items():
            taken: set[int] = set()
            for row in rows:
                for ref in row.inputs:
                    if self.recorder.born_in[ref.storage] is not None or ref.storage in known or ref.storage in moved:
                        continue
                    size = self.recorder.sizes[ref.storage]
                    place = next((one for one in batch if self.recorder.sizes[one] == size and one not in taken), None)
                    later = name in (_MICRO[1], AGAIN, AGAIN_NEXT) and ref.storage not in self._before
                    if later and place is not None:
                        moved[ref.storage] = place
                        taken.add(place)
                    else:
                        known.add(ref.storage)
                        batch.append(ref.storage)
                        self.roles.resident.append(ref.storage)
                        self.roles.roles.setdefault(ref.storage, types.INPUT)
                row.inputs = tuple(ref._replace(storage=moved.get(ref.storage, ref.storage)) for ref in row.inputs)
                row.outputs = tuple(ref._replace(storage=moved.get(ref.storage, ref.storage)) for ref in row.outputs)
                row.frees = [number for number in row.frees if number not in moved]
        stays = set(moved.values())
        for row in (row for rows in self.recorder.programs.values() for row in rows if not stays.isdisjoint(row.frees)):
            row.frees = [number for number in row.frees if number not in stays]
