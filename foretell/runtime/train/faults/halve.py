"""Device memory ran out in a step: the same samples in smaller micro-batches, more of them, add up to the same gradient.

One process computes the step again at once. Ranks cannot, since the others wait in collectives: the plan of the run folder is
changed, and a restart goes on with it from the newest checkpoint.
"""

from __future__ import annotations

import gc
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from foretell.plan.types import Plan
from foretell.runtime.train.folder import note_fault, settle
from foretell.runtime.train.numbers.guard import RunFailed
from foretell.trace.record.step import Batch

if TYPE_CHECKING:
    from foretell.runtime.parallel.apply import Job
    from foretell.runtime.train.loop import TrainingRun

_SAME_LOSS = 0.01
"""By how much the mean of the losses of pieces may differ from that of all of them: low precision rounds, other losses differ by more."""


@dataclass(frozen=True, kw_only=True)
class Halving:
    """A plan with smaller micro-batches, or why there is none."""

    plan: Plan | None
    why: str = ""

    @property
    def words(self) -> str:
        """What is done, or why nothing is."""
        if self.plan is None:
            return self.why
        size = f"micro-batches of {self.plan.micro_batch}, {self.plan.accumulate} a step"
        return f"{size}: the same samples and, of a loss that is their mean, the same gradient"


def halved(plan: Plan, job: Job) -> Halving:
    """The plan in the next smaller micro-batches; a batch norm's statistics would be those of fewer samples, so it is left alone."""
    if job.runner.exact is not None:
        return Halving(plan=None, why="smaller micro-batches would give other bits than --exact has promised")
    factor = next((number for number in range(2, plan.micro_batch + 1) if plan.micro_batch % number == 0), 1)
    if factor == 1:
        return Halving(plan=None, why="a micro-batch has one sample already")
    mixes = next((name for part in job.parts for name, module in part.named_modules() if isinstance(module, _BatchNorm)), None)
    if mixes is not None:
        return Halving(plan=None, why=f"smaller micro-batches would change what the batch norm {mixes} computes")
    smaller = plan.with_(
        micro_batch=plan.micro_batch // factor, accumulate=plan.accumulate * factor, predicted={},
        notes=(*plan.notes, f"micro-batches of {plan.micro_batch} ran out of device memory"),
    )  # fmt: skip
    return Halving(plan=smaller)


def gradients(run: TrainingRun, batches: list[Batch]) -> Tensor | None:
    """Those of the step under way. One process that runs out of device memory computes it again, and all after it, in smaller
    micro-batches."""
    try:
        return run.job.backward(batches)
    except torch.OutOfMemoryError as error:
        smaller = halved(run.plan, run.job)
        if smaller.plan is None or run.ranks.world > 1 or run.job.changing:
            raise
        why = str(error).splitlines()[0]
        traceback.clear_frames(error.__traceback__)  # they hold what the step has computed
    batches.clear()
    run.job.optimizer.zero_grad(set_to_none=True)
    run.job.skips.abandon()
    gc.collect()
    if run.ranks.device.type == "cuda":
        torch.cuda.empty_cache()
    first = run.first_sample(run.step)
    whole = run.feed.at(first)[:1]
    run.feed.divide(smaller.plan.micro_batch, smaller.plan.accumulate)
    if run.held is not None:
        run.held.divide(smaller.plan.micro_batch, smaller.plan.accumulate)
    pieces = run.feed.at(first)[: run.plan.micro_batch // smaller.plan.micro_batch]
    if (off := _other_loss(run, whole, pieces)) is not None:
        remedy = f"recompute, or a smaller micro-batch from the start: {off}"
        failure = RunFailed(f"rank {run.ranks.rank} ran out of device memory: {why}", remedy)
        run.salvage(failure)
        raise failure
    whole.clear()
    run.plan = smaller.plan
    change_plan(run, smaller, why)
    run.seed(run.step)
    return gradients(run, run.feed.at(first))


def _other_loss(run: TrainingRun, whole: list[Batch], pieces: list[Batch]) -> str | None:
    """What is wrong where the loss of samples together is not the mean of theirs apart, as of pairs within a batch; None where it is, or
    where not even the loss without gradients finds room."""
    run.job.skips.begin()
    try:
        together, apart = float(run.job.evaluate(whole)), float(run.job.evaluate(pieces))
    except torch.OutOfMemoryError:
        return None
    finally:
        run.job.skips.abandon()  # a look leaves no trace in buffers
    if abs(together - apart) <= _SAME_LOSS * abs(together):
        return None
    return f"a micro-batch has the loss {together:.4f}, and its pieces {apart:.4f} on average, so smaller ones would train otherwise"


def change_plan(run: TrainingRun, smaller: Halving, why: str) -> None:
    """The run folder has the smaller plan from now on, and says since when."""
    assert smaller.plan is not None
    settle(run.folder.path, smaller.plan)
    run.screen.say(f"step {run.step + 1}: device memory ran out ({why}); from here on {smaller.words}")
    note_fault(
        run.folder.path, "memory", step=run.step + 1, rank=run.ranks.rank, words=why, micro_batch=smaller.plan.micro_batch,
        accumulate=smaller.plan.accumulate,
    )  # fmt: skip
