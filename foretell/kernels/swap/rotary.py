"""Attention that turns its queries and keys by a function of its own file, `f(q, k, cos, sin)`.

The function is asked what it computes, and the module gets a forward of the same code that sees the kernel by that name: the file
and the class stay as they are. What else the function may be told (where the heads are, say) is left to it. The other names of the file
are as they were when the kernel was put in.
"""

from __future__ import annotations

import functools
import inspect
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from foretell.kernels import rotary
from foretell.kernels.swap.gate import UNTOUCHED, KernelGate, side_by_side
from foretell.kernels.swap.match import Forward, KernelMatch

FIRST = ("q", "k", "cos", "sin")


def find_rotary(module: nn.Module) -> KernelMatch | str | None:
    forward = type(module).forward
    if not isinstance(inspect.unwrap(forward), FunctionType):
        return None
    for name, function in _functions(inspect.unwrap(forward)):
        if not _is_rotary(function):
            continue
        if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
            return f"calls {name} in a forward that is wrapped by something"
        make = functools.partial(_made, forward, name, function)
        return KernelMatch(kernel="rotary", how=f"calls {name}", gate={"autocast": UNTOUCHED, "layout": side_by_side}, forward=make)
    return None


def _made(forward: FunctionType, name: str, function: FunctionType, gate: KernelGate) -> Forward:
    return _renamed(forward, name, _stand_in(gate, function))


def _functions(forward: FunctionType) -> list[tuple[str, FunctionType]]:
    """Functions of its file that a forward names, whose first arguments are queries, keys and angles."""
    named = ((name, forward.__globals__.get(name)) for name in forward.__code__.co_names)
    found = [(name, one) for name, one in named if isinstance(one, FunctionType)]
    return [(name, one) for name, one in found if tuple(inspect.signature(one).parameters)[:4] == FIRST]


def _is_rotary(function: FunctionType) -> bool:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    for batch, heads, tokens, width in ((2, 4, 3, 8), (1, 2, 5, 6)):
        given = drawn(batch, heads, tokens, width), drawn(batch, 2, tokens, width), drawn(batch, tokens, width), drawn(batch, tokens, width)
        try:
            turned = function(*given)
        except Exception:
            return False
        if len(turned) != 2 or not all(_same(one, other) for one, other in zip(turned, rotary.reference(*given), strict=True)):
            return False
    return True


def _same(one: Any, other: Tensor) -> bool:
    return isinstance(one, Tensor) and one.shape == other.shape and torch.allclose(one, other)


def _stand_in(gate: KernelGate, plain: FunctionType) -> Forward:
    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **options: Any) -> Any:
        if not more and not options and _fits(q, k, cos, sin) and gate.takes(q, k, cos, sin):
            return rotary.rotary(q, k, cos, sin)
        return plain(q, k, cos, sin, *more, **options)

    return turned


def _fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Four dimensions, angles for every token and element, that are no one's to train."""
    if q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or q.shape[3] % 2 or cos.requires_grad or sin.requires_grad:
        return False
    batch, _, tokens, width = q.shape
    return (k.shape[0], k.shape[2], k.shape[3]) == (batch, tokens, width) and cos.shape == sin.shape and cos.shape[0] in (1, batch) and (
        cos.shape[1] == tokens and cos.shape[2] == width
    )


def _renamed(forward: FunctionType, name: str, stand_in: Forward) -> Forward:
    """The same code with another meaning of one name. Its globals have no `__name__`: torch.compile would look the name up in the file."""
    globals_ = {key: value for key, value in forward.__globals__.items() if key != "__name__"} | {name: stand_in}
    made = FunctionType(forward.__code__, globals_, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made
