"""One rank of a pipeline's step in one process: fake tensors, a process group that sends nothing, everything noted.

What is noted is what torch's own schedule does: in which order this rank runs forwards and backwards, what it sends and
receives and how many bytes that is. A prediction is held against it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import schedules
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from foretell.errors import InternalError
from foretell.plan.mesh import rank_at
from foretell.plan.precision import MIXED, computes_in, in_recipe
from foretell.plan.types import Plan
from foretell.runtime.parallel.apply import Job, apply
from foretell.runtime.parallel.pipeline.part import BoundaryTensor
from foretell.runtime.parallel.pipeline.stages import PlainStage, RankStages, Wire, chart
from foretell.runtime.parallel.ranks import Ranks, form
from foretell.runtime.parallel.runners import Piped
from foretell.trace.load.model import Source, load
from foretell.trace.record.step import Workload, cast_floats, prepare_precision


@dataclass(frozen=True, kw_only=True)
class RankEvent:
    """Something this rank does."""

    what: str
    """forward, backward, backward input, backward weight; send or receive activations, gradients or ties; reduce
    gradients; or a collective by its name."""
    stage: int | None = None
    micro_batch: int | None = None
    peer: int | None = None
    """Rank of the pipeline on the other side."""
    nbytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Dry:
    """One step of one rank."""

    events: tuple[RankEvent, ...]
    crossing: tuple[tuple[BoundaryTensor, ...], ...]
    """What each stage receives for one micro-batch, in the precision of the plan."""
    parameters: dict[int, dict[str, int]]
    """Stage of this rank → parameter → bytes held here."""


def dry_run(source: Source, plan: Plan, rank: int = 0, *, steps: int = 1) -> Dry:
    """The last of so many steps of the ranks at this place of the pipeline. Needs a process without a process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise InternalError("a dry run needs a process without a process group")
    source = replace(source, micro_batch=plan.micro_batch)
    forms = crossing_of(source, plan)
    place = rank_at(plan.mesh, pp=rank)
    dist.init_process_group("fake", store=FakeStore(), rank=place, world_size=plan.mesh.world)
    try:
        mesh = form(plan.mesh, "cpu")
        ranks = Ranks(
            rank=place, world=plan.mesh.world, local_rank=0, device=torch.device("cpu"), mesh=mesh, sizes=plan.mesh
        )
        with FakeTensorMode(allow_non_fake_inputs=True), _meshes_are_real():
            workload = load(source)
            vars(workload.model)["to"] = lambda *_: workload.model  # fake parameters need no device and may refuse one
            job = apply(workload, plan, ranks)
            return _steps(job, workload, forms, steps)
    finally:
        dist.destroy_process_group()


def crossing_of(source: Source, plan: Plan) -> tuple[tuple[BoundaryTensor, ...], ...]:
    """What each stage receives for one micro-batch, in the precision of the plan. Without a tensor split."""
    assert plan.pipeline is not None
    sharded = plan.mesh.data > 1
    dtype = getattr(torch, computes_in(plan.precision))
    with FakeTensorMode(allow_non_fake_inputs=True):
        workload = load(source)
        batch = cast_floats(workload.batch, dtype) if plan.precision == "bf16" else workload.batch
        prepare_precision(workload.model, in_recipe(plan.precision, sharded))
        around = torch.autocast("cpu", dtype) if plan.precision in MIXED and not sharded else nullcontext()
        with around:
            return chart(workload.model, batch, workload.loss, plan.pipeline.cuts).crossing


def _steps(job: Job, workload: Workload, forms: tuple[tuple[BoundaryTensor, ...], ...], steps: int) -> Dry:
    assert isinstance(job.runner, Piped)
    stages, plan = job.runner.stages, job.plan
    batches = [workload.batch] * plan.accumulate
    stages.know(job.place(workload.batch), forms)
    notes = Notes(stages, really=False)
    parameters = {
        index: {name: _nbytes(parameter) for name, parameter in part.named_parameters()}
        for index, part in zip(stages.indices, stages.parts, strict=True)
    }
    with notes.recording():
        for _ in range(steps):
            notes.events.clear()
            for stage in stages.stages.values():
                stage.turn = 0
            job.backward(batches)
            job.optimizer.zero_grad()
    return Dry(events=tuple(notes.events), crossing=forms, parameters=parameters)


class Notes:
    """Everything that these stages run and send, in order. Made before their first step.

    With `really` off, nothing is sent and what would be received stays as it is.
    """

    def __init__(self, stages: RankStages, *, really: bool = True) -> None:
        self.events: list[RankEvent] = []
        self.really = really
        self._tags: dict[int, RankEvent] = {}
        self._sends = schedules._batch_p2p
        stages.wire = _NotedWire(stages.wire.group, self.events, really)
        stages.kind = _recorded(self)

    @contextmanager
    def recording(self) -> Iterator[None]:
        schedules._batch_p2p = self._batch  # type: ignore[assignment]
        try:
            with _Collectives(self.events):
                yield
        finally:
            schedules._batch_p2p = self._sends

    def note(self, event: RankEvent) -> None:
        self.events.append(event)

    def tag(self, op: Any, event: RankEvent) -> None:
        self._tags[id(op)] = event

    def _batch(self, ops: list[Any], desc: str | None = None) -> list[Any]:
        for op in ops:
            tag = self._tags.pop(id(op), None)
            if tag is not None:
                self.note(replace(tag, peer=op.group_peer, nbytes=_nbytes(op.tensor)))
        with _disable_current_modes() if self.really else nullcontext():
            return self._sends(ops, desc) if self.really else []


def _recorded(notes: Notes) -> type[PlainStage]:
    class Recorded(PlainStage):
        """A stage of torch's that notes what it is told to do; shapes are given, so no vote on them is held."""

        def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            self._note("forward", fwd_chunk_id)
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

        def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            self._note("backward" if kwargs.get("full_backward", True) else "backward input", bwd_chunk_id)
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

        def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            self._note("backward weight", bwd_chunk_id)
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

        def perform_reduce_grad(self, grad_scale_factor: int) -> None:
            self._note("reduce gradients", None)
            super().perform_reduce_grad(grad_scale_factor)

        def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
            return self._tag("send activations", fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))

        def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
            return self._tag("receive activations", fwd_chunk_id, super().get_fwd_recv_ops(fwd_chunk_id))

        def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
            return self._tag("send gradients", bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))

        def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
            return self._tag("receive gradients", bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id))

        def _note(self, what: str, number: int | None) -> None:
            notes.note(RankEvent(what=what, stage=self.stage_index, micro_batch=number))

        def _tag(self, what: str, number: int, ops: list[Any]) -> list[Any]:
            for op in ops:
                notes.tag(op, RankEvent(what=what, stage=self.stage_index, micro_batch=number))
            return ops

        # torch 2.13 agrees over the wire on whether shapes are known; they are.
        def _warmup_forward_vote(self, *_: Any, **__: Any) -> Any:
            return _One()

        def _warmup_backward_result(self, *_: Any, **__: Any) -> Any:
            return _One()

    return Recorded


class _One:
    def item(self) -> int:
        return 1


class _NotedWire(Wire):
    def __init__(self, group: Any, events: list[RankEvent], really: bool) -> None:
        super().__init__(group)
        self.events, self.really = events, really

    def send(self, tensor: Tensor, rank: int) -> None:
        self.events.append(RankEvent(what="send ties", peer=rank, nbytes=_nbytes(tensor)))
        if self.really:
            with _disable_current_modes():
                super().send(tensor, rank)

    def receive(self, tensor: Tensor, rank: int) -> None:
        self.events.append(RankEvent(what="receive ties", peer=rank, nbytes=_nbytes(tensor)))
        if self.really:
            with _disable_current_modes():
                super().receive(tensor, rank)


class _Collectives(TorchDispatchMode):
    """Collectives of data and tensor parallelism, with the bytes of their larger side."""

    def __init__(self, events: list[RankEvent]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            sides = [[leaf for leaf in pytree.tree_leaves(side) if isinstance(leaf, Tensor)] for side in args]
            larger = max((sum(map(_nbytes, side)) for side in sides), default=0)
            self.events.append(RankEvent(what=func.__name__.split(".")[0].strip("_"), nbytes=larger))
        return func(*args, **kwargs)


def _nbytes(tensor: Tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)
    return local.numel() * local.element_size()


@contextmanager
def _meshes_are_real() -> Iterator[None]:
    """Joining two meshes computes with their rank numbers, which must be real."""
    plain = DeviceMesh.__dict__.get("_concatenate")
    if plain is None:
        yield
        return
    function = plain.__func__

    def real(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    DeviceMesh._concatenate = staticmethod(real)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        DeviceMesh._concatenate = plain  # type: ignore[method-assign]
