"""What a script finds around it: a device, data that is real, processes and a network that are not there.

    torch.cuda, autocast("cuda"), moves    as everywhere in a trace (trace/sandbox/devices.py), for libraries too
    DataLoader                             reads for real, in this process
    torch.distributed, mp.spawn            one rank of as many as the launcher would start (ranks.py, shards.py)
    from_pretrained                        without weights: the model of its configuration (`pretrained`)
    fork, sockets                          refused, with the line that asked
"""

from __future__ import annotations

import argparse
import os
import socket
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from foretell.errors import ModelError
from foretell.trace.record.recorder import Recorder
from foretell.trace.sandbox.devices import is_elsewhere
from foretell.trace.sandbox.replaced import replaced
from foretell.trace.script.pretrained import without_weights
from foretell.trace.script.ranks import ScriptRanks, asker, environment, group_of
from foretell.trace.script.shards import precision_of, sharding, whole_tensors
from foretell.trace.script.words import ScriptCommand

_IN_THIS_PROCESS = {
    "num_workers": 0, "pin_memory": False, "prefetch_factor": None, "persistent_workers": False, "timeout": 0, "multiprocessing_context": None,
}  # fmt: skip
"""Settings of a loader that reads here."""


_THERE = "_foretell_on_device"
_DRAWS = torch.get_rng_state().shape
"""Of the state of a generator on the CPU."""


class ScriptWorld:
    """What is on the device, how products are computed there, and what was taken for something else."""

    def __init__(self, device: str = "cuda") -> None:
        self.device = device
        """cuda or cpu: what the step runs on."""
        self.moved: list[weakref.ref[Tensor]] = []
        self.autocast = ""
        self.scales = False
        self.batch_sizes: list[int] = []
        self.loader: tuple[int, int] = (0, 0)
        """That was read last, and its data."""
        self.loads = False
        """Whether a loader was read that gives as many samples as it is told to."""
        self.rows = 0
        """Samples of the batch that was read last."""
        self.row: list[list[Any]] = []
        """dtype and sizes of its tensors."""
        self.options: list[tuple[str, int]] = []
        """Whole numbers that the script's command line has options for, and their values."""
        self.batch: tuple[int, int] | None = None
        """A loader's batch size, and what is taken instead."""
        self.notes: list[str] = []
        self.ranks = ScriptRanks(tell=lambda note: self.notes.append(note) if note not in self.notes else None)

    def on_device(self, module: nn.Module, placed: Iterable[weakref.ref[Tensor]]) -> tuple[Tensor, ...]:
        """Tensors that were moved to the device, or made there, and are alive, but for those of the model."""
        own = {id(one) for one in (*module.parameters(), *module.buffers())}
        found = [tensor for one in (*self.moved, *placed) if (tensor := one()) is not None and id(tensor) not in own]
        return tuple({id(one): one for one in found}.values())

    def precision(self, module: nn.Module) -> str:
        if sharded := precision_of(self.ranks):
            return sharded
        if self.autocast:
            return f"{self.autocast}-autocast"
        dtypes = {one.dtype for one in module.parameters() if one.requires_grad}
        return "bf16" if dtypes == {torch.bfloat16} else "fp32"


@contextmanager
def as_on_a_device(
    script: ScriptCommand, recorder: Recorder, rank: int = 0, device: str = "cuda", batch: tuple[int, int] | None = None
) -> Iterator[ScriptWorld]:
    """Until the end of the block, as one of its ranks."""
    world = ScriptWorld(device)
    world.batch = batch
    changes = (
        *_moves(world, recorder), *_data(world, recorder), *_amp(world), *_processes(world, rank), *_network(script),
        *group_of(world.ranks, recorder, script), *sharding(world.ranks, recorder), *_arguments(world),
    )  # fmt: skip
    with _environment(script, rank), replaced(changes), whole_tensors(), without_weights(world.notes.append, asker):
        yield world


@contextmanager
def _environment(script: ScriptCommand, rank: int) -> Iterator[None]:
    """What a launcher says to its processes."""
    more = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "disabled", **environment(script, rank)}
    before = {key: os.environ.get(key) for key in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key, None) if value is None else os.environ.__setitem__(key, value)


def _moves(world: ScriptWorld, recorder: Recorder) -> Iterator[tuple[Any, str, Any]]:
    to, cuda = Tensor.to, Tensor.cuda

    def copied(tensor: Tensor) -> Tensor:
        """On the device beside the one in host memory, which may live longer or shorter; what is there already stays."""
        if not isinstance(tensor, FakeTensor):
            if tensor.dtype is torch.uint8 and tensor.shape == _DRAWS:
                return tensor  # ranks agree on what they draw; the state is set again from it
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

    def makes(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Of numbers in host memory, a copy on the device."""

        def make(*args: Any, **kwargs: Any) -> Tensor:
            there = is_elsewhere(kwargs.get("device"))
            made = plain(*args, **({**kwargs, "device": None} if there else kwargs))
            return copied(made) if there else made

        return make

    for name in ("as_tensor", "asarray", "tensor"):
        yield torch, name, makes(getattr(torch, name))
    yield Tensor, "to", move
    yield Tensor, "cuda", to_cuda


def sizes(batch: Any) -> list[list[Any]]:
    """dtype and sizes of each tensor in a batch, as the meta of a trace has them."""
    return [[str(one.dtype)[6:], *map(int, one.shape)] for one in tree_leaves(batch) if isinstance(one, Tensor)]


def _data(world: ScriptWorld, recorder: Recorder) -> Iterator[tuple[Any, str, Any]]:
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
        with recorder.aside():
            rows = iterate(self)
        while True:
            with recorder.aside():
                try:
                    row = next(rows)
                except StopIteration:
                    return
                world.loader = (id(self), id(self.dataset))
                world.loads = world.loads or isinstance(self.batch_size, int) or hasattr(self.batch_sampler, "batch_size")
                world.rows, world.row = self.batch_size if isinstance(self.batch_size, int) else rows_of(row), sizes(row)
            yield row

    yield DataLoader, "__init__", init
    yield DataLoader, "__iter__", real


def _arguments(world: ScriptWorld) -> Iterator[tuple[Any, str, Any]]:
    parsed = argparse.ArgumentParser.parse_known_args

    def parse(self: Any, *args: Any, **kwargs: Any) -> Any:
        found, rest = parsed(self, *args, **kwargs)
        values = [(max(one.option_strings, key=len), getattr(found, one.dest, None)) for one in self._actions if one.option_strings]
        world.options += [(name, value) for name, value in values if type(value) is int]
        return found, rest

    yield argparse.ArgumentParser, "parse_known_args", parse


def rows_of(batch: Any) -> int:
    """Samples of a batch, or of what a model is called with: the first size of its first tensor that has one; 0 where there is none."""
    return next((int(one.shape[0]) for one in tree_leaves(batch) if isinstance(one, Tensor) and one.dim() > 0), 0)


def _amp(world: ScriptWorld) -> Iterator[tuple[Any, str, Any]]:
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


def _processes(world: ScriptWorld, rank: int) -> Iterator[tuple[Any, str, Any]]:
    def spawn(function: Callable[..., Any], args: Any = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
        world.ranks.world = max(1, nprocs)
        function(min(rank, nprocs - 1), *args)

    def forked() -> int:
        raise ModelError(f"{asker()} forks, and a script that is followed has one process", "start its processes only after the first step")

    import torch.multiprocessing

    yield torch.multiprocessing, "spawn", spawn
    yield torch.multiprocessing.spawn, "spawn", spawn
    yield os, "fork", forked


def _network(script: ScriptCommand) -> Iterator[tuple[Any, str, Any]]:
    connect = socket.socket.connect

    def refuse(*_: Any, **__: Any) -> Any:
        raise ConnectionError(f"{asker()} of {script.name} needs the network; a script that is followed has none: keep what it downloads at hand")

    def connected(self: Any, address: Any) -> Any:
        return connect(self, address) if self.family not in (socket.AF_INET, socket.AF_INET6) else refuse()

    yield socket.socket, "connect", connected
    yield socket, "getaddrinfo", refuse

