"""A process's part of a model that is split for inference: its own forward, of which only this stage's piece computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from foretell.errors import UserError
from foretell.runtime.parallel.pipeline.ghost import ghost_like
from foretell.runtime.parallel.pipeline.part import BoundaryTensor, stage_of
from foretell.runtime.parallel.pipeline.stages import chart
from foretell.trace.record.step import call_model, given

ECHO = BoundaryTensor((1,), torch.uint8)
"""Of each message: whether the answer is wanted, or only that it is done."""


@dataclass(frozen=True, kw_only=True)
class SplitForms:
    """What travels; the same on all stages."""

    inputs: tuple[BoundaryTensor, ...]
    """Tensors of a request."""
    crossing: tuple[tuple[BoundaryTensor, ...], ...]
    """What each stage receives from the one before; of the first nothing."""
    outputs: tuple[BoundaryTensor, ...]
    wants: tuple[bool, ...]
    """Whether a stage, or one behind it, must see the request itself."""

    @property
    def ends(self) -> tuple[BoundaryTensor, BoundaryTensor]:
        """Of each message: what is wanted, and the seconds that each stage computed."""
        return ECHO, BoundaryTensor((len(self.crossing),), torch.float64)

    def back(self, answer: bool) -> tuple[BoundaryTensor, ...]:
        """Of the message to the caller."""
        return (*(self.outputs if answer else ()), *self.ends)

    def into(self, stage: int) -> tuple[BoundaryTensor, ...]:
        """Of the message to a stage."""
        request = self.inputs if stage == 0 or self.wants[stage] else ()
        return (*self.crossing[stage], *request, *self.ends)


class SplitModel:
    """A model cut at modules, before it is one of the stages."""

    def __init__(self, model: nn.Module, batch: Any, cuts: Sequence[str]) -> None:
        self.model, self.cuts = model.eval(), tuple(cuts)
        self.kept: list[Any] = []
        self.request, self.spec = request_of(model, batch)
        with torch.no_grad():
            whole = tensors_of(call_model(model, self.batch(self.request)))
            course = chart(model, self.batch(self.request), self._keep, self.cuts)
        self.stages = course.stages
        for stage in self.stages:
            stage.loss = self._keep
        crossing = course.crossing
        self.forms = SplitForms(
            inputs=tuple(map(BoundaryTensor.of, self.request)), crossing=crossing, outputs=tuple(map(BoundaryTensor.of, whole)),
            wants=(True,) * len(self.stages),
        )  # fmt: skip

    def batch(self, tensors: Sequence[Tensor]) -> Any:
        return pytree.tree_unflatten(list(tensors), self.spec)

    def _keep(self, output: Any, _: Any = None) -> Tensor:
        """In the place of a loss: what the model gives is wanted."""
        self.kept[:] = [output]
        return torch.zeros(())

    def part(self, index: int) -> SplitPart:
        """This process's stage; the model is no longer whole."""
        stage_of(self.model, self.stages[index])
        return SplitPart(self, index)


class SplitPart:
    """One stage."""

    def __init__(self, split: SplitModel, index: int) -> None:
        self.split, self.index, self.stage = split, index, split.stages[index]

    @property
    def is_last(self) -> bool:
        return self.stage.is_last

    def __call__(self, received: Sequence[Tensor], request: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What goes to the next stage, or the answer."""
        split = self.split
        with torch.no_grad():
            found = self.stage.run(split.model, tuple(received), split.batch(request))
        if not self.is_last:
            return tuple(found)
        self.stage.losses.clear()
        return tensors_of(split.kept.pop())

    def sees_requests(self) -> bool:
        """Whether it computes something of the request itself, besides what the stage before gives it: tried without values."""
        if self.index == 0:
            return True
        forms = self.split.forms
        received = tuple(torch.zeros(one.shape, dtype=one.dtype, device=self.split.request[0].device) for one in forms.crossing[self.index])
        try:
            found = self(received, ghosts(self.split.request))
        except Exception:  # whatever a forward does with what has no values
            return True
        return any(type(one) is not Tensor for one in found)


def ghosts(request: Sequence[Tensor]) -> list[Tensor]:
    """Of a request that is not there: whatever is computed of it has no value either."""
    return [ghost_like(one, "the request") for one in request]


def request_of(model: nn.Module, batch: Any) -> tuple[list[Tensor], Any]:
    """Tensors of a batch that forward takes; what is for the loss alone stays behind."""
    args, kwargs = given(model.forward, batch)
    taken: Any = kwargs if isinstance(batch, Mapping) and kwargs else args if isinstance(batch, tuple) else batch
    leaves, spec = pytree.tree_flatten(taken)
    if not leaves or not all(isinstance(one, Tensor) for one in leaves):
        raise UserError("a request is to be of tensors alone", "a forward that takes tensors")
    return leaves, spec


def tensors_of(output: Any) -> tuple[Tensor, ...]:
    """Tensors of an answer, in order."""
    found = tuple(one for one in pytree.tree_leaves(output) if isinstance(one, Tensor))
    if not found and hasattr(output, "logits"):
        found = (output.logits,)
    if not found:
        raise UserError(f"the model gives {type(output).__name__}, and no tensor in it", "a model whose forward gives tensors")
    return found
