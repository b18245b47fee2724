"""Calls of training kernels, and how far they are from float64 beside eager: the same for plain torch, Triton's interpreter and a GPU.

    python -m tests.kernel_cases [NAME ...]      the worst of each case as a line of JSON; TRITON_INTERPRET=1 takes the Triton
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from foretell.kernels import catalog, measured
from foretell.kernels.kernel import TrainingKernel

ROWS = ({"rows": 7, "width": 40}, {"rows": 5, "width": 33}, {"rows": 1, "width": 1}, {"rows": 3, "width": 257})
TOKENS = ({"tokens": 6, "heads": 4, "kv_heads": 2, "width": 16}, {"tokens": 5, "heads": 3, "kv_heads": 1, "width": 10})
SMALL: dict[frozenset[str], tuple[Mapping[str, int], ...]] = {frozenset(one[0]): one for one in (ROWS, TOKENS)}
"""By what a kernel's shapes are named: small and odd ones."""
UNITS = 0.5
"""Of the last place, that an error may have whatever eager's is: what rounding a result alone can do."""
CPU = torch.device("cpu")


def shapes_of(kernel: TrainingKernel) -> tuple[Mapping[str, int], ...]:
    return SMALL.get(frozenset(kernel.measured_at[0]), ())


MINE = [name for name, one in catalog.KERNELS.items() if shapes_of(one)]


def drawn(kernel: TrainingKernel, shape: Mapping[str, int], dtype: torch.dtype, device: torch.device = CPU) -> list[Any]:
    torch.manual_seed(0)
    return list(kernel.draw(shape, dtype, device))


def results(function: Any, kernel: TrainingKernel, arguments: list[Any], dtype: torch.dtype, wanted: list[int] | None = None) -> list[Tensor]:
    """Outputs and gradients of a call in some format; the gradients that come from outside are rounded to the arguments' own."""
    places = kernel.learned(arguments) if wanted is None else wanted
    own = next(one.dtype for one in arguments if isinstance(one, Tensor))
    # A clone keeps strides where it can; a view is drawn anew from a base of its own.
    given = [one.detach().to(dtype) if isinstance(one, Tensor) else one for one in arguments]
    for place in places:
        given[place].requires_grad_()
    made = tree_leaves(function(*given))
    generator = torch.Generator().manual_seed(1)
    ups = [torch.randn(one.shape, generator=generator, dtype=torch.float64).to(own).to(one) for one in made]
    leaves = [given[place] for place in places]
    depends = [(one, up) for one, up in zip(made, ups, strict=True) if one.requires_grad]
    return [*made, *(torch.autograd.grad([one for one, _ in depends], leaves, [up for _, up in depends]) if leaves else ())]


def error(found: Tensor, wanted: Tensor) -> float:
    """Of a whole tensor; infinite where one is not a number and the other is."""
    found, wanted = found.detach().double().cpu(), wanted.detach().double().cpu()
    if not torch.equal(found.isfinite(), wanted.isfinite()):
        return math.inf
    rest = wanted.isfinite()
    scale = wanted[rest].norm().item()
    return ((found - wanted)[rest].norm() / scale).item() if scale else float((found - wanted)[rest].norm())


def worst(kernel: TrainingKernel, arguments: list[Any], dtype: torch.dtype) -> float:
    """Error over what is allowed, of the worst output or gradient: above 1 it is wrong."""
    wanted = results(kernel.reference, kernel, arguments, torch.float64)
    eager, found = (results(one, kernel, arguments, dtype) for one in (kernel.reference, kernel.call))
    return max(
        error(mine, oracle) / (kernel.error_ratio * own + UNITS * torch.finfo(dtype).eps)
        for mine, oracle, own in zip(found, wanted, (error(one, oracle) for one, oracle in zip(eager, wanted, strict=True)), strict=True)
    )


def cases(kernel: TrainingKernel, dtype: torch.dtype, device: torch.device = CPU) -> Iterator[tuple[str, list[Any]]]:
    """Odd sizes, magnitudes, strides."""
    for shape in shapes_of(kernel):
        # The gradient of a norm of one element is zero but for rounding.
        if not (shape.get("width") == 1 and "norm" in kernel.name):
            yield f"{dict(shape)}", drawn(kernel, shape, dtype, device)
    first = shapes_of(kernel)[0]
    for factor in (1e-3, 1e3):
        given = drawn(kernel, first, dtype, device)
        given[0] = given[0] * factor
        yield f"times {factor:g}", given
    if "layer_norm" in kernel.name:
        given = drawn(kernel, first, dtype, device)
        given[0] = given[0] + 50
        yield "far from zero", given
    given = drawn(kernel, first, dtype, device)
    yield "of other strides", [one.transpose(0, -1).contiguous().transpose(0, -1) if place in kernel.learned(given) and one.dim() > 1 else one
                               for place, one in enumerate(given)]  # fmt: skip
    wide = drawn(kernel, {**first, "width": 2 * first["width"]}, dtype, device)
    half = first["width"]
    yield "halves", [one[..., half:] if isinstance(one, Tensor) else one for one in wide]


LAUNCHES = ({"each": 2}, {"ahead": 0, "hold": 0, "per_sm": 1}, {"ahead": 0, "hold": 0, "again": 1}, {"ahead": 1, "hold": 0})
"""Ways of the norms' kernels that small rows do not take by themselves."""


def otherwise(kernel: TrainingKernel, dtype: torch.dtype, device: torch.device = CPU) -> Iterator[tuple[str, float]]:
    """The worst of other launches than the usual one, of few rows and of more than there are programs."""
    for config in LAUNCHES if "norm" in kernel.name else ():
        for shape in shapes_of(kernel)[:2]:
            with measured.trying(kernel.name, config):
                yield f"{config} at {dict(shape)}", worst(kernel, drawn(kernel, shape, dtype, device), dtype)


class Seen(TorchDispatchMode):
    """The ops of foretell that run, with copies of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "foretell_kernels":
            self.calls.append((func, tuple(one.detach().clone() if isinstance(one, Tensor) else one for one in args)))
        return func(*args, **(kwargs or {}))


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or MINE:
        kernel = catalog.find(name)
        # Triton's interpreter does not round to bfloat16.
        for dtype in (torch.float32, torch.float16):
            usual = ((what, worst(kernel, given, dtype)) for what, given in cases(kernel, dtype))
            for what, found in itertools.chain(usual, otherwise(kernel, dtype)):
                print(json.dumps({"kernel": name, "case": what, "dtype": str(dtype), "worst": found}), flush=True)


if __name__ == "__main__":
    main()
