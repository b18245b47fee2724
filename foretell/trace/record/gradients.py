"""Gradients that PyTorch computes another way under a dispatch mode than without one.

The formulas of some ops look at their input: without zeros in it, the gradient of a product is a quotient. Under a dispatch
mode, and a trace is one, nobody may look, and PyTorch takes the general formula, which needs several times the memory. While
`plain_formulas` is open, those ops have the formula that ordinary data gets.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_aten = torch.ops.aten


def _dim_of(tensor: Tensor, dim: int) -> int:
    return dim % max(1, tensor.dim())


class _Prod(torch.autograd.Function):
    """Without zeros: grad · (result / input). It counts the zeros first."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, dim: int | None, keepdim: bool, dtype: Any) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            result: Tensor = (
                _aten.prod.default(given, dtype=dtype) if dim is None else _aten.prod.dim_int(given, dim, keepdim, dtype=dtype)
            )
        ctx.save_for_backward(given, result)
        ctx.dim, ctx.keepdim = dim, keepdim
        return result

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> Any:
        given, result = ctx.saved_tensors
        if ctx.dim is not None and not ctx.keepdim and given.dim():
            grad, result = grad.unsqueeze(ctx.dim), result.unsqueeze(ctx.dim)
        zeros = given == 0  # names hold what the formula's do, until its end
        count = zeros.sum(ctx.dim, True) if ctx.dim is not None else zeros
        count.sum()
        return (grad * (result / given)).to(given.dtype), None, None, None


class _Cumprod(torch.autograd.Function):
    """Without zeros: the sums of result · grad from the end, over the input. It asks for zeros first."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, dim: int, dtype: Any) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            result: Tensor = _aten.cumprod.default(given, dim, dtype=dtype)
        ctx.save_for_backward(given, result)
        ctx.dim = dim
        return result

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> Any:
        given, result = ctx.saved_tensors
        if given.dim() == 0 or given.shape[_dim_of(given, ctx.dim)] == 1:
            return grad, None, None
        products = result * grad
        zeros = given == 0
        zeros.any()
        flipped = products.flip(ctx.dim)
        sums = flipped.cumsum(ctx.dim)
        backwards = sums.flip(ctx.dim)
        del flipped, sums
        return backwards.div(given), None, None


def _affine_grid_backward(grad: Tensor, size: list[int], align_corners: bool) -> Tensor:
    """The gradient of `affine_grid_generator`: PyTorch's own makes a number for sides of one pixel that is not fake."""
    samples, _, *sides = size
    points, dims = math.prod(sides), len(sides)
    base = torch.empty((samples, *sides, dims + 1), dtype=grad.dtype)
    for dim, side in enumerate(sides):
        base.select(-1, dims - 1 - dim).copy_(torch.linspace(-1, 1, side).view(-1, *[1] * (dims - 1 - dim)))
    base.select(-1, -1).fill_(1)
    return base.view(samples, points, dims + 1).transpose(1, 2).bmm(grad.reshape(samples, points, dims)).transpose(1, 2)


def _prod(given: Tensor, *, dtype: Any = None) -> Any:
    return _Prod.apply(given, None, False, dtype)


def _prod_dim(given: Tensor, dim: int, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return _Prod.apply(given, dim, keepdim, dtype)


def _cumprod(given: Tensor, dim: int, *, dtype: Any = None) -> Any:
    return _Cumprod.apply(given, dim, dtype)


FORMULAS: dict[str, Callable[..., Any]] = {"prod": _prod, "prod.dim_int": _prod_dim, "cumprod": _cumprod}


@contextmanager
def plain_formulas() -> Iterator[None]:
    """Ordinary data's formulas until the end of the block."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, formula in FORMULAS.items():
            library.impl(name, formula, "AutogradCPU")
        library.impl("affine_grid_generator_backward", _affine_grid_backward, "CompositeImplicitAutograd", allow_override=True)
    try:
        yield
    finally:
        library._destroy()
