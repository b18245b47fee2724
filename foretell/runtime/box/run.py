"""Rehearse a plan: one of its ranks for some steps, the others stand-ins; then the same steps with messages that take no time.

    open the box ─► build, apply as a run does ─► steps: seconds, peaks of memory ─► steps with free messages: what is exposed

Communication is exposed as far as a step is longer than one whose messages take no time: that counts waiting for it, the cores
and the memory bandwidth it takes from compute, and nothing that is hidden behind compute. Nothing is saved.
"""

from __future__ import annotations

import gc
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from foretell.plan.mesh import check_rank
from foretell.plan.recipe import source_of
from foretell.plan.types import Plan
from foretell.runtime.box.group import BoxState, opened
from foretell.runtime.box.script import BoxMessage, BoxScript
from foretell.runtime.box.stages import boxed_stage, forms_of
from foretell.runtime.data.samples import Feed, RankSamples
from foretell.runtime.observe import measure
from foretell.runtime.parallel import ranks as members
from foretell.runtime.parallel.apply import Job, apply
from foretell.runtime.parallel.runners import Piped
from foretell.runtime.train.folder import RunSettings
from foretell.runtime.train.numbers.guard import RunFailed
from foretell.runtime.train.prepare import build, samples_of
from foretell.runtime.train.rng import seed_all, step_seed
from foretell.trace.record.capture import no_initialisation
from foretell.trace.record.step import Workload

STD = 0.02
"""Of weights that are matrices."""
_BLOCK = 2**22
"""Normal numbers that are drawn on the host; larger weights repeat them."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class BoxRequest:
    """How to rehearse."""

    rank: int = 0
    device: str = "auto"
    steps: int = 10
    """Measured; of each kind."""
    warmup: int = 4
    """Before them."""
    data: str | None = None
    seed: int = 0
    scratch: Path | None = None
    """A folder for what the plan keeps on disk; the present one without it. Nothing stays there."""
    exposed: bool = True
    """Run steps with free messages too."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """One rank of a plan, measured."""

    rank: int
    world: int
    device: str
    step_seconds: float
    """Median."""
    low_seconds: float
    high_seconds: float
    free_seconds: float | None
    """Of a step whose messages take no time; None where that was not run."""
    steps: tuple[float, ...]
    free_steps: tuple[float, ...]
    allocated_bytes: int | None
    reserved_bytes: int | None
    host_bytes: int | None
    messages: int
    """Of a step."""
    message_bytes: int
    message_seconds: float
    """That they take, one after the other, without waiting for other stages."""
    build_seconds: float
    finite: bool = True
    """Whether loss and gradients were numbers in every step: updates are skipped where they are not, which is quicker."""

    @property
    def exposed_seconds(self) -> float | None:
        return None if self.free_seconds is None else max(0.0, self.step_seconds - self.free_seconds)

    @property
    def exposed_share(self) -> float | None:
        exposed = self.exposed_seconds
        return None if exposed is None else exposed / self.step_seconds

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "exposed_seconds": self.exposed_seconds, "exposed_share": self.exposed_share}


def rehearse(plan: Plan, script: BoxScript, free: BoxScript, asked: BoxRequest, *, say: Say = lambda _: None) -> Rehearsal:
    """Run one rank of a plan in this process; `script` says what its messages take, `free` is the same where they take nothing."""
    check_rank(plan, asked.rank)
    device = members.device_of(asked.device)
    inside = opened(script, device, asked.rank, plan.mesh.world) if plan.mesh.world > 1 else nullcontext()
    with inside as box, _scratch(plan, asked) as scratch:
        began, aside = time.monotonic(), False
        try:
            say("building the model")
            steps = BoxSteps(plan, asked, box, scratch, say)
            aside = measure.set_aside()
            return _measured(steps, free, time.monotonic() - began)
        except torch.OutOfMemoryError as error:
            first = str(error).splitlines()[0]
            raise RunFailed(f"rank {asked.rank} ran out of device memory: {first}", "use a smaller micro-batch or recompute") from error
        finally:
            if aside:
                gc.unfreeze()


@contextmanager
def _scratch(plan: Plan, asked: BoxRequest) -> Iterator[Path | None]:
    """A folder that goes with the box, where the plan keeps something on disk."""
    if "disk" not in {*plan.states.values(), *plan.weights.values(), *(one.mode for one in plan.blocks.values())}:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="foretell-box-", dir=asked.scratch or Path.cwd()) as folder:
        yield Path(folder)


def _measured(steps: BoxSteps, free: BoxScript, built: float) -> Rehearsal:
    asked, box, ranks = steps.asked, steps.box, steps.ranks
    try:
        seconds = steps.timed(asked.warmup, asked.steps, "step")
        memory = measure.memory(ranks.device)
        messages: list[BoxMessage] = []
        if box is not None:
            with box.recorded() as messages:
                steps.timed(0, 1, "recorded step")
        without: list[float] = []
        if box is not None and asked.exposed:
            box.stand_ins.script = free
            without = steps.timed(min(2, asked.warmup), asked.steps, "without communication, step")
    finally:
        steps.job.close()
    ordered = sorted(seconds)
    return Rehearsal(
        rank=asked.rank, world=ranks.world, device=measure.hardware(ranks)["device"], step_seconds=statistics.median(seconds),
        low_seconds=ordered[0], high_seconds=ordered[-1], free_seconds=statistics.median(without) if without else None,
        steps=tuple(seconds), free_steps=tuple(without), allocated_bytes=memory["allocated_bytes"],
        reserved_bytes=memory["reserved_bytes"], host_bytes=memory["host_bytes"], messages=len(messages),
        message_bytes=sum(one.nbytes for one in messages), message_seconds=sum(one.seconds for one in messages), build_seconds=built,
        finite=steps.finite,
    )  # fmt: skip


class BoxSteps:
    """One rank, ready to run steps as the loop of a run does."""

    def __init__(self, plan: Plan, asked: BoxRequest, box: BoxState | None, scratch: Path | None = None, say: Say = lambda _: None) -> None:
        self.plan, self.asked, self.box, self.say = plan, asked, box, say
        self.ranks = members.start(plan, device=asked.device)
        settings = RunSettings(data=asked.data, seed=asked.seed, no_save=True).settled(plan)
        with no_initialisation():
            workload = build(plan, asked.seed)
        on_host = plan.offloads or self.ranks.device.type == "cpu"
        if on_host:
            _draw(workload.model.named_parameters())
        samples, _ = samples_of(plan, settings, workload)
        self.job = self._applied(workload, settings, scratch)
        if not on_host:
            _draw(self.job.named_parameters())
        share = RankSamples(micro_batch=plan.micro_batch, accumulate=plan.accumulate, ranks=self.ranks.data_size, rank=self.ranks.data_rank)
        self.feed = Feed(samples, share, seed=asked.seed, device=self.ranks.device)
        self.clock = measure.clock_of(self.ranks.device)
        self.step, self.finite = 0, True
        measure.forget_peaks(self.ranks.device)

    def _applied(self, workload: Workload, settings: RunSettings, scratch: Path | None) -> Job:
        plan = self.plan
        job = apply(workload, plan, self.ranks, learning_rate=settings.schedule_for(plan).at(0), scratch=scratch)
        if isinstance(job.runner, Piped) and self.box is not None:
            stages = job.runner.stages
            stages.know(job.place(workload.batch), forms_of(replace(source_of(plan), micro_batch=plan.micro_batch), plan))
            stages.kind = boxed_stage(self.box)
        return job

    def timed(self, warmup: int, count: int, what: str = "step") -> list[float]:
        """Seconds of so many steps after others that are not counted. The host stays one step ahead of the device."""
        readings = []
        batches = self.feed.next()
        self.clock.pause()
        for number in range(warmup + count):
            self.say(f"{what} {number + 1} of {warmup + count}")
            seed_all(step_seed(self.asked.seed, self.ranks.data_rank, self.step), self.ranks.device)
            self.clock.begin()
            if self.box is not None:
                self.box.stand_ins.begin_step()
            loss = self.job.backward(batches)
            self.clock.middle()
            result = self.job.update(loss)
            self.step += 1
            self.clock.end(self.step, result.loss, result.grad_norm, result.loss_scale)
            if number < warmup + count - 1:
                batches = self.feed.next()
            readings += self.clock.read()
        readings += self.clock.read(all=True)
        self.job.settle()
        self.finite &= all(math.isfinite(one.loss) and math.isfinite(one.grad_norm or 0.0) for one in readings)
        return [one.seconds for one in readings[warmup:]]


@torch.no_grad()
def _draw(parameters: Any) -> None:
    """Weights of the usual size, drawn where they are: no checkpoint is read, and none is written."""
    chance: Tensor | None = None
    for name, parameter in parameters:
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
        if own.dim() < 2:
            own.fill_(0.0 if name.endswith("bias") else 1.0)
        elif own.device.type != "cpu":
            own.normal_(0.0, STD)
        else:
            chance = torch.randn(_BLOCK) * STD if chance is None else chance
            _repeat(own, chance)


def _repeat(own: Tensor, numbers: Tensor) -> None:
    flat, size = own.view(-1), numbers.numel()
    whole = flat.numel() // size * size
    flat[:whole].view(-1, size).copy_(numbers)
    flat[whole:].copy_(numbers[: flat.numel() - whole])
