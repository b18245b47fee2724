"""What a finder answers for a module: a match, why a module that looks alike is left, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from foretell.kernels.swap.gate import KernelGate

Forward = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class KernelMatch:
    """A module and the kernel that can do its work."""

    kernel: str
    how: str
    """How it was recognised."""
    gate: Mapping[str, Any]
    """What the gate is told beside kernel and shapes: autocast, layout."""
    forward: Callable[[KernelGate], Forward]
    """Makes the forward to be put in, a function of module and arguments."""


Finder = Callable[[nn.Module], KernelMatch | str | None]


def twin_of(module: nn.Module, **other: Any) -> nn.Module:
    """A module of the same class and settings with other parameters or children, and nothing that runs around its forward."""
    twin = object.__new__(type(module))
    hooks: dict[str, Any] = {name: {} for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")}
    vars(twin).update({**vars(module), **hooks, **other})
    vars(twin).pop("forward", None)
    return twin


def unhooked(*modules: nn.Module) -> bool:
    """Whether nothing runs around their forwards, so that they may be left out or their results written over."""
    everywhere = nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks
    mine = (one._forward_hooks or one._forward_pre_hooks or one._backward_hooks or one._backward_pre_hooks for one in modules)
    return not everywhere and not any(mine)
