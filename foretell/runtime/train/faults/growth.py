"""A model that changes while it trains: parameters come or go, or others are frozen. No plan and no optimizer knows of that.

    a parameter is registered, or frozen ─► after the step: which ─┬─ --replan: `grown(model)` says which settings build such a model;
                                                                   │  it is saved, traced and planned again, and ranks go on with it
                                                                   └─ else it is saved, and the run ends and says what would train on
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules import module as hooks

from foretell.errors import UserError
from foretell.plan.types import Plan
from foretell.runtime.process import launch
from foretell.runtime.train.numbers.guard import RunFailed
from foretell.trace.load import userfile
from foretell.zoo import ENTRIES
from foretell.zoo import load as load_entry

if TYPE_CHECKING:
    from foretell.runtime.parallel.apply import Job
    from foretell.runtime.train.loop import TrainingRun

SIGNAL = "SIGUSR1"
"""Ranks whose launcher plans again leave as though it had asked them to."""
FUNCTION = "grown"
SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class ModelChange:
    """What is different since the run began."""

    new: Mapping[str, tuple[int, ...]]
    gone: tuple[str, ...]
    frozen: tuple[str, ...]
    thawed: tuple[str, ...]

    @property
    def words(self) -> str:
        shapes = {name: f"{name} ({' × '.join(map(str, shape))})" for name, shape in self.new.items()}
        kinds = (("new", list(shapes.values())), ("gone", self.gone), ("frozen", self.frozen), ("no longer frozen", self.thawed))
        return "; ".join(f"{len(names)} {what}: {', '.join(names[:SHOWN])}{', …' if names[SHOWN:] else ''}" for what, names in kinds if names)


class GrowthWatch:
    """Of one job. Registering a parameter calls a hook of PyTorch's; whether parameters are frozen is looked at after every step."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.found: ModelChange | None = None
        self.shapes = {name: tuple(p.shape) for name, p in job.named_parameters()}
        self.trained = {name: p.requires_grad for name, p in job.named_parameters()}
        self._parameters, self._flags = [p for _, p in job.named_parameters()], list(self.trained.values())
        touched: list[bool] = []
        self._touched = touched
        for register in (hooks.register_module_parameter_registration_hook, hooks.register_module_module_registration_hook):
            # it holds nothing of the run: whose steps fail lets go of its process groups, or the other ranks would wait for it
            weakref.finalize(self, register(lambda *_: touched.append(True)).remove)

    @property
    def touched(self) -> bool:
        """Whether anything was registered, in this model or another, since it was looked at."""
        return bool(self._touched)

    def changed(self) -> bool:
        """Whether the model is another than it was when the run began."""
        if self.found is None and (self.touched or (flags := [p.requires_grad for p in self._parameters]) != self._flags):
            self._flags = self._flags if self.touched else flags  # models that take turns freeze in every other step: looked at once each
            self._touched.clear()
            self.found = self._compared()
        return self.found is not None

    def _compared(self) -> ModelChange | None:
        now = {name: (tuple(p.shape), p.requires_grad) for name, p in self.job.named_parameters()}
        new = {name: shape for name, (shape, _) in now.items() if self.shapes.get(name) != shape}
        turned = [name for name, (_, trained) in now.items() if name not in new and self.trained[name] != trained]
        gone = tuple(name for name in self.shapes if name not in now)
        # what the optimizer has may rest for a while, and a plan without it is only smaller; what it has not would never be trained
        frozen = tuple(name for name in turned if self.trained[name]) if os.environ.get(launch.REPLANS) else ()
        thawed = tuple(name for name in turned if not self.trained[name])
        return ModelChange(new=new, gone=gone, frozen=frozen, thawed=thawed) if new or gone or frozen or thawed else None


def settings_of(plan: Plan, model: nn.Module) -> dict[str, Any]:
    """What `grown(model)` beside the model's builder says: the settings that build a model like this one."""
    name = str(plan.model["model"])
    path = name.partition(":")[0]
    if path.endswith(".py"):
        function, owner = userfile.function(path, FUNCTION), f"{path}:{FUNCTION}"
    else:
        entry, owner = ENTRIES.get(name), f"{name}: {FUNCTION}"
        function = getattr(load_entry(entry), FUNCTION, None) if entry is not None else None
    if function is None:
        where = f"in {path}" if path.endswith(".py") else "in a FILE.py that builds it"
        remedy = f"define {FUNCTION}(model) {where}, which returns them, e.g. {{'layers': 5}}"
        raise UserError("nothing says which settings build it as it is now", remedy)
    said = userfile.call(function, {"model": model}, owner)
    try:
        if not isinstance(said, dict) or json.loads(json.dumps(said)) != said:
            raise ValueError
    except (TypeError, ValueError):
        raise UserError(f"{owner} returned {str(said)[:60]!a}", "return a dictionary of settings, as --set takes them") from None
    return said


def told(run: TrainingRun) -> str:
    """The model of some rank has changed and all have saved: which signal they leave by. Where nobody plans it again the run fails."""
    found = run.growth.found if run.growth is not None else None
    words, settings, why = found.words if found is not None else "", None, ""
    if found is not None:
        try:
            settings = _settled(run)
        except UserError as error:
            why = str(error)
    heard = run.control.gather([words, settings, why])
    if not any(said for said, _, _ in heard):
        return ""
    words = next(said for said, _, _ in heard if said)
    why = next(filter(None, (reason for _, _, reason in heard)), "")
    if not why and any(one != heard[0][1] for _, one, _ in heard):
        why = "ranks have changed differently"
    if why or not os.environ.get(launch.REPLANS):
        saved = f"the checkpoint of step {run.step} has all of it" if not run.settings.no_save else "nothing was saved"
        remedy = "; ".join(filter(None, [why, saved, _remedy(heard[0][1])]))
        raise RunFailed(f"the model has changed by step {run.step}, and the plan and the optimizer are of what it was ({words})", remedy)
    if run.step >= run.settings.steps:
        if run.ranks.is_first:
            run.screen.say(f"the model changed in the last steps ({words}): what is new was not trained")
        return ""
    if run.ranks.is_first:
        launch.tell_launcher({launch.GROWN: {"settings": heard[0][1], "words": words}})
    return SIGNAL


def _settled(run: TrainingRun) -> dict[str, Any]:
    plan, job = run.plan, run.job
    barred = {"a pipeline's stages": plan.mesh.pp > 1, "adapters": plan.adapters is not None, "replicas that step alone": plan.sync is not None,
              "states that are offloaded": job.moved is not None, "--exact": run.settings.exact}  # fmt: skip
    if run.settings.no_save:
        raise UserError("--no-save has no checkpoint to go on from", "leave it out")
    if (name := next((name for name, is_so in barred.items() if is_so), None)) is not None:
        raise UserError(f"a model that changes is not planned again with {name}", "plan without")
    return settings_of(plan, job.parts[0])


def _remedy(settings: Mapping[str, Any] | None) -> str:
    words = " ".join(f"--set {name}={value}" for name, value in settings.items()) if settings else "the settings it has now"
    return f"--replan goes on by itself; or plan it again with {words}, and start with --init-from the run folder"

