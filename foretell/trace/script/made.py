"""What a script has made by the time of its first step: its modules under the names that it has for them, its optimizers."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.optim.optimizer import Optimizer

from foretell.trace.load.model import is_users
from foretell.trace.record.recorder import Recorder
from foretell.trace.record.values import value_of

KNOWN = ("sgd", "adam", "adamw")
"""Optimizers that a recipe has a name for."""
_TORCH = str(Path(torch.__file__).parent)


def not_initialised(recorder: Recorder) -> Iterator[tuple[Any, str, Any]]:
    """Weights without numbers need none, which saves time; in a step it is work like any other."""

    def unless_needed(plain: Any) -> Any:
        def initialise(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            idle = recorder._rows is None and isinstance(tensor, FakeTensor) and value_of(tensor) is None
            made: Tensor = tensor if idle else plain(tensor, *args, **kwargs)
            return made

        return initialise

    for name in ("normal_", "uniform_", "fill_", "zero_"):
        yield Tensor, name, unless_needed(getattr(Tensor, name))


def shapes_of(batch: Any) -> tuple[Tensor, ...]:
    """Tensors like those of a batch, which nobody holds any longer."""
    with unset_fake_temporarily():
        return tuple(torch.empty(one.shape, dtype=one.dtype, device="meta") for one in batch)


def optimizers() -> dict[int, Optimizer]:
    """Those that are alive, by what they train: a wrapper has the parameters of what it wraps."""
    alive = [one for one in gc.get_objects() if issubclass(type(one), Optimizer)]
    return {parameters_of(one): one for one in alive}


def parameters_of(optimizer: Optimizer) -> int:
    return hash(frozenset(id(one) for group in optimizer.param_groups for one in group["params"]))


def nobody(file: str) -> bool:
    """Code on a CPU sees this machine's devices, whatever they are."""
    return False


def not_torchs(file: str) -> bool:
    """Whether code of a file is told of the device: all but PyTorch's own, which would reach for it."""
    return not file.startswith(_TORCH)


def whole(module: nn.Module) -> nn.Module:
    """The outermost modules that are alive and have weights: one, or all of them under the names that the script has for them."""
    alive = [one for one in gc.get_objects() if issubclass(type(one), nn.Module) and _is_fake(one)]
    inside = {id(child) for one in alive for child in one.children()}
    outer = [one for one in alive if id(one) not in inside]
    if len(outer) <= 1:
        return outer[0] if outer else module
    names = _names()
    holder = nn.Module()
    for number, one in enumerate(outer):
        name = names.get(id(one), f"{type(one).__name__.lower()}{number or ''}")
        holder.add_module(name if not hasattr(holder, name) else f"{name}_{number}", one)
    return holder


def _is_fake(module: nn.Module) -> bool:
    """Whether a module has tensors, and has them here: what libraries made when they were imported is real."""
    first = next(itertools.chain(module.parameters(), module.buffers()), None)
    return isinstance(first, FakeTensor)


def _names() -> dict[int, str]:
    """Variables of the script's frames, the outermost first."""
    found: dict[int, str] = {}
    frame: Any = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            found |= {id(value): name for name, value in frame.f_locals.items() if isinstance(value, nn.Module) and name != "self"}
        frame = frame.f_back
    return found


def name_of(optimizer: Optimizer) -> str:
    """The recipe's name for an optimizer, or for the one of its kind: what it does is in the trace anyway."""
    kind, group = type(optimizer).__name__.lower(), optimizer.param_groups[0]
    if kind == "sgd" and group.get("momentum"):
        kind = "momentum"
    if kind not in (*KNOWN, "momentum"):
        kind = "adamw"
    return kind + ("-fused" if group.get("fused") and kind != "sgd" else "")


def tied_names(model: nn.Module) -> list[list[str]]:
    """Names of parameters that have several, group by group."""
    names: dict[int, list[str]] = {}
    for name, one in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(one), []).append(name)
    return [group for group in names.values() if len(group) > 1]
