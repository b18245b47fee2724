"""The step of one rank of a split model, traced: its own part of every layer or sample, and the messages between ranks.

Layers are split by `runtime.parallel.tensor.split` and positions by `runtime.parallel.context.positions` themselves, on fake tensors and in a process
group whose messages go nowhere, so what is costed is what runs. Messages become ops of foretell's own, with the mesh
axis and the number of ranks. Of ranks that share positions the last is traced: where attention is causal it does most.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import prod
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from foretell.errors import ForetellError, UserError
from foretell.lower.context import WORK, work_of_all
from foretell.lower.expert import EXPERTS
from foretell.lower.tensor import SPLIT_STREAM
from foretell.plan.context import ContextSplit, share
from foretell.plan.tensor.derive import Derived, derive, refusal
from foretell.plan.tensor.types import Setting
from foretell.runtime.check.dry_run import DryRun, dry_running
from foretell.runtime.parallel.context.exchange import ContextTeam
from foretell.runtime.parallel.context.positions import ContextParallel, context_of
from foretell.runtime.parallel.expert import experts as expert
from foretell.runtime.parallel.tensor import split as tensor
from foretell.runtime.parallel.tensor import values as tensor_values
from foretell.runtime.parallel.tensor.exchange import TensorGroup
from foretell.trace.cuda import attention as cuda_attention
from foretell.trace.cuda.select import cuda_choices, real_masks
from foretell.trace.flow.record import record
from foretell.trace.fold import deep, extend
from foretell.trace.fold.blocks import find_blocks
from foretell.trace.load.model import Source, load
from foretell.trace.recipe import Recipe
from foretell.trace.record import capture as capturing
from foretell.trace.record import step as step_of
from foretell.trace.record.attributes import tensors_in
from foretell.trace.record.capture import no_initialisation
from foretell.trace.record.collection import no_collection
from foretell.trace.record.recorder import RecordedOp, Recorder
from foretell.trace.record.step import Step, Workload
from foretell.trace.types import Op, Program, Trace

FOREACH = [Tensor, torch.nn.Parameter, FakeTensor, DTensor]
"""What optimizers and clipping take lists of on CUDA."""
MESSAGES = {
    "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
}  # fmt: skip
WAIT = "foretell.tensor_wait"


def trace_split(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a request whose `tp` says over how many ranks to split, and how."""
    from foretell.trace.load.model import notes, user_files
    from foretell.trace.sandbox.blame import step_error
    from foretell.trace.store.cache import file_hashes
    from foretell.trace.store.file import dumps

    source, recipe = Source(**asked["source"]), Recipe.from_json(asked["recipe"])
    wish: dict[str, Any] = {"ranks": 1, "sequence": True, "loss": True, "rules": {}, **asked.get("tp", {})}
    try:
        ranks, context = int(wish.pop("ranks")), int(asked.get("cp", 1))
        wish |= {"capability": tuple(asked["capability"]) or None, "hints": asked["hints"], "context": context}
        wish["experts"] = int(asked.get("ep", 1))
        trace, derived = capture_split_deep(lambda: load(source).summed(), recipe, ranks, **wish)
        if context > 1:
            first, _ = capture_split_deep(lambda: load(source).summed(), recipe, ranks, **wish, context_rank=0)
            trace = replace(trace, meta={**trace.meta, WORK: work_of_all(first, trace, context)})
    except ForetellError:
        raise
    except (Exception, SystemExit) as error:
        raise step_error(source.model, error) from error
    told = {"notes": [*derived.notes], "split": list(derived.report())} if derived else {"notes": []}
    return {"text": dumps(trace), "files": file_hashes(user_files()), **told, "notes": [*notes(), *told["notes"]]}


def capture_split_deep(
    build: Callable[[], Workload], recipe: Recipe, ranks: int, **wishes: Any
) -> tuple[Trace, Derived | None]:  # fmt: skip
    """What `capture_split` returns, sooner where the model is one deep stack of equal blocks (see `trace.fold.deep`)."""
    try:
        return _extended(build, recipe, ranks, wishes)
    except UserError:
        raise
    except Exception:  # a doubt, or what user code raises on a shortened model
        return capture_split(build, recipe, ranks, **wishes)


def _extended(
    build: Callable[[], Workload], recipe: Recipe, ranks: int, wishes: Mapping[str, Any]
) -> tuple[Trace, Derived | None]:
    if wishes.get("hints"):
        raise extend.Doubt("hints may name single blocks")
    with no_collection(), Recorder() as recorder:
        with no_initialisation():
            workload = build()
        path, depth = deep.find_stack(workload.model)
        blocks = find_blocks(workload.model)
        deep.probe_depth(recorder, workload, path, recipe)
        spread = wishes.get("experts", 1)
        stacks = [one.path for one in expert.find(workload.model, spread, trial=False)] if spread > 1 else []
        del workload
    found = [
        capture_split(lambda d=d: deep.shortened_to(build(), path, depth, d), recipe, ranks, **wishes)  # type: ignore[misc]
        for d in deep.SHALLOW
    ]
    alike = [replace(one, meta={key: one.meta[key] for key in one.meta if key != EXPERTS}) for one, _ in found]
    trace = extend.extend(alike, depth - deep.SHALLOW[0])
    if trace.meta["blocks"] != blocks:
        raise extend.Doubt("the blocks found are not those of the full model")
    return replace(trace, meta={**trace.meta, **({EXPERTS: stacks} if stacks else {})}), found[0][1]


def capture_split(
    build: Callable[[], Workload], recipe: Recipe, ranks: int, *, sequence: bool = True, loss: bool = True,
    rules: Mapping[str, str] | None = None, capability: tuple[int, int] | None = (9, 0),
    hints: Mapping[str, float] | None = None, context: int = 1, context_rank: int | None = None, experts: int = 1,
) -> tuple[Trace, Derived | None]:  # fmt: skip
    """Trace one rank of a model whose layers are split over `ranks`, positions over `context` and experts over `experts`,
    and how its layers are split; raises why where it cannot be. Without a split of layers the second is None.
    `context_rank` is the one that is traced, the last if not said."""
    at = context - 1 if context_rank is None else context_rank
    build = build if recipe.adapters is None else functools.partial(_adapted, build, recipe)
    derived = _derived(build, ranks, sequence, loss, rules) if ranks > 1 else None
    shared = _shared(build, context) if context > 1 else None
    recorder = _Recorder(hints)
    axes = {"cp": context, "ep": experts, "tp": ranks}
    with _group(axes, at * ranks) as mesh, no_collection(), _on_fakes(recorder), recorder, ExitStack() as stack:
        if capability:
            stack.enter_context(cuda_choices(recorder, capability, torch.__version__))
        stack.enter_context(dry_running(_dry_run(recorder)))
        with no_initialisation():
            workload = build()
        if derived is not None:
            tensor.apply(workload.model, derived, TensorGroup(mesh["tp"], derived.setting))
            recorder.groups[mesh["tp"].get_group().group_name] = ("tp", ranks)
        if shared is not None:
            team = ContextTeam(mesh["cp"], Setting(context, sequence=False, context=True))
            recorder.groups[team.name] = ("cp", context)
            workload = _on_positions(workload, context_of(workload.batch, shared, team))
        stacks: tuple[expert.Experts, ...] = ()
        if experts > 1:
            stacks = expert.find(workload.model, experts, trial=False)
            _refuse_routed(stacks)
            spread = expert.apply(workload.model, stacks, mesh["ep"], plain=True)
            recorder.groups[spread.crew.name] = ("ep", experts)
        step = Step(workload, recipe, device_type="cpu", observer=recorder, adapted=recipe.adapters is not None)
        resident = capturing.resident_storages(recorder, step.workload)
        with recorder.modules(workload.model), real_masks(recorder):
            roles = capturing.train_once(recorder, step, resident)
    trace = capturing.finished(recorder, step, roles, capability, torch.__version__)
    meta = {**trace.meta, "ranks": ranks * context * experts}
    if derived is not None:
        meta |= {"tp": ranks, SPLIT_STREAM: bool(derived.sequence)}
    if shared is not None:
        meta |= {"cp": context}
    if stacks:
        meta |= {"ep": experts, EXPERTS: [one.path for one in stacks]}
    return replace(trace, programs=_named(trace.programs), meta=meta), derived


def _adapted(build: Callable[[], Workload], recipe: Recipe) -> Workload:
    """With the recipe's adapters, as a run puts them on a model before it is split."""
    workload = build()
    step_of.put_adapters(workload.model, recipe)
    return workload


def _refuse_routed(stacks: Sequence[expert.Experts]) -> None:
    for one in stacks:
        if one.kind == expert.ROUTED:
            raise UserError(
                f"{one.path} gives each expert as many rows as choose it, which only a run knows",
                "run it and compare, or trace it with a capacity: no prediction can be made",
            )


def _dry_run(recorder: Recorder) -> DryRun:
    """Attention from the last positions with the kernel that CUDA would take."""

    def lower_right(query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]) -> Tensor | None:
        assert recorder.capability is not None
        dropout, grouped, scale = options["dropout_p"], options["enable_gqa"], options["scale"]
        able = cuda_attention.takes_flash(query, key, value, None, dropout, False, grouped, recorder.capability, True)
        return cuda_attention.run_flash(query, key, value, dropout, True, scale) if able else None

    return DryRun(lower_right if recorder.capability is not None else None)


def _on_positions(workload: Workload, shared: ContextParallel) -> Workload:
    """Steps take this rank's positions of the batch."""
    return replace(workload, around=lambda one: shared.finish(step_of.compute_loss(replace(one, batch=shared.open(one.batch)))))


def _derived(
    build: Callable[[], Workload], ranks: int, sequence: bool, loss: bool, rules: Mapping[str, str] | None
) -> Derived:
    with torch.device("meta"):
        workload = build()
    own = getattr(workload.model, "_tp_plan", None)
    derived = derive(record(workload), ranks, sequence=sequence, loss=loss, rules=rules, own=own)
    trouble = None if rules else refusal(derived)
    if trouble is not None:
        raise trouble
    return derived


def _shared(build: Callable[[], Workload], context: int) -> ContextSplit:
    with torch.device("meta"):
        workload = build()
    return share(record(workload), context)


class _Recorder(Recorder):
    """Sees through DTensors: their storage is that of this rank's part, and what is done to them is done by DTensor."""

    def __init__(self, hints: Mapping[str, float] | None = None) -> None:
        super().__init__(hints)
        self.groups: dict[str, tuple[str, int]] = {}
        """Name of a process group → its axis of the mesh and number of ranks."""
        self._members: tuple[str, int] = ("tp", 1)

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in kinds):
            return NotImplemented
        if func.namespace == "_c10d_functional":
            named = [value for value in args if isinstance(value, str) and value in self.groups]
            self._members = self.groups[named[-1]] if named else self._members
        with torch._C.DisableTorchFunctionSubclass(), _bare((args, kwargs)):
            return super().__torch_dispatch__(func, kinds, args, kwargs)

    def record(self, name: str, inputs: Any, outputs: Any, attrs: tuple[Any, ...] = ()) -> RecordedOp:
        if name.startswith("_c10d_functional."):
            attrs = (f"axis:{self._members[0]}", f"ranks:{self._members[1]}")
        with torch._C.DisableTorchFunctionSubclass(), _bare((inputs, outputs)):  # kernels of CUDA are recorded past dispatch
            return super().record(name, inputs, outputs, attrs)

    def storage_id(self, tensor: Tensor, born: Any = None) -> int:
        return super().storage_id(tensor._local_tensor if isinstance(tensor, DTensor) else tensor, born)


@contextmanager
def _bare(values: Any) -> Iterator[None]:
    """Parts that are seen as the whole are fake tensors like any other here: backward meets them as they were saved."""
    seen = {id(x): x for x in tensors_in(values) if isinstance(x, tensor_values.SplitTensor) and isinstance(x, FakeTensor)}
    kinds = [(x, type(x)) for x in seen.values()]
    for x, _ in kinds:
        x.__class__ = FakeTensor
    try:
        yield
    finally:
        for x, kind in kinds:
            x.__class__ = kind


@contextmanager
def _on_fakes(recorder: Recorder) -> Iterator[None]:
    """Lists of DTensors are lists as on CUDA, and what DTensor computes of shapes is no op."""
    inner = ShardingPropagator._propagate_tensor_meta_non_cached

    def unseen(*args: Any, **kwargs: Any) -> Any:
        with recorder.muted():
            return inner(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen))
        for module in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
            stack.enter_context(mock.patch(f"{module}._foreach_supported_types", FOREACH))
        yield


@contextmanager
def _group(axes: Mapping[str, int], rank: int) -> Iterator[DeviceMesh]:
    """The mesh of these axes, as one rank sees it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    sizes = {axis: size for axis, size in axes.items() if size > 1}
    dist.init_process_group(backend="fake", store=FakeStore(), rank=rank, world_size=prod(sizes.values()))
    try:
        yield init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    finally:
        dist.destroy_process_group()


def _named(programs: Mapping[str, Program]) -> dict[str, Program]:
    """Messages as foretell's own ops: what goes in, what comes out, over which axis. Clipping sums its own way."""
    return {name: Program(name, tuple(map(_message, program.ops))) for name, program in programs.items()}


def _message(op: Op) -> Op:
    if not op.name.startswith("_c10d_functional."):
        return op
    kind = op.name.split(".")[1]
    if kind == "wait_tensor":
        return replace(op, name=WAIT, flops=0)
    name = MESSAGES[kind] if op.phase != "update" else "tensor_wait"
    return replace(op, name=f"foretell.{name}", flops=0)
