"""What a script finds around it: a device, data that is real, and nothing that outlives it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils.data import DataLoader

from foretell.trace.devices import is_elsewhere, replaced


class World:
    """What is on the device, and how products are computed there."""

    def __init__(self) -> None:
        self.moved: list[weakref.ref[Tensor]] = []
        self.autocast = ""
        self.scales = False

    def on_device(self, module: nn.Module) -> tuple[Tensor, ...]:
        own = {id(one) for one in (*module.parameters(), *module.buffers())}
        found = [tensor for one in self.moved if (tensor := one()) is not None and id(tensor) not in own]
        return tuple({id(one): one for one in found}.values())

    def precision(self, module: nn.Module) -> str:
        if self.autocast:
            return f"{self.autocast}-autocast"
        first = next(module.parameters())
        return "bf16" if first.dtype is torch.bfloat16 else "fp32"


@contextmanager
def as_on_a_device() -> Iterator[World]:
    world = World()
    with replaced((*_moves(world), *_data(), *_amp(world))):
        yield world


def _moves(world: World) -> Iterator[tuple[Any, str, Any]]:
    to, cuda = Tensor.to, Tensor.cuda

    def move(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        made = to(tensor, *args, **kwargs)
        if (args and is_elsewhere(args[0])) or is_elsewhere(kwargs.get("device")):
            world.moved.append(weakref.ref(made))
        return made

    def to_cuda(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        world.moved.append(weakref.ref(tensor))
        return cuda(tensor, *args, **kwargs)

    yield Tensor, "to", move
    yield Tensor, "cuda", to_cuda


_HERE = {"num_workers": 0, "pin_memory": False, "prefetch_factor": None, "persistent_workers": False, "timeout": 0, "multiprocessing_context": None}
"""Settings of a loader that reads in this process."""


def _data() -> Iterator[tuple[Any, str, Any]]:
    start, iterate = DataLoader.__init__, DataLoader.__iter__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **{**kwargs, **{key: value for key, value in _HERE.items() if key in kwargs}})

    def real(self: Any) -> Iterator[Any]:
        with unset_fake_temporarily():
            rows = iterate(self)
        while True:
            with unset_fake_temporarily():
                try:
                    row = next(rows)
                except StopIteration:
                    return
            yield row

    yield DataLoader, "__init__", init
    yield DataLoader, "__iter__", real


def _amp(world: World) -> Iterator[tuple[Any, str, Any]]:
    start, scaler = torch.autocast.__init__, torch.amp.GradScaler.__init__

    def autocast(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, *args: Any, **kwargs: Any) -> None:
        if enabled and is_elsewhere(device_type):
            world.autocast = {torch.bfloat16: "bf16"}.get(dtype, "fp16")
        start(self, device_type, dtype, enabled, *args, **kwargs)

    def scaling(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        scaler(self, "cpu" if is_elsewhere(device) else device, *args, **kwargs)
        world.scales = world.scales or self._enabled

    yield torch.autocast, "__init__", autocast
    yield torch.amp.GradScaler, "__init__", scaling
