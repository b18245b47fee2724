"""What a script finds around it: a device, data that is real, processes and a network that are not there.

    torch.cuda, autocast("cuda"), moves    as everywhere in a trace (trace/devices.py), for libraries too
    DataLoader                             reads for real, in this process
    torch.distributed, mp.spawn            one rank of as many as the launcher would start (trace/wrappers.py)
    from_pretrained                        without weights: the model of its configuration, where that is at hand
    fork, sockets                          refused, with the line that asked
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from foretell.errors import ModelError
from foretell.trace.devices import is_elsewhere, replaced
from foretell.trace.load import is_users
from foretell.trace.recorder import Recorder
from foretell.trace.script.words import Script

_IN_THIS_PROCESS = {
    "num_workers": 0, "pin_memory": False, "prefetch_factor": None, "persistent_workers": False, "timeout": 0, "multiprocessing_context": None,
}  # fmt: skip
"""Settings of a loader that reads here."""


_THERE = "_foretell_on_device"


class World:
    """What is on the device, how products are computed there, and what was taken for something else."""

    def __init__(self, device: str = "cuda") -> None:
        self.device = device
        """cuda or cpu: what the step runs on."""
        self.moved: list[weakref.ref[Tensor]] = []
        self.autocast = ""
        self.scales = False
        self.batch_sizes: list[int] = []
        self.row: list[list[Any]] = []
        """dtype and sizes of the tensors that a loader gave last."""
        self.notes: list[str] = []
        self.options: list[tuple[str, int]] = []
        """Whole numbers that its command line has options for, and their values."""
        self.batch: tuple[int, int] | None = None
        """A loader's batch size, and what is taken instead."""

    def on_device(self, module: nn.Module, placed: Iterable[weakref.ref[Tensor]]) -> tuple[Tensor, ...]:
        """Tensors that were moved to the device, or made there, and are alive, but for those of the model."""
        own = {id(one) for one in (*module.parameters(), *module.buffers())}
        found = [tensor for one in (*self.moved, *placed) if (tensor := one()) is not None and id(tensor) not in own]
        return tuple({id(one): one for one in found}.values())

    def precision(self, module: nn.Module) -> str:
        if self.autocast:
            return f"{self.autocast}-autocast"
        dtypes = {one.dtype for one in module.parameters() if one.requires_grad}
        return "bf16" if dtypes == {torch.bfloat16} else "fp32"


@contextmanager
def as_on_a_device(script: Script, recorder: Recorder, device: str = "cuda", batch: tuple[int, int] | None = None) -> Iterator[World]:
    """Until the end of the block."""
    world = World(device)
    world.batch = batch
    changes = (
        *_moves(world, recorder), *_data(world, recorder), *_amp(world), *_processes(world), *_network(script), *_pretrained(world),
        *_arguments(world),
    )  # fmt: skip
    with _environment(script), replaced(changes):
        yield world


@contextmanager
def _environment(script: Script) -> Iterator[None]:
    """What a launcher says to its processes."""
    more = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "disabled"}
    if script.ranks != 1:
        ranks, each = str(script.ranks or 1), str(script.ranks_per_node or 1)
        more |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": each, "GROUP_RANK": "0",
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}  # fmt: skip
    before = {key: os.environ.get(key) for key in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key, None) if value is None else os.environ.__setitem__(key, value)


def _moves(world: World, recorder: Recorder) -> Iterator[tuple[Any, str, Any]]:
    to, cuda = Tensor.to, Tensor.cuda

    def copied(tensor: Tensor) -> Tensor:
        """On the device beside the one in host memory, which may live longer or shorter; what is there already stays."""
        if not isinstance(tensor, FakeTensor):
            made = recorder.taken_in(tensor)
        elif isinstance(tensor, nn.Parameter) or tensor.requires_grad or recorder._rows is not None or hasattr(tensor, _THERE):
            return tensor
        else:
            made = tensor.clone()
        setattr(made, _THERE, True)
        world.moved.append(weakref.ref(made))
        return made

    def move(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        made = to(tensor, *args, **kwargs)
        return copied(made) if (args and is_elsewhere(args[0])) or is_elsewhere(kwargs.get("device")) else made

    def to_cuda(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return copied(cuda(tensor, *args, **kwargs))

    yield Tensor, "to", move
    yield Tensor, "cuda", to_cuda


@contextmanager
def _in_host_memory(recorder: Recorder) -> Iterator[None]:
    """Data is read for real, and what is made of it is no work of the device."""
    rows, recorder._rows = recorder._rows, None
    try:
        with unset_fake_temporarily():
            yield
    finally:
        recorder._rows = rows


def sizes(batch: Any) -> list[list[Any]]:
    """dtype and sizes of each tensor in a batch, as the meta of a trace has them."""
    return [[str(one.dtype)[6:], *map(int, one.shape)] for one in tree_leaves(batch) if isinstance(one, Tensor)]


def _data(world: World, recorder: Recorder) -> Iterator[tuple[Any, str, Any]]:
    start, iterate = DataLoader.__init__, DataLoader.__iter__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        asked = args[1] if len(args) > 1 else kwargs.get("batch_size")
        if world.batch is not None and asked == world.batch[0]:
            args = (args[0], world.batch[1], *args[2:]) if len(args) > 1 else args
            kwargs = kwargs if len(args) > 1 else {**kwargs, "batch_size": world.batch[1]}
        start(self, *args[:5], **{**kwargs, **{key: value for key, value in _IN_THIS_PROCESS.items() if key in kwargs}})
        if isinstance(self.batch_size, int):
            world.batch_sizes.append(self.batch_size)

    def real(self: Any) -> Iterator[Any]:
        with _in_host_memory(recorder):
            rows = iterate(self)
        while True:
            with _in_host_memory(recorder):
                try:
                    row = next(rows)
                except StopIteration:
                    return
            world.row = sizes(row)
            yield row

    yield DataLoader, "__init__", init
    yield DataLoader, "__iter__", real


def _arguments(world: World) -> Iterator[tuple[Any, str, Any]]:
    parsed = argparse.ArgumentParser.parse_known_args

    def parse(self: Any, *args: Any, **kwargs: Any) -> Any:
        found, rest = parsed(self, *args, **kwargs)
        values = [(max(one.option_strings, key=len), getattr(found, one.dest, None)) for one in self._actions if one.option_strings]
        world.options += [(name, value) for name, value in values if type(value) is int]
        return found, rest

    yield argparse.ArgumentParser, "parse_known_args", parse


def _amp(world: World) -> Iterator[tuple[Any, str, Any]]:
    start, scaler = torch.autocast.__init__, torch.amp.GradScaler.__init__

    def autocast(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, *args: Any, **kwargs: Any) -> None:
        if enabled and (is_elsewhere(device_type) or device_type == world.device):
            world.autocast = {torch.bfloat16: "bf16"}.get(dtype, "fp16")
        start(self, device_type, dtype, enabled, *args, **kwargs)

    def scaling(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        scaler(self, "cpu" if is_elsewhere(device) else device, *args, **kwargs)
        world.scales = world.scales or self._enabled

    yield torch.autocast, "__init__", autocast
    yield torch.amp.GradScaler, "__init__", scaling


# --- what is not there -------------------------------------------------------------------------------------------------


def asker() -> str:
    """The line of the script, or of a file of the user's, that asks."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "a library"


def _processes(world: World) -> Iterator[tuple[Any, str, Any]]:
    def spawn(function: Callable[..., Any], args: Any = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
        world.notes.append(f"{asker()} starts {nprocs} processes: the first of them is followed")
        function(0, *args)

    def forked() -> int:
        raise ModelError(f"{asker()} forks, and a script that is followed has one process", "start its processes only after the first step")

    import torch.multiprocessing

    yield torch.multiprocessing, "spawn", spawn
    yield torch.multiprocessing.spawn, "spawn", spawn
    yield os, "fork", forked


def _network(script: Script) -> Iterator[tuple[Any, str, Any]]:
    connect = socket.socket.connect

    def refuse(*_: Any, **__: Any) -> Any:
        raise ConnectionError(f"{asker()} of {script.name} needs the network; a script that is followed has none: keep what it downloads at hand")

    def connected(self: Any, address: Any) -> Any:
        return connect(self, address) if self.family not in (socket.AF_INET, socket.AF_INET6) else refuse()

    yield socket.socket, "connect", connected
    yield socket, "getaddrinfo", refuse


def _pretrained(world: World) -> Iterator[tuple[Any, str, Any]]:
    """Weights that are not at hand are not needed: the model of the configuration has the same bytes."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return
    plain = modeling.PreTrainedModel.from_pretrained.__func__

    def from_pretrained(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("config")
        with contextlib.suppress(Exception):
            config = config or cls.config_class.from_pretrained(name)
        if config is None:
            return plain(cls, name, *args, **kwargs)
        world.notes.append(f"weights of {name} are not read: the model is made from its configuration")
        dtype = kwargs.get("dtype") or kwargs.get("torch_dtype")
        model = cls(config)
        return model.to(dtype) if isinstance(dtype, torch.dtype) else model

    yield modeling.PreTrainedModel, "from_pretrained", classmethod(from_pretrained)
