"""Pipeline parallelism: cut a model into stages by the names of blocks and run them on PyTorch's schedules.

    stages = cut(model, plan, ranks, batch, loss)    # this rank's parts; everything else of the model is gone
    losses = stages.run(micro_batches)               # one step's forward and backward; losses where the last stage is
    stages.reduce_ties()                             # sum the gradients of parameters that several stages hold

A part is the model itself with its own names of parameters, so its blocks can be recomputed, compiled and sharded
(`fully_shard` on blocks, then on the part) as in a model that was never cut. docs/pipeline.md says how that works.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.utils import _pytree as pytree

from foretell.errors import ForetellError, InternalError, UserError
from foretell.plan.blocks import rank_of_stage, stages_of_rank
from foretell.plan.legal import SPLIT_BACKWARD, check
from foretell.plan.precision import MIXED, computes_in
from foretell.plan.types import LOOPED, Plan
from foretell.runtime.parallel.pipeline.graph import used_in_line
from foretell.runtime.parallel.pipeline.part import NUMBER, BoundaryTensor, StageModules, stage_of, staged
from foretell.runtime.parallel.ranks import Ranks
from foretell.trace.flow.stages import StageFlow, fake_of, look
from foretell.trace.fold.blocks import find_blocks
from foretell.trace.record.step import Batch, Loss

if TYPE_CHECKING:
    from foretell.runtime.parallel.context.positions import ContextParallel

SCHEDULES: dict[str, type] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved-1f1b": schedules.ScheduleInterleaved1F1B,
    "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    "zero-bubble-v": schedules.ScheduleZBVZeroBubble,
}


@dataclass(frozen=True, kw_only=True)
class PipelineFlow:
    """What was found about a model that can be cut so: what each stage holds and what crosses at each cut."""

    flow: StageFlow
    crossing: tuple[tuple[BoundaryTensor, ...], ...]
    """Tensors that stage s receives from stage s - 1; none for the first. Shapes on one rank, for the batch that was
    given, in the model's own precision."""
    stages: tuple[StageModules, ...]


def chart(
    model: nn.Module, batch: Batch, loss: Loss | None, cuts: Sequence[str], *, schedule: str | None = None
) -> PipelineFlow:
    """Find out what every stage would hold, receive and send, by running each on fake tensors.

    Raises the reason where the model cannot be cut so. The model is left as it was; no other rank is needed, and every
    rank comes to the same answer.
    """
    flow = look(model, batch, loss, cuts)
    shapes: dict[Any, Any] = {}  # of modules, for all stages
    stages = [StageModules(flow=flow, index=index, loss=loss, shapes=shapes) for index in range(flow.stages)]
    crossing: list[tuple[BoundaryTensor, ...]] = [()]
    for stage in reversed(stages):
        if not stage.is_last:
            stage.sends = stages[stage.index + 1].receives
        received, sent = _try(model, batch, stage, schedule)
        if not stage.is_last and sent != crossing[1]:
            raise UserError(
                f"what reaches {flow.cuts[stage.index]} depends on the stage that looks: {sent} and {crossing[1]}",
                "leave out the pipeline, or cut elsewhere",
            )
        if not stage.is_first:
            crossing.insert(1, received)
            if not received:
                raise UserError(
                    f"nothing that earlier stages compute reaches {flow.cuts[stage.index - 1]}",
                    "leave out the pipeline, or cut elsewhere",
                )
    for stage in stages:
        stage.shapes = {}
    return PipelineFlow(flow=flow, crossing=tuple(crossing), stages=tuple(stages))


def _try(
    model: nn.Module, batch: Batch, stage: StageModules, schedule: str | None
) -> tuple[tuple[BoundaryTensor, ...], tuple[BoundaryTensor, ...]]:
    """One forward of a stage on fake tensors: the forms it received and sent."""
    where = f"the stage that begins with {stage.flow.cuts[stage.index - 1]}" if stage.index else "the first stage"
    for copies in (False, True):
        stage.copies, stage.receives, stage.fences = copies, () if stage.is_first else None, not stage.is_first
        try:
            with fake_of(model, batch) as fake_batch, staged(model, stage), torch.enable_grad():
                given = stage.run(model, (), fake_batch)
                if schedule in SPLIT_BACKWARD and not stage.is_first:  # which does its backward in one
                    _refuse_in_line(stage, given, model, str(schedule))
        except ForetellError:
            raise
        except Exception as error:
            if "leaf Variable" in str(error) and not copies:
                continue
            raise UserError(
                f"{where} cannot be run apart: {type(error).__name__}: {error}",
                "leave out the pipeline, or cut elsewhere",
            ) from error
        break
    forms = tuple(BoundaryTensor.of(value) for value in stage.samples)
    stage.fences, stage.samples = stage.drew, ()
    stage.losses.clear()
    return forms, () if stage.is_last else tuple(BoundaryTensor.of(value) for value in given)


def _refuse_in_line(stage: StageModules, given: Any, model: nn.Module, schedule: str) -> None:
    """Torch computes the gradient of a weight from where it meets activations. Where it meets them at two places of
    which one leads to the other, torch counts the second twice (2.11) or goes through a graph that is gone."""
    outputs = given if isinstance(given, tuple) else (given,)
    for name in used_in_line(outputs, stage.samples, dict(model.named_parameters())):
        raise UserError(
            f"stage {stage.index} uses {name} at several places one after the other, which {schedule} does not allow",
            "use interleaved-1f1b or 1f1b",
        )


# --- cutting ---------------------------------------------------------------------------------------------------------


def cut(model: nn.Module, plan: Plan, ranks: Ranks, batch: Batch, loss: Loss | None) -> RankStages:
    """Keep of the model what this rank's stages need. `batch` is an example of a micro-batch, on the model's device.

    Tensor splits come before this; recompute, compilation and sharding after it.
    """
    check(plan)
    if plan.pipeline is None:
        raise InternalError("a plan without a pipeline was to be cut")
    course = chart(model, batch, loss, plan.pipeline.cuts, schedule=plan.pipeline.schedule)
    mine = stages_of_rank(plan, ranks.coordinate("pp"))
    blocks = frozenset(find_blocks(model))
    sharded = plan.mesh.spread > 1
    parts = _parts(model, course.flow, mine)
    for part, index in zip(parts, mine, strict=True):
        stage = course.stages[index]
        stage.split_backward = plan.pipeline.schedule in SPLIT_BACKWARD
        if plan.precision in MIXED:
            dtype = getattr(torch, computes_in(plan.precision))
            if sharded:
                stage.parameter_dtype, stage.cast = dtype, blocks
            else:
                stage.context = functools.partial(torch.autocast, ranks.device.type, dtype)
        stage_of(part, stage)
    return RankStages(plan, ranks, course, dict(zip(mine, parts, strict=True)))


def _parts(model: nn.Module, flow: StageFlow, mine: Sequence[int]) -> list[nn.Module]:
    """One model for each stage of this rank, with common parameters; what two of the stages hold is there twice."""
    held_later: set[str] = set(flow.held(mine[-1]))
    parts = [model]
    for index in reversed(mine[:-1]):
        memo: dict[int, Any] = {}
        for module in model.modules():
            for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
                if isinstance(value, Tensor):
                    memo[id(value)] = value
        for name, parameter in model.named_parameters():
            if name in held_later and name in flow.held(index):
                memo[id(parameter)] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
        try:
            parts.insert(0, copy.deepcopy(model, memo))
        except Exception as error:
            raise UserError(
                f"{type(model).__name__} cannot be copied, as a rank with several stages needs: {error}",
                "use a schedule with one stage on each rank",
            ) from error
        held_later |= flow.held(index)
    return parts


# --- running ---------------------------------------------------------------------------------------------------------


class Wire:
    """Messages between the ranks of a pipeline, apart from those of the schedule."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def send(self, tensor: Tensor, rank: int) -> None:
        dist.send(tensor, dst=self._peer(rank), group=self.group)

    def begin_send(self, tensor: Tensor, rank: int) -> Any:
        return dist.isend(tensor, dst=self._peer(rank), group=self.group)

    def receive(self, tensor: Tensor, rank: int) -> None:
        dist.recv(tensor, src=self._peer(rank), group=self.group)

    def broadcast(self, tensor: Tensor, rank: int) -> None:
        dist.broadcast(tensor, src=self._peer(rank), group=self.group)

    def tell_all(self, value: Any, rank: int) -> Any:
        told = [value]
        dist.broadcast_object_list(told, src=self._peer(rank), group=self.group)
        return told[0]

    def _peer(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)


class RankStages:
    """This rank's stages."""

    def __init__(self, plan: Plan, ranks: Ranks, course: PipelineFlow, parts: dict[int, nn.Module]) -> None:
        assert plan.pipeline is not None
        self.plan, self.ranks, self.flow = plan, ranks, course.flow
        self.schedule = plan.pipeline.schedule
        self.count = course.flow.stages
        self.indices = tuple(parts)
        self.parts = list(parts.values())
        self.stages = {index: course.stages[index] for index in parts}
        self.crossing = course.crossing
        """What each stage receives for the example micro-batch, before precision is applied."""
        self.wire = Wire(ranks.group("pp"))
        self.kind: type[PipelineStage] = PlainStage
        """Of torch's stages."""
        self._forms: dict[Any, tuple[tuple[BoundaryTensor, ...], ...]] = {}
        self._schedules: dict[Any, Any] = {}

    @property
    def has_last(self) -> bool:
        """Whether this rank computes the loss."""
        return self.count - 1 in self.stages

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank's stages under their names in the whole model. A name comes twice where two stages
        of this rank hold it."""
        for part in self.parts:
            yield from part.named_parameters()

    def owned_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same without copies that belong to an earlier stage: over all ranks, every parameter once."""
        for index, part in zip(self.indices, self.parts, strict=True):
            for name, parameter in part.named_parameters():
                if index == min(self.flow.parameters[name]):
                    yield name, parameter

    def share(self, context: ContextParallel) -> None:
        """Let every stage work on this rank's positions alone."""
        for stage in self.stages.values():
            stage.context_of = context
            stage.gather = context.send

    def run(self, micro_batches: Sequence[Batch], scale: Tensor | None = None) -> list[Tensor]:
        """Forward and backward of one step. Gradients are those of the mean loss, times `scale`; returns the micro-batches'
        losses on the rank of the last stage and nothing elsewhere."""
        count = len(micro_batches)
        share = 1.0 / count if scale is None else scale / count
        schedule = self._schedule(micro_batches)
        number = torch.arange(count)
        for stage in self.stages.values():
            stage.batches, stage.scale, stage.losses = micro_batches, share, []
        try:
            schedule.step(
                target=number if self.has_last else None, losses=None, return_outputs=False, **{NUMBER: number}
            )
            return self.stages[self.count - 1].losses if self.has_last else []
        except RuntimeError as error:  # torch wraps whatever a stage raises
            raise _inner(error) from error
        finally:
            for stage in self.stages.values():
                stage.batches, stage.scale, stage.losses = (), 1.0, []

    @torch.no_grad()
    def forward(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Losses without gradients, on the rank of the last stage; nothing elsewhere."""
        losses, sent = [], []
        for batch in batches:
            forms = self._find_forms(batch)
            given: tuple[Tensor, ...] = ()
            for index, part in zip(self.indices, self.parts, strict=True):
                received = self._receive(index, forms, given)
                given = self._run_one(index, part, received, batch)
                if index == self.count - 1:
                    losses.append(given[0])
                else:
                    sent += self._send(index, given)
        for work, _ in sent:
            work.wait()
        return losses

    def reduce_ties(self) -> None:
        """Sum the gradients of every parameter that several stages hold; every copy gets the sum. Once a step."""
        for name, stages in sorted(self.flow.ties.items()):
            copies = [
                parameter
                for index in stages
                if index in self.stages
                for other, parameter in self.parts[self.indices.index(index)].named_parameters()
                if other == name and parameter.requires_grad
            ]
            if copies:
                self._reduce_tie(copies, sorted({rank_of_stage(self.plan, index) for index in stages}))

    # --- what crosses

    def know(self, batch: Batch, forms: tuple[tuple[BoundaryTensor, ...], ...]) -> None:
        """What every stage receives for a micro-batch like this, so that it need not be found out."""
        self._forms[_signature(batch)] = forms

    def _find_forms(self, batch: Batch) -> tuple[tuple[BoundaryTensor, ...], ...]:
        """What every stage receives for a micro-batch like this: found by running one, stage after stage."""
        key = _signature(batch)
        if key not in self._forms:
            with self._leaving_no_trace():
                self._forms[key] = self._explore(batch)
        return self._forms[key]

    def _explore(self, batch: Batch) -> tuple[tuple[BoundaryTensor, ...], ...]:
        found: list[tuple[BoundaryTensor, ...]] = [()]
        given: tuple[Tensor, ...] = ()
        for index in range(self.count - 1):
            told: Any = None
            sent = []
            if index in self.stages:
                received = self._receive(index, tuple(found), given)
                given = self._run_one(index, self.parts[self.indices.index(index)], received, batch)
                told = tuple(BoundaryTensor.of(value) for value in given)
            found.append(self.wire.tell_all(told, self._rank(index)))
            if index in self.stages and index < self.count - 2:
                sent = self._send(index, given)
            for work, _ in sent:
                work.wait()
        return tuple(found)

    @contextmanager
    def _leaving_no_trace(self) -> Iterator[None]:
        """Random numbers and buffers are afterwards what they were. Compiled blocks are run as in training, so that
        they are compiled once."""
        device = self.ranks.device
        buffers = [buffer for part in self.parts for buffer in part.buffers()]
        before = [buffer.clone() for buffer in buffers]
        training = self.plan.compile != "none"
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.set_grad_enabled(training):
            yield
        with torch.no_grad():
            for buffer, was in zip(buffers, before, strict=True):
                buffer.copy_(was)
        for stage in self.stages.values():
            stage.losses = []

    def _run_one(self, index: int, part: nn.Module, received: tuple[Tensor, ...], batch: Batch) -> tuple[Tensor, ...]:
        given = self.stages[index].run(part, received, batch)
        return given if isinstance(given, tuple) else (given,)

    def _receive(
        self, index: int, forms: tuple[tuple[BoundaryTensor, ...], ...], local: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        if index == 0:
            return ()
        if index - 1 in self.stages:
            return tuple(value.detach() for value in local)
        received = tuple(form.empty(self.ranks.device).detach() for form in forms[index])
        for value in received:
            self.wire.receive(value, self._rank(index - 1))
        return received

    def _send(self, index: int, values: tuple[Tensor, ...]) -> list[tuple[Any, Tensor]]:
        """Begun, not finished: the values must live until then."""
        if index + 1 in self.stages:
            return []
        plain = [value.detach() for value in values]
        return [(self.wire.begin_send(value, self._rank(index + 1)), value) for value in plain]

    def _rank(self, stage: int) -> int:
        """Which rank of this pipeline holds a stage."""
        return rank_of_stage(self.plan, stage)

    # --- the schedule

    def _schedule(self, micro_batches: Sequence[Batch]) -> Any:
        count = len(micro_batches)
        keys = {_signature(batch) for batch in micro_batches}
        if len(keys) != 1:
            raise UserError(
                "the micro-batches of a step differ in shape",
                "give a pipeline micro-batches of one shape, padded if need be",
            )
        key = (keys.pop(), count)
        if key not in self._schedules:
            if self._schedules:  # buffers of another shape are let go
                self._schedules.clear()
            self._schedules[key] = build_schedule(
                self.plan, dict(zip(self.indices, self.parts, strict=True)), self._find_forms(micro_batches[0]), count, self.ranks.device,
                self.wire.group, self.kind,
            )  # fmt: skip
        return self._schedules[key]

    # --- ties

    def _reduce_tie(self, copies: list[nn.Parameter], holders: list[int]) -> None:
        """The first holder sums what the others send, in their order, and sends the sum back: all copies stay equal."""
        grads = [_local_gradient(parameter) for parameter in copies]
        total = grads[0] if len(grads) == 1 else torch.stack(grads).sum(0)
        here, first, others = self.ranks.coordinate("pp"), holders[0], holders[1:]
        if others and here == first:
            total = total.clone()
            for peer in others:
                share = torch.empty_like(total)
                self.wire.receive(share, peer)
                total += share
            for peer in others:
                self.wire.send(total, peer)
        elif others:
            self.wire.send(total, first)
            total = torch.empty_like(total)
            self.wire.receive(total, first)
        for grad in grads:
            grad.copy_(total)


class PlainStage(PipelineStage):
    """A stage of torch's."""

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """What a stage received and did not use has a gradient of zero; torch 2.11 finds none and stops."""
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        grads = self.bwd_cache.get(bwd_chunk_id, ())
        if not self.is_first and any(grad is None for grad in grads):
            buffers = [info.buffer for info in self.args_recv_info[bwd_chunk_id]]
            self.bwd_cache[bwd_chunk_id] = tuple(
                torch.zeros_like(buffer) if grad is None else grad for grad, buffer in zip(grads, buffers, strict=False)
            )

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        """Without messages to itself, where two stages that follow each other are on one rank: gloo has none."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]


def build_schedule(
    plan: Plan, parts: dict[int, nn.Module], forms: Sequence[tuple[BoundaryTensor, ...]], count: int, device: torch.device, group: Any,
    kind: type[PipelineStage],
) -> Any:  # fmt: skip
    """PyTorch's schedule over this rank's stages, told all shapes, so that it has none to find out."""
    assert plan.pipeline is not None
    last = plan.pipeline.stages - 1
    stages = []
    for index, part in parts.items():
        received = tuple(form.empty("meta") for form in forms[index])
        sent = torch.empty((), device="meta", requires_grad=True)
        given = tuple(form.empty("meta") for form in forms[index + 1]) if index < last else (sent,)
        stages.append(kind(part, index, last + 1, device, received, given, group=group))
    chosen = stages if plan.pipeline.schedule in LOOPED else stages[0]
    return SCHEDULES[plan.pipeline.schedule](chosen, count, loss_fn=lambda loss, _: loss, scale_grads=False)


def _inner(error: BaseException) -> BaseException:
    """What is wrong, where it is the plan, the model or the memory; else the error as it is."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, (ForetellError, torch.OutOfMemoryError)):
            return inner
        inner = inner.__cause__
    return error


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's piece of a gradient, placed as the parameter is; zeros where there is none."""
    from torch.distributed.tensor import DTensor

    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    grad = parameter.grad
    if not isinstance(grad, DTensor):
        return grad
    if isinstance(parameter, DTensor) and grad.placements != parameter.placements:
        grad = parameter.grad = grad.redistribute(placements=parameter.placements)
    return grad._local_tensor


def _signature(batch: Batch) -> Any:
    leaves, spec = pytree.tree_flatten(batch)
    return spec, *((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves)
