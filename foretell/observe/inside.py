"""Watch a loop from inside: `with foretell.watch(model, optimizer): ...`, and callbacks for Lightning and transformers' Trainer.

    enter ─► hooks of the process ─► readings ─► lines on stderr, a run folder
    first step over ─► the model with its first batch, traced on fake tensors ─► what was predicted

The same hooks as in a watched script; nothing is followed, so what is predicted is the model's step: forward, the loss, backward,
the update. Where that cannot be traced, the line says so and everything is measured only.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foretell.errors import ForetellError
from foretell.hardware import parse
from foretell.observe import out_of_memory
from foretell.observe.record import Record
from foretell.observe.tell import Teller
from foretell.runtime.observe import hooks, process_state
from foretell.search.traces import followed
from foretell.search.traces.followed import Followed
from foretell.trace.load.module import batch_size, capture_module
from foretell.trace.recipe import Recipe
from foretell.trace.script.made import name_of
from foretell.trace.store.cache import versions

Say = Callable[[str], None]


def say_on_stderr(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"foretell: {line}\n")
        sys.stderr.flush()


class Watching:
    """A context; `begin` and `end` are the same for callbacks."""

    def __init__(
        self, model: nn.Module, optimizer: Any = None, *, loss: Any = None, on: str = "auto", out: str | Path | None = None,
        predict: bool = True, say: Say = say_on_stderr,
    ) -> None:  # fmt: skip
        """`loss` is that of (output, batch), where the model does not return one: without it nothing is predicted."""
        if not isinstance(model, nn.Module):
            from foretell.errors import UserError

            raise UserError(f"watch was given a {type(model).__name__}", "foretell.watch(model, optimizer)")
        self.model, self.optimizer, self.loss, self.on, self.say = model, optimizer, loss, on, say
        name = type(model).__name__
        path = Path(out) if out is not None else Path("runs") / f"{name.lower()}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.teller = Teller(name, on, Record(path, " ".join(sys.orig_argv), versions()), say)
        self._predict = predict
        self._batch: Any = None
        self._autocast: torch.dtype | None = None
        self._busy = False
        self._hook: Any = None
        self._watch = hooks.StepHooks(self._hear)

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.teller.record.path

    def __enter__(self) -> Watching:
        return self.begin()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.end(error)

    def begin(self) -> Watching:
        self._owner = os.getpid()
        if not self._predict:
            self.teller.found.done.set()
        self._hook = self.model.register_forward_pre_hook(self._called, with_kwargs=True)
        self._watch.install()
        if self.optimizer is not None:
            self._watch._base(self.optimizer)
        self.teller._write_plan()
        return self

    def end(self, error: BaseException | None = None) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._watch.error = error
        self._watch.end()
        self._watch.remove()
        if error is not None and process_state.is_out_of_memory(error):
            self._explain(error)
        self.teller.found.done.set()
        self.teller.end()

    def gave(self, batch: Any, model: nn.Module | None = None, loss: Any = None) -> None:
        """The first batch, where a callback has it: instead of what the model was called with."""
        if self._batch is None:
            self._batch, self.model, self.loss = _sizes(batch), model or self.model, loss or self.loss
            self._seen_autocast()
            self._hook.remove()

    def precision(self, name: str) -> None:
        """As a trainer calls it, such as bf16-mixed: autocast that is only on inside of it."""
        if "bf16" in name or "16" in name:
            self._autocast = torch.bfloat16 if "bf16" in name else torch.float16

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before the first forward; compiled models are left alone from then on."""
        if torch.compiler.is_compiling() or self._busy:
            return
        if self._batch is None:
            self._batch = _sizes(kwargs if kwargs and not args else args)
            self._kwargs = bool(args and kwargs)
        self._seen_autocast()
        self._hook.remove()

    def _seen_autocast(self) -> None:
        for kind in ("cuda", "cpu"):
            if torch.is_autocast_enabled(kind):
                self._autocast = torch.get_autocast_dtype(kind)

    def _hear(self, message: dict[str, Any]) -> None:
        if self._busy or os.getpid() != self._owner:
            return
        self.teller.readings.hear(message)
        if message["kind"] == "steps" and message["step"] >= 2 and not self.teller.found.done.is_set():
            self._trace()
        self.teller.look()

    # ------------------------------------------------------------------ predicting

    def _trace(self) -> None:
        """Trace the model's step on fake tensors; the hooks see nothing of it."""
        found, self._busy = self.teller.found, True
        self._watch.off = True
        try:
            found.cluster = followed_cluster(self.on)
            recipe = self._recipe()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                capability = followed.capability_of(found.cluster)
                trace = capture_module(self.model, self._batch, self.loss, replace(recipe, accumulate=1), capability=capability, hints=None)
            found.followed = Followed(name=self.teller.name, trace=trace, recipe=recipe, micro_batch=batch_size(self._batch))
            found.cost = followed.cost(found.followed, found.cluster, self.on)
        except ForetellError as error:
            found.why_not = " ".join(str(error).split())
            if self.loss is None and "scalar" in found.why_not:
                found.why_not = f"{type(self.model).__name__} returns no loss; give foretell.watch(model, optimizer, loss=...) one of (output, batch)"
        except Exception as error:  # a prediction is never worth the run
            found.why_not = f"tracing {type(self.model).__name__} failed ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        finally:
            found.done.set()
            self._watch.off = self._busy = False
            self._watch.pause()
            self.teller.readings.pause()

    def _recipe(self) -> Recipe:
        optimizer, dtypes = self.optimizer, {one.dtype for one in self.model.parameters() if one.requires_grad}
        precision = {torch.bfloat16: "bf16-autocast", torch.float16: "fp16-autocast"}.get(self._autocast, "fp32")
        precision = "bf16" if dtypes == {torch.bfloat16} and precision == "fp32" else precision
        name = name_of(optimizer) if optimizer is not None else name_of(self._watch.seen) if self._watch.seen is not None else "adamw"
        return Recipe(optimizer=name, precision=precision, accumulate=self.teller.readings.micro_batches)

    def _explain(self, error: BaseException) -> None:
        """What held the bytes; what would have fitted is known only where a script can be followed."""
        if not self.teller.found.done.is_set() and self._batch is not None:
            self._trace()
        cost = self.teller.found.cost
        told = {
            "memory": process_state.memory(self._watch._cuda), "tried": process_state.tried_bytes(str(error)),
            "where": process_state.where(error.__traceback__),
            "steps": self._watch.steps, "rest": self._watch._rest, "message": " ".join(str(error).split())[:400],
        }  # fmt: skip
        memory = cost.worst.memory if cost is not None else None
        said = cost.plan.predicted if cost is not None else None
        kinds, holders = (memory.categories, memory.holders) if memory is not None else ({}, ())
        found = out_of_memory.explained(told, "`foretell watch -- python ...` checks what would fit", said, kinds, holders)
        for line in found:
            self.say(line)
        self.teller.record.out_of_memory({**told, "held": dict(kinds), "lines": found})


def followed_cluster(on: str) -> Any:
    from foretell.observe.machine import one_of

    return one_of(parse(on), on)


def _sizes(batch: Any) -> Any:
    """The batch without its numbers, so that nothing is held."""
    empty = torch.utils._pytree.tree_map(lambda one: torch.empty_like(one, device="meta") if isinstance(one, Tensor) else one, batch)
    return dict(empty) if isinstance(empty, Mapping) else empty


# ---------------------------------------------------------------------- callbacks


class _TrainingStep(nn.Module):  # type: ignore[misc]
    """A Lightning module's own loss of a batch."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = copy.copy(module)
        self.module._trainer = None  # which holds the loop, the data and everything else

    def forward(self, batch: Any) -> Any:
        made = self.module.training_step(batch, 0)
        return made["loss"] if isinstance(made, Mapping) else made


def lightning_callback(**options: Any) -> Any:
    """For `Trainer(callbacks=[foretell.lightning_callback()])`; options are those of `watch`."""
    name = "lightning.pytorch.callbacks" if importlib.util.find_spec("lightning") else "pytorch_lightning.callbacks"
    base: Any = importlib.import_module(name).Callback

    class WatchCallback(base):  # type: ignore[misc]
        watching: Watching | None = None

        def on_train_start(self, trainer: Any, module: Any) -> None:
            if trainer.is_global_zero:
                optimizer = trainer.optimizers[0] if trainer.optimizers else None
                self.watching = Watching(module, optimizer, **options).begin()

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if self.watching is not None and batch_idx == 0:
                self.watching.gave((batch,), _TrainingStep(module))
                self.watching.precision(str(trainer.precision))

        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            self._over(exception)

        def on_train_end(self, trainer: Any, module: Any) -> None:
            self._over(None)

        def _over(self, error: BaseException | None) -> None:
            watching, self.watching = self.watching, None
            if watching is not None:
                watching.end(error)

    return WatchCallback()


def trainer_callback(**options: Any) -> Any:
    """For `transformers.Trainer(callbacks=[foretell.trainer_callback()])`; options are those of `watch`."""
    from transformers import TrainerCallback

    class WatchCallback(TrainerCallback):
        watching: Watching | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **more: Any) -> None:
            if state.is_world_process_zero:
                self.watching = Watching(model, optimizer, **options).begin()
                self.watching.precision("bf16" if args.bf16 else "fp16" if args.fp16 else "")

        def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            watching, self.watching = self.watching, None
            if watching is not None:
                watching.end(None)

    return WatchCallback()
