"""The step of one rank of a tensor-split model, traced: its own part of every layer, and the messages between ranks.

The model is split by `runtime.tensor` itself, on fake tensors and in a process group whose messages go nowhere, so what
is costed is what runs. Messages become ops of foretell's own, with the mesh axis and the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from foretell.cost.tensor import SPLIT_STREAM
from foretell.errors import ForetellError, UserError
from foretell.plan.tensor import Derived, derive, refusal
from foretell.plan.tensor_types import Setting
from foretell.runtime import tensor, tensor_values
from foretell.runtime.tensor_ways import Team
from foretell.trace import capture as capturing
from foretell.trace import deep
from foretell.trace.blocks import find_blocks
from foretell.trace.capture import no_initialisation
from foretell.trace.collection import no_collection
from foretell.trace.cuda import cuda_choices, real_masks
from foretell.trace.dataflow import record
from foretell.trace.load import Source, load
from foretell.trace.recipe import Recipe
from foretell.trace.recorder import Recorder, _tensors
from foretell.trace.step import Step, Workload
from foretell.trace.types import Op, Program, Trace

FOREACH = [Tensor, torch.nn.Parameter, FakeTensor, DTensor]
"""What optimizers and clipping take lists of on CUDA."""
MESSAGES = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "all_reduce": "all_reduce"}
WAIT = "foretell.tensor_wait"


def trace_split(asked: Mapping[str, Any], target: Path) -> dict[str, Any]:
    """Answer a request whose `tp` says over how many ranks to split, and how."""
    from foretell.trace.cache import file_hashes
    from foretell.trace.file import save
    from foretell.trace.load import notes, step_error, user_files

    source, recipe = Source(**asked["source"]), Recipe.from_json(asked["recipe"])
    wish = asked["tp"]
    try:
        trace, derived = capture_split_deep(
            lambda: load(source), recipe, int(wish["ranks"]), sequence=wish["sequence"], loss=wish["loss"],
            rules=wish["rules"], capability=tuple(asked["capability"]) or None, hints=asked["hints"],
        )  # fmt: skip
    except ForetellError:
        raise
    except Exception as error:
        raise step_error(source.model, error) from error
    save(trace, target)
    return {"files": file_hashes(user_files()), "notes": [*notes(), *derived.notes], "split": list(derived.report())}


def capture_split_deep(
    build: Callable[[], Workload], recipe: Recipe, ranks: int, **wishes: Any
) -> tuple[Trace, Derived]:  # fmt: skip
    """What `capture_split` returns, sooner where the model is one deep stack of equal blocks (see `trace.deep`)."""
    try:
        return _extended(build, recipe, ranks, wishes)
    except UserError:
        raise
    except Exception:  # a doubt, or what user code raises on a shortened model
        return capture_split(build, recipe, ranks, **wishes)


def _extended(
    build: Callable[[], Workload], recipe: Recipe, ranks: int, wishes: Mapping[str, Any]
) -> tuple[Trace, Derived]:
    if wishes.get("hints"):
        raise deep.Doubt("hints may name single blocks")
    with no_collection(), Recorder() as recorder:
        with no_initialisation():
            workload = build()
        path, depth = deep.find_stack(workload.model)
        blocks = find_blocks(workload.model)
        deep._probe(recorder, workload, path, recipe)
        del workload
    found = [
        capture_split(lambda d=d: deep._shortened(build(), path, depth, d), recipe, ranks, **wishes)  # type: ignore[misc]
        for d in deep.SHALLOW
    ]
    trace = deep.extend([shallow for shallow, _ in found], depth - deep.SHALLOW[0])
    if trace.meta["blocks"] != blocks:
        raise deep.Doubt("the blocks found are not those of the full model")
    return trace, found[0][1]


def capture_split(
    build: Callable[[], Workload], recipe: Recipe, ranks: int, *, sequence: bool = True, loss: bool = True,
    rules: Mapping[str, str] | None = None, capability: tuple[int, int] | None = (9, 0),
    hints: Mapping[str, float] | None = None,
) -> tuple[Trace, Derived]:  # fmt: skip
    """Trace rank 0 of a model split over `ranks`, and how it was split; raises why where it cannot be."""
    derived = _derived(build, ranks, sequence, loss, rules)
    recorder = _Recorder(hints)
    with _group(ranks) as mesh, no_collection(), _on_fakes(recorder), recorder, ExitStack() as stack:
        if capability:
            stack.enter_context(cuda_choices(recorder, capability))
        with no_initialisation():
            workload = build()
        tensor.apply(workload.model, derived, Team(mesh, Setting(ranks, sequence, loss)))
        step = Step(workload, recipe, device_type="cpu", observer=recorder)
        resident = capturing._resident(recorder, step.workload)
        with recorder.modules(workload.model), real_masks():
            roles = capturing._train(recorder, step, resident)
    trace = capturing._finish(recorder, step, roles, capability)
    meta = {**trace.meta, "tp": ranks, "ranks": ranks, SPLIT_STREAM: bool(derived.sequence)}
    return replace(trace, programs=_named(trace.programs, ranks), meta=meta), derived


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


class _Recorder(Recorder):
    """Sees through DTensors: their storage is that of this rank's part, and what is done to them is done by DTensor."""

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in kinds):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass(), _bare((args, kwargs)):
            return super().__torch_dispatch__(func, kinds, args, kwargs)

    def storage_id(self, tensor: Tensor, born: Any = None) -> int:
        return super().storage_id(tensor._local_tensor if isinstance(tensor, DTensor) else tensor, born)


@contextmanager
def _bare(values: Any) -> Iterator[None]:
    """Parts that are seen as the whole are fake tensors like any other here: backward meets them as they were saved."""
    seen = {id(x): x for x in _tensors(values) if isinstance(x, tensor_values.SplitTensor) and isinstance(x, FakeTensor)}
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
    """Ranks draw no seeds, lists of DTensors are lists as on CUDA, and what DTensor computes of shapes is no op."""
    inner = ShardingPropagator._propagate_tensor_meta_non_cached

    def unseen(*args: Any, **kwargs: Any) -> Any:
        with recorder.muted():
            return inner(*args, **kwargs)

    @contextmanager
    def no_seed(team: Team, device: torch.device) -> Iterator[None]:
        yield

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen))
        stack.enter_context(mock.patch.object(Team, "own_random", no_seed))
        stack.enter_context(mock.patch.object(tensor_values, "_part", lambda part: part))  # the recorder sees through
        for module in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
            stack.enter_context(mock.patch(f"{module}._foreach_supported_types", FOREACH))
        yield


@contextmanager
def _group(ranks: int) -> Iterator[DeviceMesh]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(backend="fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


def _named(programs: Mapping[str, Program], ranks: int) -> dict[str, Program]:
    """Messages as foretell's own ops: what goes in, what comes out, over which axis. Clipping sums its own way."""
    return {
        name: Program(name, tuple(_message(op, ranks) for op in program.ops)) for name, program in programs.items()
    }


def _message(op: Op, ranks: int) -> Op:
    if not op.name.startswith("_c10d_functional."):
        return op
    kind = op.name.split(".")[1]
    if kind == "wait_tensor":
        return replace(op, name=WAIT, flops=0)
    name = MESSAGES[kind] if op.phase != "update" else "tensor_wait"
    return replace(op, name=f"foretell.{name}", attrs=("axis:tp", f"ranks:{ranks}"), flops=0)
