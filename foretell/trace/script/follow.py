"""Where in a step a script is, told by its own calls; what it does from its first forward to the end of its first step, recorded.

    a module that learns is called    a micro-batch begins                        micro_first, then micro_next
    backward                          its second half, or several: a new micro-batch begins with the next forward after one
    clip_grad_norm_, unscale_, step   the update begins                           update_first
    the end of step                   the optimizer steps once more, with states  update, zero_grad; then the script is stopped

With several optimizers that take turns (GANs) all of a round is one program.
"""

from __future__ import annotations

import gc
import itertools
import runpy
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from foretell.errors import ForetellError, ModelError
from foretell.trace import types
from foretell.trace.capture import _finish, _in_move_order, _Roles, any_code, no_initialisation, seeded
from foretell.trace.collection import no_collection
from foretell.trace.cpu import cpu_choices
from foretell.trace.cuda import cuda_choices, real_masks
from foretell.trace.devices import replaced
from foretell.trace.formulas import plain_formulas
from foretell.trace.load import is_users, model_error
from foretell.trace.recipe import Recipe
from foretell.trace.recorder import Recorder
from foretell.trace.script.words import Script
from foretell.trace.script.world import World, as_on_a_device, asker, sizes
from foretell.trace.step import Workload, apply_recompute

_MICRO = ("micro_first", "micro_next")
_UPDATE = "update_first"
_KNOWN = ("sgd", "adam", "adamw")
"""Optimizers that a recipe has a name for."""
_ROUNDS = ("micro_first", "round")
"""Programs of steps in which several optimizers take turns."""
_TORCH = str(Path(torch.__file__).parent)


class Done(BaseException):
    """The step is over: the script need not go on."""


@dataclass
class Found:
    """What the script turned out to do; in the place of a `Step`."""

    model: nn.Module
    workload: Workload
    recipe: Recipe
    optimizer: Optimizer | None = None
    backwards: int = 1


CHANGES = ("recompute", "autocast", "batch")
"""What may be done to a script on the way: recompute `full` or `selective`; autocast in `bfloat16` from forward to backward; of loaders
with the first batch size, the second."""


def capture_script(
    script: Script, *, capability: tuple[int, int] | None, hints: Mapping[str, float] | None = None, change: Mapping[str, Any] | None = None
) -> tuple[types.Trace, list[str]]:
    """One step of the script, as a device of this compute capability runs it, or without one this CPU; and what a reader should know."""
    recorder, release = Recorder(hints), torch.__version__
    recorder.patient = False
    choices = cuda_choices(recorder, capability, release) if capability else cpu_choices(recorder)
    sees = not_torchs if capability else _nobody
    with (
        no_collection(), seeded(), recorder, plain_formulas(), choices, any_code(recorder, capability, sees),
        as_on_a_device(script, recorder, "cuda" if capability else "cpu", (change or {}).get("batch")) as world, no_initialisation(),
    ):  # fmt: skip
        follower = Follower(recorder, world, change or {})
        with follower.following():
            _run(script, follower)
    trace = follower.trace(script, capability, release)
    return replace(trace, meta={**trace.meta, "options": [list(one) for one in world.options]} if world.options else trace.meta), world.notes


def _run(script: Script, follower: Follower) -> None:
    before, folder = list(sys.argv), str(Path(script.file).resolve().parent) if script.file else str(Path.cwd())
    sys.argv, sys.path[:0] = [script.name, *script.arguments], [folder]
    try:
        if script.file:
            runpy.run_path(script.file, run_name="__main__")
        else:
            runpy.run_module(script.module, run_name="__main__", alter_sys=True)
    except Done:
        pass
    except SystemExit as error:
        if not follower.done:
            raise _left(script, error) from error
    except ForetellError:
        raise
    except Exception as error:
        if not follower.done:
            raise model_error(script.name, error, "following") from error
    finally:
        sys.argv = before
        sys.path.remove(folder)


def _left(script: Script, error: SystemExit) -> ModelError:
    """A script that left by itself: argparse's complaints are on its own stderr."""
    told = f"exit({error.code!r})" if error.code not in (None, 0) else "exit"
    return ModelError(f"{script.name} left with {told} before its first step", "start it as it is to see what it says", str(error.__context__ or ""))


class Follower:
    """Knows from the script's own calls where in a step it is."""

    def __init__(self, recorder: Recorder, world: World, change: Mapping[str, Any]) -> None:
        self.recorder, self.world, self.change = recorder, world, change
        self.found: Found | None = None
        self.roles: _Roles | None = None
        self.done = False
        self._micros, self._name = 0, ""
        self._given: list[list[Any]] = []
        self._ran = False
        """Whether backward ran since the micro-batch began."""
        self._clip: float | None = None
        self._program: AbstractContextManager[None] | None = None
        self._stack = ExitStack()
        self._casts = ExitStack()
        """Autocast that the script does not do by itself: from forward to backward."""
        self._before_step = 0
        self._rounds: dict[int, int] = {}
        """Optimizer → steps it has taken, where several take turns."""

    @contextmanager
    def following(self) -> Iterator[None]:
        hooks = [
            nn.modules.module.register_module_forward_pre_hook(self._called),
            register_optimizer_step_pre_hook(self._stepping), register_optimizer_step_post_hook(self._stepped),
        ]  # fmt: skip
        try:
            with self._stack, self._casts, replaced(self._watched()):
                yield
        finally:
            self._end()
            for hook in hooks:
                hook.remove()

    def trace(self, script: Script, capability: tuple[int, int] | None, release: str) -> types.Trace:
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
        self._seen_first()
        trace = _finish(self.recorder, found, roles, capability, release)  # type: ignore[arg-type]
        if not any(len(one) > 1 for one in trace.meta["batch"]):  # type: ignore[attr-defined]
            trace = replace(trace, meta={**trace.meta, "batch": self.world.row or self._given})  # nothing was moved
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

        def unscaled(scaling: Any, optimizer: Any) -> Any:
            self._updating()
            return unscale(scaling, optimizer)

        def update(scaling: Any, *args: Any, **kwargs: Any) -> Any:
            made = updated(scaling, *args, **kwargs)
            if self.done:
                raise Done
            return made

        zero = Optimizer.zero_grad

        def zeroed(optimizer: Any, set_to_none: bool = True) -> None:
            if not set_to_none:
                raise ModelError(f"{asker()}: zero_grad(set_to_none=False) keeps gradients between steps: not followed yet", "leave that out")
            zero(optimizer, set_to_none)

        yield Optimizer, "zero_grad", zeroed
        yield torch.autograd, "backward", back
        yield scaler, "unscale_", unscaled
        yield scaler, "update", update
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            for owner in (nn.utils, nn.utils.clip_grad):
                yield owner, name, self._clipping(getattr(nn.utils.clip_grad, name))

    def _clipping(self, clip: Any) -> Any:
        def clipped(parameters: Any, limit: Any, *args: Any, **kwargs: Any) -> Any:
            self._clip = float(limit)
            self._updating()
            return clip(parameters, limit, *args, **kwargs)

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

    def _called(self, module: nn.Module, given: Any) -> None:
        """Before every call of a module: the outermost one that learns begins a micro-batch, unless one is under way."""
        if self.done:
            raise Done
        if self.recorder._stack or not torch.is_grad_enabled():
            return
        if not module.training or not any(one.requires_grad for one in module.parameters()):
            return
        if self.found is None:
            self._find(module)
            self._given = sizes(given)
        if self._rounds:
            if not self._name:
                self._begin(_ROUNDS[0], "forward")
        elif self._micros == 0 or self._ran:
            self._micros, self._ran = self._micros + 1, False
            if "autocast" in self.change:
                self._casts.enter_context(torch.autocast(self.world.device, getattr(torch, self.change["autocast"])))
            if self._micros <= len(_MICRO):
                self._begin(_MICRO[self._micros - 1], "forward")
            else:
                self._end()  # as the one before

    def _find(self, module: nn.Module) -> None:
        """The script's modules, and what is on the device before its first forward."""
        model = whole(module)
        inputs = self.world.on_device(model, self.recorder.placed)
        self.found = Found(model, Workload(model, inputs), Recipe(precision="fp32"))
        if "recompute" in self.change:
            apply_recompute(model, self.change["recompute"], self.recorder)
        self._resident = list(dict.fromkeys(self.recorder.storage_id(one) for one in (*_in_move_order(model), *inputs)))
        self._stack.enter_context(real_masks(self.recorder))  # only now: libraries that it looks at are imported
        self._stack.enter_context(self.recorder.modules(model))
        self.recorder._enter(module, None)
        several = optimizers()
        self._rounds = dict.fromkeys(several, 0) if len(several) > 1 else {}

    def _ran_backward(self) -> None:
        if self.found is None or self.done:
            return
        self._ran = True
        if self.roles is None:
            self.roles = _Roles(self.recorder, self.found, self._resident)  # type: ignore[arg-type]
        if self._micros < 2:  # later ones add to what is there
            self.roles.note_gradients(self.found)  # type: ignore[arg-type]

    def _updating(self) -> None:
        """What follows belongs to the update: gradients are looked at, or the optimizer steps."""
        if self.found is None or self.done or self.roles is None:
            return
        if self._rounds:
            self.recorder.phase("update")
        elif self._name != _UPDATE:
            self._begin(_UPDATE, "update")

    def _stepping(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self.done:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:
            return (optimizer, self._within(closure), *args[2:]), {key: value for key, value in kwargs.items() if key != "closure"}
        self._updating()
        self._before_step = len(self.recorder.programs.get(_UPDATE, ()))
        return None

    def _within(self, closure: Any) -> Any:
        """Forward and backward inside of `step`: the update begins when they are over."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with torch.enable_grad():
                made = closure(*args, **kwargs)
            self._updating()
            self._before_step = len(self.recorder.programs.get(_UPDATE, ()))
            return made

        return run

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        found = self.found
        if found is None or self.done or self.roles is None:
            return
        found.optimizer = optimizer
        if type(optimizer).__name__.lower() not in _KNOWN:
            self.world.notes.append(f"the optimizer is the script's own, {type(optimizer).__name__}; where a name must stand for it, adamw does")
        found.recipe = Recipe(
            precision=self.world.precision(found.model), accumulate=1 if self._rounds else self._micros, clip=self._clip or None,
            optimizer=name_of(optimizer),
        )  # fmt: skip
        self.roles.note_optimizer(found)  # type: ignore[arg-type]
        if self._rounds:
            self._took_turn(optimizer)
            return
        self.done = True
        self._begin("update", "update")
        optimizer.step()
        self._begin("zero_grad", "update")
        optimizer.zero_grad()
        self._end()
        if not self.world.scales:
            raise Done

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
            raise Done

    # ------------------------------------------------------------------ afterwards

    def _update_whole(self) -> None:
        """A later update clips and unscales as the first one did, and steps with states that are there."""
        programs = self.recorder.programs
        if self._rounds:
            return
        programs["update"] = programs[_UPDATE][: self._before_step] + programs["update"][1:]

    def _seen_first(self) -> None:
        """What the step reads and did not make was there before: a batch that was never moved, a table of its own.

        The batch of the second micro-batch takes the place of the first one's.
        """
        assert self.roles is not None
        known = set(self.roles.resident)
        moved: dict[int, int] = {}
        batch = [one for one in self.roles.resident if self.roles.roles.get(one) == types.INPUT]
        for name, rows in self.recorder.programs.items():
            for row in rows:
                for ref in row.inputs:
                    if self.recorder.born_in[ref.storage] is not None or ref.storage in known or ref.storage in moved:
                        continue
                    size = self.recorder.sizes[ref.storage]
                    place = next((one for one in batch if self.recorder.sizes[one] == size and one not in moved.values()), None)
                    if name == _MICRO[1] and place is not None:
                        moved[ref.storage] = place
                    else:
                        known.add(ref.storage)
                        batch.append(ref.storage)
                        self.roles.resident.append(ref.storage)
                        self.roles.roles.setdefault(ref.storage, types.INPUT)
                row.inputs = tuple(ref._replace(storage=moved.get(ref.storage, ref.storage)) for ref in row.inputs)
                row.outputs = tuple(ref._replace(storage=moved.get(ref.storage, ref.storage)) for ref in row.outputs)
                row.frees = [number for number in row.frees if number not in moved]


def optimizers() -> dict[int, Optimizer]:
    """Those that are alive, by what they train: a wrapper has the parameters of what it wraps."""
    alive = [one for one in gc.get_objects() if issubclass(type(one), Optimizer)]
    return {parameters_of(one): one for one in alive}


def parameters_of(optimizer: Optimizer) -> int:
    return hash(frozenset(id(one) for group in optimizer.param_groups for one in group["params"]))


def _nobody(file: str) -> bool:
    """Code on a CPU sees this machine's devices, whatever they are."""
    return False


def not_torchs(file: str) -> bool:
    """Whether code of a file is told of the device: all but PyTorch's own, which would reach for it."""
    return not file.startswith(_TORCH)


def whole(module: nn.Module) -> nn.Module:
    """The outermost modules that are alive and have weights: one, or all of them under the names that the script has for them."""
    alive = [one for one in gc.get_objects() if issubclass(type(one), nn.Module) and _is_fake(one)]
    inside = {id(child) for one in alive for child in one.children()}
    outer = [one for one in alive if id(one) not in inside]
    if len(outer) <= 1:
        return outer[0] if outer else module
    names = _names()
    holder = nn.Module()
    for number, one in enumerate(outer):
        name = names.get(id(one), f"{type(one).__name__.lower()}{number or ''}")
        holder.add_module(name if not hasattr(holder, name) else f"{name}_{number}", one)
    return holder


def _is_fake(module: nn.Module) -> bool:
    """Whether a module has tensors, and has them here: what libraries made when they were imported is real."""
    first = next(itertools.chain(module.parameters(), module.buffers()), None)
    return isinstance(first, FakeTensor)


def _names() -> dict[int, str]:
    """Variables of the script's frames, the outermost first."""
    found: dict[int, str] = {}
    frame: Any = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            found |= {id(value): name for name, value in frame.f_locals.items() if isinstance(value, nn.Module) and name != "self"}
        frame = frame.f_back
    return found


def name_of(optimizer: Optimizer) -> str:
    """The recipe's name for an optimizer, or for the one of its kind: what it does is in the trace anyway."""
    kind, group = type(optimizer).__name__.lower(), optimizer.param_groups[0]
    if kind == "sgd" and group.get("momentum"):
        kind = "momentum"
    if kind not in (*_KNOWN, "momentum"):
        kind = "adamw"
    return kind + ("-fused" if group.get("fused") and kind != "sgd" else "")
