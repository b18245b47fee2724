"""One rank of a script's process group: it says that the others are there, and sends nothing.

    init_process_group                   PyTorch's fake process group, of as many ranks as were launched
    all_reduce, broadcast, gather, ...   leave tensors as they are; inside a step their bytes are written down
    DistributedDataParallel              the module inside; how it was wrapped, and which micro-batches sum (lower/ddp.py)
    fully_shard                          see `shards`
    tensor and pipeline parallelism      refused, with the line that asked
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import device_mesh, distributed_c10d
from torch.nn.parallel.distributed import DistributedDataParallel

from foretell.errors import ModelError
from foretell.trace.load.model import is_users
from foretell.trace.record.recorder import Recorder
from foretell.trace.script.words import AFTER, ScriptCommand

_PLAIN = {name: getattr(dist, name) for name in ("init_process_group", "is_initialized", "destroy_process_group", "get_rank", "get_world_size")}
"""As PyTorch has them: other stand-ins may lie over them later."""
_OWN_MESH = device_mesh.DeviceMesh.__init__
_TORCH = os.path.dirname(torch.__file__)
_MOST = 2**20
"""Ranks of a group."""
_SUMS = {"all_reduce": "all_reduce", "reduce": "all_reduce", "broadcast": "all_gather", "all_gather_into_tensor": "all_gather",
         "_all_gather_base": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "_reduce_scatter_base": "reduce_scatter",
         "all_to_all_single": "all_to_all", "scatter": "all_gather", "gather": "all_gather"}  # fmt: skip
"""What code calls → what is written down."""
_TAKES = ("broadcast_object_list", "scatter_object_list", "recv", "irecv", "recv_object_list")
"""What gives a rank something of another's that shapes do not say."""


def asker() -> str:
    """The line of the script, or of a file of the user's, that asks."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return "a library"


@dataclass
class ScriptRanks:
    """The group that a script forms, and what it spreads over it."""

    rank: int = 0
    world: int = 1
    wrapped: list[Replica] = field(default_factory=list)
    units: list[Any] = field(default_factory=list)
    """Calls of `fully_shard`, in order (`shards.Unit`)."""
    derived: dict[int, tuple[list[int], str]] = field(default_factory=dict)
    """Storage → shape and dtype of what was made from sharded parameters before the step, and is sharded as they are."""
    summed: dict[int, bool] = field(default_factory=dict)
    """Micro-batch, counted from 1 → whether its gradients are summed over ranks."""
    taken: str = ""
    """Line that takes from another rank what is not known here."""
    stepped: str = ""
    """Line of the first step."""
    tell: Callable[[str], None] = lambda _: None
    sends: bool = False
    """Whether the step itself sends something."""

    def ran_backward(self, micro: int) -> None:
        if self.wrapped:
            self.summed[micro] = any(one.sums for one in self.wrapped)

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Errors of a rank that took what another one sends say so: they may come from that."""
        try:
            yield
        except ModelError as error:
            if self.taken:
                raise ModelError(f"{error.problem}, {AFTER} {self.taken}", error.remedy, error.detail) from error
            raise

    def refuse(self, what: str, remedy: str) -> ModelError:
        return ModelError(f"{asker()}: {what}", remedy)


class DoneCollective:
    """Of a collective: done when it was asked for."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(None)
        return future


# --- the group ---------------------------------------------------------------------------------------------------------


def environment(script: ScriptCommand, rank: int) -> dict[str, str]:
    """What a launcher says to its processes; nothing where there is none."""
    if not script.launched:
        return {}
    each = script.ranks_per_node or script.ranks or 1
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank % each), "WORLD_SIZE": str(script.ranks), "LOCAL_WORLD_SIZE": str(each),
        "GROUP_RANK": str(rank // each), "GROUP_WORLD_SIZE": str(script.ranks // each), "ROLE_RANK": str(rank), "ROLE_WORLD_SIZE": str(script.ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0", **script.variables,
    }  # fmt: skip


def group_of(ranks: ScriptRanks, recorder: Recorder, script: ScriptCommand) -> Iterator[tuple[Any, str, Any]]:
    """What a script finds in place of `torch.distributed`."""
    backends: list[str] = []

    def start(backend: Any = None, init_method: Any = None, timeout: Any = None, world_size: int = -1, rank: int = -1, *_: Any, **__: Any) -> None:
        asked = [(rank, "RANK"), (world_size, "WORLD_SIZE")]
        number, world = (given if given >= 0 else _from_environment(name, script) for given, name in asked)
        if not 0 <= number < world <= _MOST:
            raise ValueError(f"rank {number} of {world} is none")
        ranks.rank, ranks.world = number, world
        backends[:] = [str(backend or "nccl").rpartition(":")[2]]
        from torch.testing._internal.distributed.fake_pg import FakeStore

        with recorder.aside():
            _PLAIN["init_process_group"]("fake", store=FakeStore(), rank=number, world_size=world)

    def ensure() -> None:
        if not _PLAIN["is_initialized"]():
            start()

    yield dist, "init_process_group", start
    for name in ("is_initialized", "destroy_process_group", "get_rank", "get_world_size"):
        yield dist, name, _PLAIN[name]
    yield dist, "get_backend", lambda *_: backends[0] if backends else "nccl"
    yield distributed_c10d, "get_backend", lambda *_: backends[0] if backends else "nccl"
    yield dist, "is_nccl_available", lambda: True
    yield dist, "is_torchelastic_launched", lambda: script.launched
    yield dist, "TCPStore", lambda *_, **__: dist.HashStore()
    each = max(1, script.ranks_per_node or script.ranks)
    counted = torch.cuda.device_count
    yield torch.cuda, "device_count", lambda: each if each > 1 and not _is_torchs(sys._getframe(1)) else counted()
    yield from _meshes(recorder, ensure)
    yield from _messages(ranks, recorder)
    yield from _wrappers(ranks)


def _from_environment(name: str, script: ScriptCommand) -> int:
    value = os.environ.get(name, "")
    if not value.isdecimal():
        start = f"-- torchrun --nproc-per-node N {script.name}"
        raise ModelError(f"{asker()}: init_process_group needs {name}, which a launcher sets and nobody did", f"start it as it is meant: {start}")
    return int(value)


def launcher_remedy(script: ScriptCommand, error: BaseException) -> str:
    """What helps a script that asks for what a launcher would have said; empty for other errors."""
    missing = isinstance(error, KeyError) and error.args[0] in environment(replace(script, launched=True), 0)
    return f"that is for its launcher to say: -- torchrun --nproc-per-node N {script.name}" if missing and not script.launched else ""


def _is_torchs(frame: Any) -> bool:
    return str(frame.f_code.co_filename).startswith(_TORCH)


def _meshes(recorder: Recorder, ensure: Callable[[], None]) -> Iterator[tuple[Any, str, Any]]:
    """Real ones, on the CPU: they are numbers of ranks."""

    def outside(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with recorder.aside():
                return plain(*args, **kwargs)

        return call

    plain = device_mesh.init_device_mesh

    def made(device_type: str, mesh_shape: Any, *args: Any, **kwargs: Any) -> Any:
        ensure()
        shape, world = tuple(mesh_shape), _PLAIN["get_world_size"]()
        if prod(shape) != world:
            raise ModelError(f"{asker()}: a mesh of {' x '.join(map(str, shape))} ranks, and {world} are launched", "launch as many as the mesh has")
        kwargs.pop("backend_override", None)
        with recorder.aside():
            return plain("cpu", shape, *args, **kwargs)

    def start(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        ensure()
        with recorder.aside():
            _OWN_MESH(self, "cpu", *args, **kwargs)

    yield device_mesh, "init_device_mesh", made
    yield dist, "init_device_mesh", made
    yield device_mesh.DeviceMesh, "__init__", start
    for name in ("__getitem__", "_flatten", "get_local_rank", "get_coordinate", "get_group"):
        yield device_mesh.DeviceMesh, name, outside(getattr(device_mesh.DeviceMesh, name))


# --- messages ----------------------------------------------------------------------------------------------------------


def _messages(ranks: ScriptRanks, recorder: Recorder) -> Iterator[tuple[Any, str, Any]]:
    def sent(kind: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [one for one in (*args[:2], *kwargs.values()) if isinstance(one, FakeTensor)]
            if tensors and recorder._rows is not None and ranks.world > 1:
                largest = max(tensors, key=lambda one: one.numel() * one.itemsize)
                recorder.record(f"foretell.{kind}", largest, largest, ("axis:world", f"ranks:{ranks.world}"))
                ranks.sends = True
            return DoneCollective() if kwargs.get("async_op") else None

        return call

    def gathered(outputs: list[Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return sent("all_gather")(tensor, **{key: value for key, value in kwargs.items() if key == "async_op"})

    def same_object(found: list[Any], value: Any, *args: Any, **kwargs: Any) -> None:
        found[:] = [value] * len(found)

    def gather_object(value: Any, found: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
        if found is not None:
            found[:] = [value] * len(found)

    def takes(*args: Any, **kwargs: Any) -> Any:
        source = kwargs.get("src", args[1] if len(args) > 1 else 0)
        if ranks.rank != source:
            ranks.taken = ranks.taken or asker()

    calls: dict[str, Callable[..., Any]] = {name: sent(kind) for name, kind in _SUMS.items()}
    calls |= {"all_gather": gathered, "all_gather_object": same_object, "gather_object": gather_object}
    calls |= dict.fromkeys(_TAKES, takes)
    calls |= dict.fromkeys(("barrier", "monitored_barrier", "send", "isend", "reduce_scatter", "all_to_all"), sent("all_gather"))
    for name, call in calls.items():
        yield dist, name, call
        yield distributed_c10d, name, call


# --- wrappers ----------------------------------------------------------------------------------------------------------


class Replica(nn.Module):
    """A module in DistributedDataParallel."""

    ranks: ScriptRanks

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        if not _PLAIN["is_initialized"]():
            raise self.ranks.refuse("DistributedDataParallel before init_process_group", "call init_process_group first")
        given = inspect.signature(DistributedDataParallel.__init__).bind(self, module, *args, **kwargs)
        given.apply_defaults()
        said = given.arguments
        if not any(one.requires_grad for one in module.parameters()):
            raise self.ranks.refuse("DistributedDataParallel of a module without a parameter that learns", "leave that module as it is")
        for name in ("mixed_precision", "device_mesh", "delay_all_reduce_named_params"):
            if said.get(name) is not None:
                raise self.ranks.refuse(f"DistributedDataParallel({name}=...) is not followed yet", "leave that out")
        self.module, self.device_ids, self.dim = module, said["device_ids"], said["dim"]
        self.view, self.unused = bool(said["gradient_as_bucket_view"]), bool(said["find_unused_parameters"])
        self.cap = 0 if said["bucket_cap_mb"] is None else int(said["bucket_cap_mb"] * 2**20)
        self.sends_buffers, self.static_graph = bool(said["broadcast_buffers"]), bool(said["static_graph"])
        self.require_backward_grad_sync = True
        self.nbytes = sum(one.numel() * one.itemsize for one in module.parameters() if one.requires_grad)
        self.sums = False
        """Whether the backward of the last forward sums gradients."""
        self.ranks.wrapped.append(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self.sums = bool(self.require_backward_grad_sync)
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def join(self, *_: Any, **__: Any) -> Any:
        return contextlib.nullcontext()

    def _set_static_graph(self) -> None:
        self.static_graph = True

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        raise self.ranks.refuse(f"a communication hook ({getattr(hook, '__name__', hook)}) has buffers that are not known", "leave it out")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy has buckets of its own."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__ = {name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()}
        self.ranks.wrapped.append(made)
        return made


def _wrappers(ranks: ScriptRanks) -> Iterator[tuple[Any, str, Any]]:
    wrapper = type("DistributedDataParallel", (Replica,), {"ranks": ranks, "__module__": DistributedDataParallel.__module__})
    yield nn.parallel, "DistributedDataParallel", wrapper
    yield nn.parallel.distributed, "DistributedDataParallel", wrapper

    def synced(cls: Any, module: nn.Module, *_: Any) -> nn.Module:
        ranks.tell("SyncBatchNorm is taken for BatchNorm: what it sends is not counted")
        return module

    yield nn.SyncBatchNorm, "convert_sync_batchnorm", classmethod(synced)


def refusal(ranks: ScriptRanks, what: str, remedy: str) -> Callable[..., Any]:
    """A function that is not there for scripts."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise ranks.refuse(what, remedy)

    return refuse
