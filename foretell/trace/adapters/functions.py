"""Products of adapted layers with their backward written by hand.

Forward and backward are the ops that autograd would run on the plain formulas, in the same order, so results and gradients
are equal to the bit. What differs is what is kept for backward: an input as it came in and not a copy of it in another
dtype, a weight packed as it is held, and of an adapter the small product alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.trace.adapters.formats import unpack


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What products are computed in where autocast is on."""
    kind = x.device.type  # every call here is one that torch.compile of torch 2.11 looks through: `is_autocast_available` is not
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    return nullcontext() if autocast_dtype(x) is None else torch.autocast(x.device.type, enabled=False)


def _cast(x: Tensor, through: torch.dtype, dtype: torch.dtype) -> Tensor:
    """What `x.to(through).to(dtype)` gives, without the step between where that changes no value."""
    exact = torch.promote_types(x.dtype, through) == through
    return x.to(dtype) if exact else x.to(through).to(dtype)


class PackedProduct(torch.autograd.Function):
    """x Wᵀ + bias for a packed W; saves W packed, never x, which no gradient of a frozen weight needs."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, nested: Tensor, shape: Sequence[int], kind: str, bias: Tensor | None
    ) -> Any:
        ctx.save_for_backward(codes, scales, nested)
        ctx.shape, ctx.kind, ctx.trains_bias = shape, kind, bias is not None and bias.requires_grad
        return F.linear(x, unpack(codes, scales, nested, shape, x.dtype, kind), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        codes, scales, nested = ctx.saved_tensors
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = gradient @ unpack(codes, scales, nested, ctx.shape, gradient.dtype, ctx.kind)
        of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.trains_bias else None
        return of_x, None, None, None, None, None, of_bias


class LowRankProduct(torch.autograd.Function):
    """(x Aᵀ) Bᵀ · scale, computed in `dtype`; saves x as it is, A, B and x Aᵀ."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        with no_autocast(x):
            small = F.linear(_cast(x, a.dtype, dtype), a.to(dtype))
            ctx.save_for_backward(x, a, b, small)
            ctx.scale, ctx.dtype = scale, dtype
            return F.linear(small, b.to(dtype)) * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, a, b, small = ctx.saved_tensors
        with no_autocast(x):
            of_x, of_a, of_b = _of_low_rank(x, a, b, small, gradient * ctx.scale, ctx.dtype, ctx.needs_input_grad[0])
        return of_x, of_a, of_b, None, None


def _of_low_rank(
    x: Tensor, a: Tensor, b: Tensor, small: Tensor, gradient: Tensor, dtype: torch.dtype, of_input: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of x, A and B where `gradient` is that of (x Aᵀ) Bᵀ."""
    rows = gradient.reshape(-1, gradient.shape[-1])
    of_small = rows @ b.to(dtype)
    of_b = (rows.t() @ small.reshape(-1, small.shape[-1])).to(b.dtype)
    of_a = (of_small.t() @ _cast(x, a.dtype, dtype).reshape(-1, x.shape[-1])).to(a.dtype)
    of_x = _cast((of_small @ a.to(dtype)).view(x.shape), a.dtype, x.dtype) if of_input else None
    return of_x, of_a, of_b


PIECE_BYTES = 512 * 2**20
"""Where adapters are wider than what they are given, a layer whose copy in their dtype were larger is computed in pieces of this size."""


def pieces(count: int, others: int, dtype: torch.dtype) -> list[slice]:
    """A side of a matrix in as many equal parts as leave PIECE_BYTES for one; `others` is the length of its other side."""
    number = max(1, -(-count * others * dtype.itemsize // PIECE_BYTES))
    each = -(-count // number)
    return [slice(begin, min(count, begin + each)) for begin in range(0, count, each)]


class AdaptedProduct(torch.autograd.Function):
    """x Wᵀ + bias + (x Aᵀ) Bᵀ · scale for a frozen W, where A and B are wider than x: no copy of x, of the result or of its gradient in
    their dtype is ever there as a whole. Saves x, A, B, x Aᵀ and W as it is held.

    Rows of results and of the gradient of x are computed some at a time, and so are columns of the gradients of A and B: no sum is
    cut, so that what differs from `LowRankProduct` beside the base is at most which kernel a product of another shape takes.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, a: Tensor, b: Tensor, scale: float, round_first: bool, bias: Tensor | None, weight: Tensor | None,
        packed: Tensor | None, scales: Tensor | None, nested: Tensor | None, shape: Sequence[int], kind: str,
    ) -> Tensor:  # fmt: skip
        base = (weight, packed, scales, nested)
        frozen, rows = _held(base, shape, kind, x.dtype), x.reshape(-1, x.shape[-1])
        result, small = rows.new_empty((rows.shape[0], b.shape[0])), a.new_empty((rows.shape[0], a.shape[0]))
        for some in pieces(rows.shape[0], max(a.shape[1], b.shape[0]), a.dtype):
            small[some] = F.linear(rows[some].to(a.dtype), a)
            more = F.linear(small[some], b) * scale  # no product is changed in place: selective recompute keeps it
            result[some] = F.linear(rows[some], frozen, bias) + (more.to(x.dtype) if round_first else more)
        ctx.save_for_backward(x, a, b, small, *base)
        ctx.scale, ctx.shape, ctx.kind = scale, shape, kind
        return result.view(*x.shape[:-1], b.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, a, b, small, *base = ctx.saved_tensors
        rows, wide = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        count, wanted = rows.shape[0], ctx.needs_input_grad[0]
        of_x = wide @ _held(base, ctx.shape, ctx.kind, gradient.dtype) if wanted else None
        of_small = torch.empty_like(small)
        for some in pieces(count, max(rows.shape[1], wide.shape[1]), a.dtype):
            of_small[some] = wide[some].to(a.dtype).mul_(ctx.scale) @ b
            if of_x is not None:
                of_x[some] += (of_small[some] @ a).to(x.dtype)
        of_b, of_a = torch.empty_like(b), torch.empty_like(a)
        for some in pieces(wide.shape[1], count, a.dtype):
            of_b[some] = wide[:, some].to(a.dtype).mul_(ctx.scale).t() @ small
        for some in pieces(rows.shape[1], count, a.dtype):
            of_a[:, some] = of_small.t() @ rows[:, some].to(a.dtype)
        return None if of_x is None else of_x.view(x.shape), of_a, of_b, *[None] * 9


def _held(base: Sequence[Tensor | None], shape: Sequence[int], kind: str, dtype: torch.dtype) -> Tensor:
    """A frozen weight, unpacked where it is packed."""
    weight, packed, scales, nested = base
    if weight is not None:
        return weight
    assert packed is not None and scales is not None and nested is not None
    return unpack(packed, scales, nested, shape, dtype, kind)


class DoraProduct(torch.autograd.Function):
    """(m/n − 1) · base + (m/n) · (x Aᵀ) Bᵀ · scale for magnitudes m and norms n, base being `result` less the bias.

    Saves x, the result, A, B, m, n and x Aᵀ; all else is computed again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, result: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, magnitude: Tensor, norm: Tensor,
        scale: float, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        with no_autocast(x):
            small = F.linear(_cast(x, a.dtype, dtype), a.to(dtype))
            ctx.save_for_backward(x, result, bias, a, b, magnitude, norm, small)
            ctx.scale, ctx.dtype = scale, dtype
            share = (magnitude / norm).view(1, -1)
            base = result if bias is None else result - bias
            return (share - 1) * base + share * F.linear(small, b.to(dtype)) * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, result, bias, a, b, magnitude, norm, small = ctx.saved_tensors
        with no_autocast(x):
            share = (magnitude / norm).view(1, -1)
            base = result if bias is None else result - bias
            scaled = gradient * ctx.scale
            of_share = (gradient * base).sum_to_size(share.shape).to(share.dtype)
            of_share = of_share + (scaled * F.linear(small, b.to(ctx.dtype))).sum_to_size(share.shape).to(share.dtype)
            of_result = (gradient * (share - 1)).to(result.dtype) if ctx.needs_input_grad[1] else None
            of_product = (scaled * share).to(ctx.dtype)
            of_x, of_a, of_b = _of_low_rank(x, a, b, small, of_product, ctx.dtype, ctx.needs_input_grad[0])
            of_magnitude = (of_share.view(-1) / norm).to(magnitude.dtype)
        return of_x, of_result, None, of_a, of_b, of_magnitude, None, None, None
