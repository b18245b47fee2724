"""An op without its place in a program, an op in numbers, and the small arithmetic that turns one into the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from foretell.trace.types import TensorSpec

LAUNCH_SECONDS = 2e-6
"""Of the shortest kernel, back to back with others; what is learned corrects it."""


class Shape(NamedTuple):
    """An op without its place in a program: all that its cost depends on."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    attrs: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Described:
    """An op in numbers."""

    family: str
    key: str
    """Ops of one key share one law; those of an unknown key that of their kind."""
    kind: str
    base: float
    """A plain first estimate of the seconds, from the device's own figures."""
    terms: dict[str, float]
    """What the seconds are a sum of, each in seconds of an ideal device; a law says how often each counts."""
    values: dict[str, float]
    """Features for what the sum leaves over."""


def short(name: str) -> str:
    """`aten.mm.default` → `mm`."""
    return name.split(".")[1] if "." in name else name


def log(value: float) -> float:
    """Base 2, of what may be nothing."""
    return math.log2(value) if value > 1e-30 else -100.0


def tail(waves: float) -> float:
    """How full the last of so many waves is, on average over them."""
    return waves / math.ceil(waves) if waves > 0 else 1.0


def two_power(size: int) -> float:
    """How often 2 divides a size, at most 7 times: what alignment allows."""
    return float(min(7, (size & -size).bit_length() - 1)) if size else 7.0


def letters_of(attrs: Sequence[Any]) -> str:
    """Layout letters of the inputs; empty where all are contiguous."""
    for attr in attrs:
        if isinstance(attr, str) and attr.startswith("layout:"):
            return attr[7:]
    return ""


def state_of(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> TensorSpec:
    """Layers, batch and width of a recurrent op's state: what it returns, or, where nobody reads that, what it is given. Ops of a CPU
    are one layer each, and their states say no more than batch and width; weights of cuDNN are columns."""
    specs, batch = (*outputs[1:2], *inputs[1:]), inputs[0].shape[-2]
    if len(specs[0].shape) != 3:
        flat = next((spec for spec in specs if len(spec.shape) == 2 and spec.shape[0] == batch and spec.shape[1] > 1), None)
        if flat is not None:
            return flat._replace(shape=(1, *flat.shape))
    return next(spec for spec in specs if len(spec.shape) == 3)


def flags_of(attrs: Sequence[Any]) -> list[bool]:
    return [a for a in attrs if isinstance(a, bool)]


def nbytes(specs: Sequence[TensorSpec]) -> int:
    return sum([spec.nbytes for spec in specs])
