"""When the numbers of a run are no longer numbers: which block was first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from foretell.errors import UserError
from foretell.runtime.observe.measure import StepReading
from foretell.runtime.parallel.apply import Job
from foretell.runtime.process.control import Control
from foretell.runtime.train.numbers.clip import local
from foretell.trace.record.step import Batch

LOSS, NORM, WEIGHTS = "loss", "gradient's norm", "weights"


class RunFailed(UserError):
    """A run that could not go on: nothing in the input is wrong, and what was saved stays."""

    exit_code = 1

    def __init__(
        self, problem: str, remedy: str = "", *, detail: str = "", speaks: bool | None = None, died: bool = False,
        transient: bool = False, told: str = "",
    ) -> None:  # fmt: skip
        super().__init__(problem, remedy, detail)
        self.speaks = speaks
        """Whether it is on this rank to tell; None: on the first, as always."""
        self.died = died
        """A rank went without a word: whoever started it knows more."""
        self.transient = transient
        """It may not come again: ranks lost each other, and none of their code raised; or the plan was changed so that it does not."""
        self.told = told
        """What whoever starts the run again says of it, where this rank knows better."""


def not_finite(bad: StepReading) -> str:
    """Which number of a step is none."""
    return LOSS if not math.isfinite(bad.loss) else NORM


def no_number(bad: StepReading, what: str, where: str, remedy: str) -> RunFailed:
    """The run ends since a number of a step is none, or far above those before it."""
    scaled = f" with the loss scaled by {bad.loss_scale:g}" if bad.loss_scale is not None else ""
    return RunFailed(f"the {what} of step {bad.step} is {value_of(bad, what)}{scaled}: {where}; its update was not applied", remedy)


def value_of(bad: StepReading, what: str) -> float | None:
    return bad.loss if what == LOSS else bad.grad_norm


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Where a NaN or an infinity first appeared."""

    phase: str
    """weights, forward, loss or backward."""
    where: str
    """Module or parameter, by the names of the whole model."""
    micro_batch: int
    order: int
    """Before or after another finding of the same phase and micro-batch."""

    def sentence(self) -> str:
        at = f"in micro-batch {self.micro_batch}"
        return {
            "weights": f"the weights themselves are not finite, first {self.where}",
            "forward": f"first in the forward of {self.where}, {at}",
            "loss": f"first in the loss, {at}: every module's output is finite",
            "backward": f"first in backward, in the gradient that reaches the output of {self.where}, {at}",
        }[self.phase]


def find_first(job: Job, batches: Sequence[Batch], control: Control) -> str:
    """Run the failing micro-batches once more and say which block was first. Every rank calls it; nothing is updated."""
    own = bad_weight(job) or watched(job, batches)[1]
    job.optimizer.zero_grad(set_to_none=True)
    found = [Finding(**said) for said in control.gather(asdict(own) if own else None) if said is not None]
    return first_of(found).sentence() if found else "it did not come again when the same micro-batches were run once more"


def first_of(found: Sequence[Finding]) -> Finding:
    """The one that the others follow from."""
    phases = ["weights", "forward", "loss", "backward"]
    return min(found, key=lambda f: (phases.index(f.phase), f.micro_batch, f.order))


def is_bad(value: Any) -> bool:
    """NaN or +inf; -inf alone is how masks are written."""
    if not isinstance(value, Tensor):
        return False
    piece = local(value.detach())
    if not piece.is_floating_point() or not piece.numel():
        return False
    return bool((piece.isnan() | (piece == float("inf"))).any())


def bad_weight(job: Job) -> Finding | None:
    """A weight of this rank that is not finite."""
    for order, (name, parameter) in enumerate(job.named_parameters()):
        if not local(parameter.detach()).isfinite().all():
            return Finding(phase=WEIGHTS, where=name, micro_batch=0, order=order)
    return None


class _Observer:
    """Hooks on every module: remembers the first place in forward, and the first in backward, that is not finite."""

    def __init__(self, stage: int) -> None:
        self.stage, self.micro_batch = stage, -1
        self.found: dict[str, Finding] = {}

    def note(self, phase: str, where: str, micro_batch: int) -> None:
        if phase not in self.found:
            self.found[phase] = Finding(phase=phase, where=where, micro_batch=micro_batch, order=self.stage)

    def before(self, name: str, root: bool) -> Callable[..., None]:
        parent = name.rpartition(".")[0]

        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            if root:
                self.micro_batch += 1
            elif any(map(is_bad, pytree.tree_leaves((args, kwargs)))):
                self.note("forward", f"{parent or 'the model'} (its own code, before {name})", self.micro_batch)

        return hook

    def after(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            micro_batch = self.micro_batch
            for value in pytree.tree_leaves(output):
                if is_bad(value):
                    self.note("forward", name or "the model", micro_batch)
                if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
                    value.register_hook(lambda grad: self._backward(name, micro_batch, grad))

        return hook

    def _backward(self, name: str, micro_batch: int, grad: Tensor) -> None:
        if is_bad(grad):
            self.note("backward", name or "the model", micro_batch)


def watched(job: Job, batches: Sequence[Batch]) -> tuple[Tensor | None, Finding | None]:
    """Forward and backward with an eye on every module: the loss where this rank computes it, and what was first not finite."""
    watcher = _Observer(job.ranks.coordinate("pp"))
    with _hooked(job, watcher), _eager():
        loss = job.backward(batches)
    if "forward" in watcher.found:
        return loss, watcher.found["forward"]
    if loss is not None and not bool(loss.isfinite()):
        return loss, Finding(phase=LOSS, where="", micro_batch=max(0, watcher.micro_batch), order=watcher.stage)
    return loss, watcher.found.get("backward")


@contextmanager
def _hooked(job: Job, watcher: _Observer) -> Iterator[None]:
    handles = []
    for position, part in enumerate(job.parts):
        for name, module in part.named_modules():
            full = job.name_of(position, name) if name else ""
            handles.append(module.register_forward_pre_hook(watcher.before(full, not name), with_kwargs=True))
            handles.append(module.register_forward_hook(watcher.after(full)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _eager() -> Iterator[None]:
    """Compiled code would not call the hooks."""
    with torch.compiler.set_stance("force_eager"):
        yield
