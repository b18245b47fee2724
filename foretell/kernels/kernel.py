"""A training kernel: what it computes, which shapes it serves, and the ops it is registered as.

    define(NAME, schema, plain=..., triton="file.function", fake=...)      foretell_kernels::NAME, on CUDA by Triton, on a CPU in plain torch
    differentiate(NAME, context, gradient)                                 its gradient, by foretell_kernels::NAME_backward
    TrainingKernel(...)                                                    what `apply`, benchmarks and the planner read

A schema is functional unless its name ends in `_`. What an op saves for its backward, and every launch, is written in its file.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foretell.kernels.names import NAMESPACE

LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
HALVES = (torch.bfloat16, torch.float16)

Shape = Mapping[str, int]
"""Sizes of a call by name: rows, width and so on."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ShapeBucket:
    """Shapes that one configuration of launch serves."""

    name: str
    limits: Mapping[str, tuple[int, int]]
    """Least and most of a size, both served; a size not named here may be any."""
    config: Mapping[str, int]
    """num_warps, and what else the kernel asks for, chosen by compiling for sm_90; a measured row may say otherwise."""

    def holds(self, shape: Shape) -> bool:
        return all(least <= shape[name] <= most for name, (least, most) in self.limits.items())


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingKernel:
    """An op with a kernel for its forward and one for its backward."""

    name: str
    says: str
    """What it computes, in a line."""
    reference: Callable[..., Any]
    """In plain torch and differentiable, in whatever format its inputs have: float64 makes it the oracle."""
    call: Callable[..., Any]
    """The same by the op: same arguments, same results."""
    shape_of: Callable[..., Shape]
    """Of the arguments of a call."""
    buckets: tuple[ShapeBucket, ...]
    dtypes: tuple[torch.dtype, ...]
    measured_at: tuple[Shape, ...]
    """The declared shapes: it is on by default in a bucket whose declared shapes were all measured at 1.00× the best baseline or above."""
    draw: Callable[[Shape, torch.dtype, torch.device], tuple[Any, ...]]
    """Arguments of a call of that shape."""
    floor_bytes: Callable[[Shape, int], int]
    """To be moved by forward and backward at the least, of a shape and the bytes of an element."""
    saved_bytes: Callable[[Shape, int], int]
    """Made by the forward and kept for the backward, beside its results; inputs that are kept are not counted."""
    no_gradient: tuple[int, ...] = ()
    """Places of floating arguments that get none."""
    error_ratio: float = 2.0
    """Its error against float64 may be so many times that of eager in the same format."""

    def learned(self, arguments: Sequence[Any]) -> list[int]:
        """Places of the arguments of a call that get gradients."""
        floating = (place for place, one in enumerate(arguments) if isinstance(one, torch.Tensor) and one.is_floating_point())
        return [place for place in floating if place not in self.no_gradient]

    def bucket(self, shape: Shape) -> ShapeBucket | None:
        return next((one for one in self.buckets if one.holds(shape)), None)


# ---------------------------------------------------------------- ops


def define(name: str, schema: str, *, plain: Callable[..., Any], triton: str, fake: Callable[..., Any]) -> Any:
    """The op `foretell_kernels::NAME`; `schema` is what follows the name, `triton` a function of `kernels/device`, as "file.function"."""

    def launch(*args: Any) -> Any:
        return launched(triton)(*args)

    def on_cpu(*args: Any) -> Any:
        return launch(*args) if interpreted() else plain(*args)

    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, launch, "CUDA")
    LIBRARY.impl(name, on_cpu, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def define_in_place(
    name: str, schema: str, *, plain: Callable[..., Any], triton: str, fake: Callable[..., Any], changes: tuple[int, ...]
) -> Any:
    """An op that changes arguments, those at `changes`: autograd sees that they are others now."""
    op = define(name, schema, plain=plain, triton=triton, fake=fake)

    def mark(keys: Any, *args: Any) -> Any:
        for place in changes:
            torch.autograd.graph.increment_version(args[place])
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return op.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *args)

    LIBRARY.impl(name, mark, "ADInplaceOrView", with_keyset=True)
    return op


def differentiate(name: str, context: Callable[..., None], gradient: Callable[..., Any]) -> None:
    """The gradient of an op; that of its `NAME_backward` is none, and says so."""
    torch.library.register_autograd(f"{NAMESPACE}::{name}", gradient, setup_context=context, lib=LIBRARY)

    def second(*_: Any) -> Any:
        raise NotImplementedError(f"{NAMESPACE}::{name} has no second derivative: revert the kernels of this model, or leave this one out")

    torch.library.register_autograd(f"{NAMESPACE}::{name}_backward", second, lib=LIBRARY)


IN_FLOAT32: list[Any] = []
"""Ops whose inputs CUDA's autocast casts."""


def in_float32_under_autocast(name: str) -> None:
    """As CUDA's autocast does for the op this one stands for; its CPU one leaves the op's inputs as they are."""
    IN_FLOAT32.append(getattr(getattr(torch.ops, NAMESPACE), name).default)
    torch.library.register_autocast(f"{NAMESPACE}::{name}", "cuda", torch.float32, lib=LIBRARY)


_LAUNCHES: dict[str, Callable[..., Any]] = {}


def launched(path: str) -> Callable[..., Any]:
    """A function of `kernels/device`, whose file is imported, and Triton with it, the first time."""
    found = _LAUNCHES.get(path)
    if found is None:
        file, function = path.split(".")
        found = _LAUNCHES[path] = getattr(importlib.import_module(f"foretell.kernels.device.{file}"), function)
    return found


def interpreted() -> bool:
    """Whether Triton interprets its kernels in this process, so that tensors of a CPU can be given to them."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def wider(dtype: torch.dtype) -> torch.dtype:
    """The format a kernel computes in."""
    return torch.float32 if dtype in HALVES else dtype
