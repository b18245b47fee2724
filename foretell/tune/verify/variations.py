"""Inputs that a task does not draw itself: other sizes, formats, strides and magnitudes, and each input changed alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretell.tune.verify import sides
from foretell.tune.verify.compare import torch_of
from foretell.tune.verify.draw import (
    FORMAT,
    FORMATS,
    MAGNITUDE,
    MOST_ELEMENTS,
    PRIMES,
    SENSITIVITY,
    SHAPE,
    STRIDE,
    Drawer,
    TaskCase,
)
from foretell.tune.verify.inside.calls import raw_of
from foretell.tune.verify.process import Raised
from foretell.tune.verify.sides import State
from foretell.tune.verify.wire import RawTensor

if TYPE_CHECKING:
    Values = Callable[[Tensor], Tensor]


def shapes(drawer: Drawer, state: State) -> Iterator[TaskCase | None]:
    """Every size of the inputs in turn: odd, larger and odd, one, none. Where the constructor was given that number too, with it."""
    floats = [one for one in drawer.own if isinstance(one, RawTensor) and one.is_float]
    sizes = list(dict.fromkeys(size for one in floats for size in one.shape if size > 1))[:4]
    most = max(MOST_ELEMENTS, sum(one.numel for one in floats))
    for size in sizes:
        smaller = [prime for prime in PRIMES if prime < size]
        for other in dict.fromkeys([*smaller[-1:], 2 * size + 1, 1, 0]):
            inputs = _resized(drawer, size, other)
            if sum(one.numel for one in inputs if isinstance(one, RawTensor)) <= most:
                yield _with_arguments(drawer, state, inputs, size, other)


def _resized(drawer: Drawer, size: int, other: int) -> tuple[Any, ...]:
    found = []
    for one in drawer.own:
        if isinstance(one, RawTensor) and size in one.shape:
            shape = tuple(other if each == size else each for each in one.shape)
            found.append(raw_of(drawer.dealt(torch_of(one), shape)))
        else:
            found.append(one)
    return tuple(found)


def _with_arguments(drawer: Drawer, state: State, inputs: tuple[Any, ...], size: int, other: int) -> TaskCase | None:
    """What the constructor was told goes with the inputs: a size of one would else be taken where it is spread over a weight."""
    name = f"size {other} in place of {size}"
    arguments = _replaced(list(drawer.arguments), size, other)
    if arguments == list(drawer.arguments):
        return drawer.answered(SHAPE, drawer.question(name, inputs, state))
    try:
        made = drawer.redrawn(drawer.eager.make(arguments, None, drawer.number()))
    except Raised:
        return None
    return drawer.answered(SHAPE, drawer.question(name, inputs, made, arguments=tuple(arguments)))


def _replaced(value: Any, size: int, other: int) -> Any:
    if isinstance(value, list):
        return [_replaced(one, size, other) for one in value]
    return other if type(value) is int and value == size else value


def formats(drawer: Drawer, state: State) -> Iterator[TaskCase | None]:
    """The other two of fp32, bf16 and fp16, weights and inputs alike."""
    inputs = drawer.inputs()[1]
    for dtype in FORMATS:
        if dtype != drawer.dtype:
            question = drawer.question(f"in {dtype}", inputs, state)
            yield drawer.answered(FORMAT, sides.in_dtype(question, dtype, sides.cast_state(state, dtype)), dtype=dtype)


def strides(drawer: Drawer, state: State) -> Iterator[TaskCase | None]:
    """The same values laid out otherwise."""
    inputs = drawer.inputs()[1]
    for name, laid in (("transposed in memory", _transposed), ("with gaps between rows", _sliced), ("from an odd offset", _offset)):
        changed = tuple(laid(one) if isinstance(one, RawTensor) and one.numel else one for one in inputs)
        if changed != tuple(inputs):
            yield drawer.answered(STRIDE, drawer.question(name, changed, state))


def _laid(values: Tensor, stride: Sequence[int], offset: int) -> RawTensor:
    last = offset + sum((size - 1) * step for size, step in zip(values.shape, stride, strict=True)) + 1
    storage = torch.zeros(last, dtype=values.dtype)
    storage.as_strided(values.shape, tuple(stride), offset).copy_(values)
    name = str(values.dtype).removeprefix("torch.")
    return RawTensor(name, tuple(values.shape), tuple(stride), offset, storage.view(torch.uint8).numpy().tobytes())


def _transposed(raw: RawTensor) -> RawTensor:
    values = torch_of(raw)
    if values.dim() < 2:
        return raw
    return _laid(values, values.transpose(-1, -2).contiguous().transpose(-1, -2).stride(), 0)


def _sliced(raw: RawTensor) -> RawTensor:
    values = torch_of(raw)
    if not values.dim():
        return raw
    steps = [1]
    for size in reversed(values.shape[1:]):
        steps.append(steps[-1] * (size + 3))
    return _laid(values, tuple(reversed(steps)) if values.dim() > 1 else (2,), 0)


def _offset(raw: RawTensor) -> RawTensor:
    values = torch_of(raw).contiguous()
    return _laid(values, values.stride(), 1)


# ---------------------------------------------------------------- magnitudes


def magnitudes(drawer: Drawer, state: State) -> Iterator[TaskCase | None]:
    """Large, small, mixed, shifted, constant and spiked inputs, in the task's format."""
    large = 100.0 if drawer.dtype == "float16" else 1e4
    changes: dict[str, Values] = {
        f"times {large:g}": lambda x: x * large,
        f"times {1 / large:g}": lambda x: x / large,
        "of mixed magnitudes": lambda x: x * 10.0 ** _uniform(drawer, x, -3, 3),
        "with a spike in a hundred": lambda x: torch.where(_uniform(drawer, x, 0, 1) < 0.01, x * large, x),
        "shifted by 100": lambda x: x + 100.0,
        "all zero": torch.zeros_like,
        "all 0.5": lambda x: torch.full_like(x, 0.5),
    }
    for name, change in changes.items():
        inputs = tuple(
            raw_of(change(torch_of(one).double()).to(getattr(torch, one.dtype))) if isinstance(one, RawTensor) and one.is_float else one
            for one in drawer.inputs()[1]
        )  # fmt: skip
        yield drawer.answered(MAGNITUDE, drawer.question(f"inputs {name}", inputs, state), room=True)


def _uniform(drawer: Drawer, like: Tensor, low: float, high: float) -> Tensor:
    return torch.rand(like.shape, generator=drawer.random, dtype=torch.float64) * (high - low) + low


# ---------------------------------------------------------------- each input alone


def one_by_one(drawer: Drawer, state: State) -> Iterator[TaskCase | None]:
    """One input is drawn anew and stretched, all others stay: what nobody reads does not show otherwise."""
    base = drawer.inputs()[1]
    yield drawer.answered(SENSITIVITY, drawer.question("before an input is changed", base, state))
    for place, one in enumerate(base):
        if isinstance(one, RawTensor) and one.numel:
            values = torch_of(one)
            other = _other(drawer, values)
            for name, changed in ((f"input {place} changed alone", other), (f"one element of input {place} changed", _one_place(values, other))):
                inputs = (*base[:place], raw_of(changed), *base[place + 1 :])
                yield drawer.answered(SENSITIVITY, drawer.question(name, inputs, state))


def _one_place(values: Tensor, other: Tensor) -> Tensor:
    """The last element alone: what goes by a few of the first does not see it."""
    changed = values.clone(memory_format=torch.contiguous_format).flatten()
    changed[-1] = other.flatten()[-1]
    return changed.reshape(values.shape)


def _other(drawer: Drawer, values: Tensor) -> Tensor:
    if values.dtype == torch.bool:
        return torch.rand(values.shape, generator=drawer.random) < 0.5
    dealt = drawer.dealt(values, values.shape)
    if not values.is_floating_point():
        return dealt
    spread = values.double().std(correction=0) if values.numel() > 1 else values.double().abs().max()
    step = float(spread) or float(values.double().abs().max()) or 1.0
    noise = torch.randn(values.shape, generator=drawer.random, dtype=torch.float64)
    return (dealt.double() + 0.5 * step * noise).to(values.dtype) if math.isfinite(step) else dealt
