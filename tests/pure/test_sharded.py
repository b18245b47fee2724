"""One rank of FSDP2, held against FSDP2 itself: a dry run on fake tensors and a fake process group, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from foretell import zoo
from foretell.cost.sharded import COMMUNICATION, GATHERED, rows, shard
from foretell.trace import types
from foretell.trace.blocks import find_blocks
from foretell.trace.capture import _add_in_place, capture
from foretell.trace.cuda import cuda_choices
from foretell.trace.recipe import Recipe
from foretell.trace.recorder import Recorder, Row
from foretell.trace.step import Step, Workload

# ------------------------------------------------------------------ the dry run


class DryRun(Recorder):
    """Also follows storages that FSDP2 empties and fills again; leaves DTensors to DTensor."""

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in kinds):
            return NotImplemented
        return super().__torch_dispatch__(func, kinds, args, kwargs)

    def refill(self, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.itemsize
        if tensor.untyped_storage().size() != size:
            tensor.untyped_storage().resize_(size)
            if self._rows is not None:
                self.storage_id(tensor, self._add_row("refill"))

    def empty(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.size():
            number = self._ids.pop(storage._cdata, None)
            storage.resize_(0)
            if number is not None:
                del self._alive[number]
                assert self._last is not None
                self._last.frees.append(number)


@contextmanager
def group(ranks: int) -> Iterator[Any]:
    dist.init_process_group(backend="fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Measured:
    """Bytes of one rank: the highest point of each phase of a step, and what the step is about."""

    peaks: Mapping[str, int]
    parameters: int
    gradients: int
    optimizer: int

    @property
    def peak(self) -> int:
        return max(self.peaks.values())


def local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def dry_run(build: Callable[[], Workload], recipe: Recipe, ranks: int) -> Measured:
    """Two steps of FSDP2; what the second one needs (the first makes tensors of global shape besides)."""
    recorder = DryRun()
    with group(ranks) as mesh, recorder, cuda_choices(recorder, (9, 0)):
        workload = build()
        model = workload.model
        step = Step(workload, replace(recipe, precision="fp32"), device_type="cpu", observer=recorder)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for path in find_blocks(model):
            fully_shard(model.get_submodule(path), mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        with (
            mock.patch.object(_fsdp_param, "alloc_storage", recorder.refill),
            mock.patch.object(_fsdp_param, "free_storage", recorder.empty),
        ):
            return _two_steps(recorder, step, recipe)


def _two_steps(recorder: DryRun, step: Step, recipe: Recipe) -> Measured:
    model = step.model
    for tensor in [*model.parameters(), *model.buffers(), *step.workload.batch.values()]:
        recorder.storage_id(local(tensor))
    step.create_optimizer()

    def one_step() -> None:
        for _ in range(recipe.accumulate):
            step.micro_batch()
        step.update()

    with recorder.program("first"):
        one_step()
        step.zero_grad()
    before = recorder.living()
    with recorder.program("second"):
        one_step()
        parameters = [local(parameter) for parameter in model.parameters()]
        gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
        state = [local(v) for s in step.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        numbers = [list({recorder.storage_id(t) for t in ts}) for ts in (parameters, gradients, state)]
    _add_in_place(recorder)
    peaks = highest(recorder.programs["second"], before, recorder.sizes)
    return Measured(peaks, *(sum(recorder.sizes[n] for n in ns) for ns in numbers))


def highest(ops: Iterable[Row | types.Op], alive: set[int], sizes: Mapping[int, int]) -> dict[str, int]:
    """Phase → most bytes alive at once; `alive` is brought up to date."""
    peaks: dict[str, int] = {}
    live = sum(sizes[number] for number in alive)
    for op in ops:
        live += sum(sizes[number] for number in op.allocates if number not in alive)
        alive.update(op.allocates)
        phase = "backward" if op.phase == "recompute" else op.phase
        peaks[phase] = max(peaks.get(phase, 0), live)
        live -= sum(sizes[number] for number in op.frees if number in alive)
        alive.difference_update(op.frees)
    peaks.pop("", None)
    return peaks


# ------------------------------------------------------------------ what shard() says


def predict(trace: types.Trace) -> Measured:
    sizes = {n: 0 if s.host else s.nbytes for n, s in trace.storages.items()}
    alive = set(trace.resident)
    gradients = 0
    for run in ("first_step", "steady_step"):
        peaks: dict[str, int] = {}
        for name, times in trace.schedule[run]:
            for _ in range(times):
                for phase, peak in highest(trace.programs[name].ops, alive, sizes).items():
                    peaks[phase] = max(peaks.get(phase, 0), peak)
            if name.startswith("micro"):
                gradients = sum(sizes[n] for n in alive if trace.storages[n].role == types.GRADIENT)
    parameters, optimizer = (
        sum(sizes[n] for n in alive if trace.storages[n].role == role) for role in (types.PARAMETER, types.OPTIMIZER)
    )
    return Measured(peaks, parameters, gradients, optimizer)


def workload(name: str, micro_batch: int, **changes: Any) -> Callable[[], Workload]:
    entry = zoo.get(name)
    module = zoo.load(entry)

    def build() -> Workload:
        model: nn.Module = module.build(**{**entry.config, **changes})
        return Workload(model, module.batch(model, micro_batch, entry.seq, entry.image), module.loss)

    return build
