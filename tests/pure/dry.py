"""One rank of a plan, really applied by `runtime` in this process, with a process group whose messages go nowhere.

Tensors are real and small, values are garbage where other ranks would have sent some, bytes and messages are right:
what is alive when, and what is sent, is watched from below autograd. FSDP2 empties and fills storages; that is followed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from foretell.plan.types import Plan
from foretell.runtime.offload.adamw import Offloaded
from foretell.runtime.parallel.apply import Job, apply
from foretell.runtime.parallel.ranks import Ranks, form
from foretell.trace import types
from foretell.trace.record.attributes import tensors_in
from foretell.trace.record.capture import _add_in_place
from foretell.trace.record.recorder import RecordedOp, _in_formula
from foretell.trace.record.step import Workload

MESSAGES = {
    "c10d._allgather_base_.default": "all_gather", "c10d._reduce_scatter_base_.default": "reduce_scatter",
    "c10d.allreduce_.default": "all_reduce", "c10d.send.default": "send", "c10d.recv_.default": "recv",
    "c10d.broadcast_.default": "broadcast", "_c10d_functional.all_reduce.default": "all_reduce",
    "_c10d_functional.all_gather_into_tensor.default": "all_gather",
    "_c10d_functional.reduce_scatter_tensor.default": "reduce_scatter",
    "_c10d_functional.all_to_all_single.default": "all_to_all",
}  # fmt: skip


PRODUCTS = (
    "aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default", "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
)  # fmt: skip
"""Hundreds of times slower in bf16 than in fp32 on CPUs that have none of their own."""


def quickly(func: Any, args: Any, kwargs: Any) -> Any:
    """An op's result, in the formats that it has: values mean nothing here."""
    low = [tensor for tensor in tensors_in((args, kwargs)) if tensor.dtype is torch.bfloat16]
    if not low or str(func) not in PRODUCTS:
        return func(*args, **kwargs)
    wide = torch.utils._pytree.tree_map(lambda x: x.float() if isinstance(x, Tensor) and x.dtype is torch.bfloat16 else x, (args, kwargs))
    found = func(*wide[0], **wide[1])
    if not isinstance(found, tuple):
        return found.bfloat16()
    rest = () if "backward" in str(func) else found[1:]  # sums of rows are fp32 anyway
    return (*(one.bfloat16() for one in found[: len(found) - len(rest)]), *rest)


class Quick(TorchDispatchMode):
    """Products as quickly as can be."""

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in kinds):
            return NotImplemented
        return quickly(func, args, kwargs or {})


class Watch(TorchDispatchMode):
    """Every op with the storages that are born and die around it."""

    def __init__(self) -> None:
        super().__init__()
        self.programs: dict[str, list[RecordedOp]] = {"": []}
        self.sizes: dict[int, int] = {}
        self.moved: dict[int, int] = {}
        self.phase = ""
        self._ids: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}

    def begin(self, name: str) -> None:
        self.programs[name] = []
        self._row("begin")

    @property
    def _rows(self) -> list[RecordedOp]:
        return list(self.programs.values())[-1]

    def _row(self, name: str) -> RecordedOp:
        row = RecordedOp(name, "", self.phase)
        self._rows.append(row)
        return row

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in kinds):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        output = quickly(func, args, kwargs)
        if any(isinstance(tensor, torch._subclasses.FakeTensor) for tensor in tensors_in((args, kwargs, output))):
            return output
        row = self._row(str(func))
        row.by_engine = (
            str(func) == "aten.add.Tensor"
            and torch._C._current_autograd_node() is not None
            and not _in_formula()
            and not next(iter(tensors_in(args)))._is_view()
        )
        row.inputs = tuple(self._ref(tensor, None) for tensor in tensors_in((args, kwargs)))
        row.outputs = tuple(self._ref(tensor, row) for tensor in tensors_in(output))
        return output

    def _ref(self, tensor: Tensor, born: RecordedOp | None) -> types.Ref:
        spec = types.TensorSpec(tuple(tensor.shape), str(tensor.dtype)[6:])
        return types.Ref(self.storage_id(tensor, born), spec)

    def storage_id(self, tensor: Tensor, born: RecordedOp | None = None) -> int:
        storage = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
        key = storage._cdata
        if key in self._ids:
            return self._ids[key]
        number = self._ids[key] = len(self.sizes)
        self.sizes[number] = storage.nbytes() if storage.device.type != "meta" else 0
        if born is not None:
            born.allocates.append(number)
        self._alive[number] = weakref.ref(storage, lambda _: self._died(key, number))
        return number

    def _died(self, key: int, number: int) -> None:
        self._ids.pop(key, None)
        self._alive.pop(number, None)
        if self._rows:
            self._rows[-1].frees.append(number)

    def living(self) -> set[int]:
        return set(self._alive)

    def refill(self, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.itemsize
        if tensor.untyped_storage().size() != size:
            tensor.untyped_storage().resize_(size)
            self.storage_id(tensor, self._row("refill"))

    def empty(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.size():
            number = self._ids.pop(storage._cdata, None)
            storage.resize_(0)
            if number is not None:
                del self._alive[number]
                self._rows[-1].frees.append(number)


@dataclass(frozen=True)
class Seen:
    """What one rank did in its second step."""

    peaks: Mapping[str, int]
    """compute and update → most bytes alive at once."""
    messages: Mapping[tuple[str, int, int], int]
    """(kind, ranks, bytes of the larger buffer) → how often."""
    left: int
    """Bytes that outlive the step and were not there before it."""
    rows: list[RecordedOp] = field(default_factory=list, repr=False)


@contextmanager
def place(plan: Plan, rank: int) -> Iterator[Ranks]:
    """A rank of the plan's world, all of whose messages go nowhere."""
    world = plan.mesh.world
    if world > 1:
        dist.init_process_group(backend="fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        mesh = form(plan.mesh, "cpu")
        yield Ranks(rank=rank, world=world, local_rank=0, device=torch.device("cpu"), mesh=mesh, sizes=plan.mesh)
    finally:
        if world > 1:
            dist.destroy_process_group()


def run(build: Callable[[], Workload], plan: Plan, rank: int = 0) -> Seen:
    """Two steps of one rank; what the second one did."""
    watch = Watch()
    torch.manual_seed(0)
    with place(plan, rank) as ranks, ExitStack() as stack:
        for name, replacement in (("alloc_storage", watch.refill), ("free_storage", watch.empty)):
            stack.enter_context(mock.patch.object(_fsdp_param, name, replacement))
            group = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
            if name == "alloc_storage":
                stack.enter_context(mock.patch(f"{group}.{name}", replacement, create=True))
        if plan.mesh.pp > 1:
            _alone(stack, plan)
        if plan.offloads:  # nobody else to ask
            stack.enter_context(mock.patch("foretell.runtime.offload.shards.agreed", return_value=None))
        workload = build()
        batches = [workload.batch, *(_like(workload.batch) for _ in range(plan.accumulate - 1))]
        job = apply(workload, plan, ranks)
        del workload
        return _two_steps(job, batches, watch)


def _like(batch: Any) -> Any:
    """Another micro-batch: storages of its own, and nothing else of it matters."""
    return torch.utils._pytree.tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, batch)


def _alone(stack: ExitStack, plan: Plan) -> None:
    """What ranks of a pipeline tell each other before the first step is known here: shapes, and that all know them."""
    from torch.distributed.pipelining import schedules

    from foretell.runtime.parallel.pipeline.stages import RankStages

    def agreed(_: Any, stages: list[Any], *args: Any) -> None:
        for stage in stages:
            stage._inference_mode = schedules.InferenceMode.STATIC

    if hasattr(schedules._PipelineSchedule, "_warmup_p2p"):
        stack.enter_context(mock.patch.object(schedules._PipelineSchedule, "_warmup_p2p", agreed))

    def forms(stages: RankStages, _: Any) -> Any:
        """What crosses, in the dtype that FSDP2 computes in, of this rank's positions."""
        low = plan.precision == "bf16-mixed" and plan.mesh.spread > 1

        def seen(form: Any) -> Any:
            samples, positions, *rest = form.shape
            dtype = torch.bfloat16 if low and form.dtype is torch.float32 else form.dtype
            return replace(form, shape=(samples, positions // plan.mesh.cp, *rest), dtype=dtype)

        return tuple(tuple(map(seen, one)) for one in stages.crossing)

    stack.enter_context(mock.patch.object(RankStages, "_find_forms", forms))


def _two_steps(job: Job, batches: list[Any], watch: Watch) -> Seen:
    split = job.plan.mesh.tp * job.plan.mesh.cp > 1  # those must not be looked at when they are first called
    with nullcontext() if split else Quick():
        _step(job, batches, watch, "warm")
    for tensor in [*job.parameters(), *(b for part in job.parts for b in part.buffers()), *tensors_in(batches)]:
        if not isinstance(tensor, torch._subclasses.FakeTensor) and tensor.device.type == "cpu":
            watch.storage_id(tensor)
    if job.moved is not None:
        _know(job.moved, watch)
    with watch:
        _step(job, batches, watch, "first")
        before = watch.living()
        _step(job, batches, watch, "second")
        left = sum(watch.sizes[number] for number in watch.living()) - sum(watch.sizes[number] for number in before)
    _add_in_place(watch)  # type: ignore[arg-type]
    rows = watch.programs["second"]
    peaks = highest(rows, {watch.moved.get(number, number) for number in before}, watch.sizes)
    return Seen(peaks, messages(rows), left, rows)


def _know(moved: Offloaded, watch: Watch) -> None:
    """What an optimizer has from the beginning, used in a step or not; host memory is none of the device's bytes."""
    for tensor in tensors_in([moved._steps, moved.store.kept, [slot.kept for slot in moved.store.slots], moved.store.wide, moved.store.wide_at_home]):
        watch.storage_id(tensor)
    if moved.arena is not None:
        watch.sizes[watch.storage_id(moved.arena._bytes)] = 0


def _step(job: Job, batches: list[Any], watch: Watch, name: str) -> None:
    watch.phase = "compute"
    watch.begin(name)
    loss = job.backward(batches)
    watch.phase = "update"
    job.update(loss)


def highest(rows: list[RecordedOp], alive: set[int], sizes: Mapping[int, int]) -> dict[str, int]:
    """Phase → most bytes alive at once."""
    peaks: dict[str, int] = {}
    live = sum(sizes[number] for number in alive)
    for row in rows:
        live += sum(sizes[number] for number in row.allocates if number not in alive)
        alive.update(row.allocates)
        peaks[row.phase] = max(peaks.get(row.phase, 0), live)
        live -= sum(sizes[number] for number in row.frees if number in alive)
        alive.difference_update(row.frees)
    return peaks


def messages(rows: list[RecordedOp]) -> dict[tuple[str, int, int], int]:
    found: dict[tuple[str, int, int], int] = {}
    for row in rows:
        kind = MESSAGES.get(row.name)
        if kind is None:
            assert not row.name.startswith(("c10d.", "_c10d")) or "wait_tensor" in row.name, row.name
            continue
        sizes = [ref.spec.nbytes for ref in (*row.inputs, *row.outputs)]
        ranks = max(sizes) // max(1, min(sizes)) if kind in ("all_gather", "reduce_scatter") else 0
        key = (kind, ranks, max(sizes))
        found[key] = found.get(key, 0) + 1
    return found
