"""What a model's forward and loss call, tensor by tensor: the flow that rules for splitting are derived from.

Calls are those of PyTorch's Python functions and methods (`linear`, `view`, `softmax`, ...), as the model's code makes
them. The types are plain data; recording imports torch.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    pass

Shape = tuple[int, ...]
OPENED = frozenset({"multi_head_attention_forward"})
"""Functions written in Python that are recorded, and run, as the calls they are made of."""
ADAPTED_CALLS = frozenset({"packed_product", "low_rank_product", "adapted_product", "dora_product"})
"""Calls of layers with an adapter, which are one call each and have rules (`plan.tensor.adapted`)."""
CUSTOM = "custom function"
"""How the name of a call of the user's own `torch.autograd.Function` begins."""


class ValueRef(NamedTuple):
    """A tensor among the arguments of a call: the number of its value."""

    value: int


class SliceKey(NamedTuple):
    """A slice, which unlike Python's own can be a key."""

    start: Any
    stop: Any
    step: Any


@dataclass(frozen=True, slots=True)
class FlowValue:
    """A tensor as one call left it."""

    shape: Shape
    dtype: str
    grad: bool
    """Whether backward needs its gradient."""


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    module: str
    """Path of the innermost module that was running."""
    args: tuple[Any, ...]
    """With a `ValueRef` in place of a tensor, tuples in place of lists and a `SliceKey` in place of a slice."""
    kwargs: Mapping[str, Any]
    outputs: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Flow:
    """One forward and loss."""

    values: tuple[FlowValue, ...]
    calls: tuple[Call, ...]
    parameters: Mapping[int, tuple[str, ...]]
    """Value → names of the parameter that it is; tied parameters have several."""
    inputs: frozenset[int] = frozenset()
    """Values of the batch."""
    numbers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Module path → its whole numbers whose name speaks of heads."""
    functions: tuple[type, ...] = ()
    """Classes of the user's own autograd functions that were called."""


def call_name(function: Any) -> str:
    """`view`, `__add__`, `T`: what a torch function is called, properties by their own name."""
    name: str = getattr(function, "__name__", None) or str(function)
    if name == "__get__":
        return str(function.__self__.__name__)
    return name


def opened(function: Any) -> Callable[..., Any]:
    """A function of torch.nn.functional that does its work even for tensors that want to be asked first."""

    def no(*_: Any) -> bool:
        return False

    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = {**function.__globals__, **dict.fromkeys(checks, no)}
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
