"""What a finder answers for a module: a match, why a module that looks alike is left, or nothing."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
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


CHANGES = {"STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR", "STORE_DEREF", "DELETE_ATTR", "DELETE_GLOBAL", "DELETE_SUBSCR", "YIELD_VALUE", "AWAIT"}
QUIET = {"len", "tuple", "list", "zip", "range", "isinstance", "int", "float", "min", "max", "abs", "sum", "enumerate"}
"""Builtins that do nothing but answer."""


def does_nothing_else(module: nn.Module) -> bool:
    """Whether a forward, with the methods of its class that it names, changes nothing and calls nothing but torch: what it returns is all."""
    methods, seen, left = methods_of(type(module)), set(), [type(module).forward]
    while left:
        function = left.pop()
        if not isinstance(function, FunctionType):
            return False
        for step in _steps(function.__code__):
            name = step.argval
            if step.opname in CHANGES or (step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and not _is_quiet(name, function)):
                return False
            if step.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                continue
            if not _is_fixed(vars(module).get(name)):
                return False
            if name in methods and name not in seen:
                seen.add(name)
                left.append(methods[name])
    return True


def _steps(code: CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _steps(inner)


def methods_of(kind: type) -> dict[str, FunctionType]:
    """What a class and those before it define, but for nn.Module itself."""
    found = {name: one for base in reversed(kind.__mro__) if base not in (nn.Module, object) for name, one in vars(base).items()}
    return {name: one for name, one in found.items() if isinstance(one, FunctionType)}


def _is_quiet(name: str, function: FunctionType) -> bool:
    found = function.__globals__.get(name)
    return name in QUIET if found is None else _is_torchs(found)


def _is_torchs(found: Any) -> bool:
    home = found.__name__ if isinstance(found, ModuleType) else getattr(found, "__module__", None) or ""
    return home.split(".")[0] in ("torch", "math")


def _is_fixed(value: Any) -> bool:
    """Whether an attribute cannot be a place to note something in, or a function that does."""
    return not isinstance(value, list | dict | set | bytearray) and (not isinstance(value, FunctionType) or _is_torchs(value))


def unhooked(*modules: nn.Module) -> bool:
    """Whether nothing runs around their forwards, so that they may be left out or their results written over."""
    everywhere = nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks
    mine = (one._forward_hooks or one._forward_pre_hooks or one._backward_hooks or one._backward_pre_hooks for one in modules)
    return not everywhere and not any(mine)
