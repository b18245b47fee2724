"""Forward and backward of a step on one rank: the whole model, or some stages of it under a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from foretell.runtime.parallel import shard
from foretell.runtime.train.numbers.finite import Skips
from foretell.runtime.train.numbers.scaler import LossScaler
from foretell.trace.record.step import (
    Batch,
    Loss,
    Workload,
    compute_loss,
)

if TYPE_CHECKING:
    from foretell.runtime.offload.adamw import Offloaded
    from foretell.runtime.parallel.context.positions import ContextParallel
    from foretell.runtime.parallel.exact import ExactSum
    from foretell.runtime.parallel.pipeline.stages import RankStages


class Runner(Protocol):
    """How this rank gets from micro-batches to gradients."""

    parts: list[nn.Module]
    """The model, or the stages of it that this rank has."""
    scaler: LossScaler | None
    """What the loss is multiplied by before backward, where it is."""
    exact: ExactSum | None
    """What sums gradients to the same bits on any number of ranks, where that is asked for."""

    def backward(self, micro_batches: Sequence[Batch]) -> Tensor | None:
        """Add the gradients of the mean loss; that mean where this rank computes it, else None."""

    def evaluate(self, batches: Sequence[Batch]) -> Tensor | None:
        """The mean loss without gradients, where this rank computes it."""

    def copies(self, name: str) -> int:
        """How many stages hold a parameter."""


class WholeModel:
    """The whole model on this rank: every micro-batch forward, then backward."""

    def __init__(
        self, model: nn.Module, loss: Loss | None, guard: Callable[[], AbstractContextManager[Any]],
        context: ContextParallel | None = None, around: Callable[[Workload], Tensor] | None = None, exact: ExactSum | None = None,
    ) -> None:  # fmt: skip
        self.model, self.loss, self.guard, self.context, self.around, self.exact = model, loss, guard, context, around, exact
        self.parts = [model]
        self.scaler: LossScaler | None = None
        self._moved: Offloaded | None = None
        self._skips: Skips | None = None
        self._more = False

    def watch(self, optimizer: Offloaded, skips: Skips) -> None:
        """Tell an optimizer that updates as it goes how far backward is, and whether it may."""
        self._moved, self._skips = optimizer, skips
        optimizer.attach(self.model, lambda: self._more)

    def _loss(self, batch: Batch) -> Tensor:
        if self.context is None:
            return compute_loss(Workload(self.model, batch, self.loss, around=self.around))
        return self.context.finish(compute_loss(Workload(self.model, self.context.open(batch), self.loss)))

    def copies(self, name: str) -> int:
        return 1

    def backward(self, micro_batches: Sequence[Batch]) -> Tensor:
        if self.exact is not None:
            return self.exact.backward(self._losses(micro_batches, self.exact))
        total: Tensor | None = None
        for position, batch in enumerate(micro_batches):
            shard.reduce_over_replicas([self.model], position == len(micro_batches) - 1)
            with self.guard():
                loss = self._loss(batch)
                if len(micro_batches) > 1:
                    loss = loss / len(micro_batches)
            total = loss.detach() if total is None else total + loss.detach()
            self._more = position < len(micro_batches) - 1
            if self._moved is not None and self._skips is not None and not self._more:
                self._moved.expect(self._skips.skip(total))
            (loss if self.scaler is None else self.scaler.up(loss)).backward()
        assert total is not None
        return total

    def _losses(self, micro_batches: Sequence[Batch], exact: ExactSum) -> Iterator[Tensor]:
        """Loss of each; in memory of its own, since where a tensor begins may change how kernels add."""
        for position, batch in enumerate(micro_batches):
            exact.seed(position)
            with self.guard():
                loss = self._loss(pytree.tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, batch))
            yield loss

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        with self.guard():
            losses = [self._loss(batch) for batch in batches]
        return torch.stack(losses).mean() if self.exact is None else self.exact.mean(losses)


class Piped:
    """Some stages of the model on this rank: the schedule says what runs when."""

    def __init__(self, stages: RankStages) -> None:
        self.stages, self.parts = stages, stages.parts
        self.scaler: LossScaler | None = None
        self.exact: ExactSum | None = None

    def copies(self, name: str) -> int:
        return len(self.stages.flow.parameters[name])

    def backward(self, micro_batches: Sequence[Batch]) -> Tensor | None:
        losses = self.stages.run(micro_batches, None if self.scaler is None else self.scaler.scale)
        self.stages.reduce_ties()
        return torch.stack(losses).mean() if losses else None

    def evaluate(self, batches: Sequence[Batch]) -> Tensor | None:
        losses = self.stages.forward(batches)
        return torch.stack(losses).mean() if losses else None
