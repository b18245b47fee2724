"""Products of adapted layers with their backward written by hand.

Forward and backward are the ops that autograd would run on the plain formulas, in the same order, so results and gradients
are equal to the bit. What differs is what is kept for backward: an input as it came in and not a copy of it in another
dtype, a weight packed as it is held, and of an adapter the small product alone.

The functions at the end are what layers call. Like those of PyTorch they ask tensors that have a `__torch_function__` first: where
ranks share positions or layers, rules say on which parts a rank calls them (plan.tensor.products).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

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


def _by(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1.0 else x * scale


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


PARTS = 3
"""Numbers in bf16, of 8 bits each, that add up to one in fp32, of 24."""


def in_parts(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether products of such an input with fp32 numbers are computed on units for bf16: where code is compiled, which keeps no
    order of sums anyway."""
    return torch.compiler.is_compiling() and x.is_cuda and x.dtype == torch.bfloat16 and dtype == torch.float32


def parts_of(x: Tensor) -> Tensor:
    """An fp32 matrix as bf16 ones side by side, which add up to it to the bit. By masks: a compiler leaves casts to and fro out."""
    found = []
    for _ in range(PARTS):
        found.append((x.view(torch.int32) & -65536).view(torch.float32))
        x = x - found[-1]
    return torch.cat([one.to(torch.bfloat16) for one in found], 1)


def by_parts(wide: Tensor, narrow: Tensor) -> Tensor:
    """A bf16 matrix times an fp32 one: exact products, summed in fp32."""
    parts = parts_of(narrow)
    whole = torch.mm(wide, parts, out_dtype=torch.float32) if wide.is_cuda else wide.float() @ parts.float()
    return whole.view(wide.shape[0], PARTS, narrow.shape[1]).sum(1)


class LowRankProduct(torch.autograd.Function):
    """((x Aᵀ) · inner) Bᵀ · outer, computed in `dtype`; saves x as it is, A, B and x Aᵀ. `inner` is a power of two, so that it changes no
    digit and may stand at the small product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, inner: float, outer: float, dtype: torch.dtype) -> Tensor:
        with no_autocast(x):
            if in_parts(x, dtype):
                small = by_parts(x.reshape(-1, x.shape[-1]), a.t().contiguous()).view(*x.shape[:-1], a.shape[0])
            else:
                small = F.linear(_cast(x, a.dtype, dtype), a.to(dtype))
            ctx.save_for_backward(x, a, b, small)
            ctx.scales, ctx.dtype = (inner, outer), dtype
            return _by(F.linear(_by(small, inner), b.to(dtype)), outer)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, a, b, small = ctx.saved_tensors
        inner, outer = ctx.scales
        with no_autocast(x):
            if in_parts(x, ctx.dtype):
                of_x, of_a, of_b = of_parts(x, a, b, small, gradient, inner * outer, ctx.needs_input_grad[0])
            else:
                of_x, of_a, of_b = of_low_rank(x, a, b, small, _by(gradient, outer), ctx.dtype, ctx.needs_input_grad[0], inner)
        return of_x, of_a, of_b, None, None, None


def of_parts(
    x: Tensor, a: Tensor, b: Tensor, small: Tensor, gradient: Tensor, scale: float, of_input: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """As `of_low_rank`, where the layer rounds its result to bf16: the gradient that comes back has no more digits, though it is fp32."""
    rows, wide = gradient.to(x.dtype).reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
    of_small = by_parts(rows, b) * scale
    of_b = by_parts(rows.t(), small.reshape(-1, small.shape[-1])) * scale
    of_a = by_parts(wide.t(), of_small).t()
    of_x = (of_small @ a).view(x.shape).to(x.dtype) if of_input else None
    return of_x, of_a, of_b


def of_low_rank(
    x: Tensor, a: Tensor, b: Tensor, small: Tensor, gradient: Tensor, dtype: torch.dtype, of_input: bool, scale: float = 1.0
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of x, A and B where `gradient` is that of (x Aᵀ) Bᵀ · scale, a power of two."""
    rows = gradient.reshape(-1, gradient.shape[-1])
    of_small = _by(rows @ b.to(dtype), scale)
    of_b = _by(rows.t() @ small.reshape(-1, small.shape[-1]), scale).to(b.dtype)
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
    """x Wᵀ + bias + ((x Aᵀ) · inner) Bᵀ · outer for a frozen W, where A and B are wider than x: no copy of x, of the result or of its gradient in
    their dtype is ever there as a whole. Saves x, A, B, x Aᵀ and W as it is held.

    Rows of results and of the gradient of x are computed some at a time, and so are columns of the gradients of A and B: no sum is
    cut, so that what differs from `LowRankProduct` beside the base is at most which kernel a product of another shape takes.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, a: Tensor, b: Tensor, inner: float, outer: float, round_first: bool, bias: Tensor | None, weight: Tensor | None,
        packed: Tensor | None, scales: Tensor | None, nested: Tensor | None, shape: Sequence[int], kind: str,
    ) -> Tensor:  # fmt: skip
        base = (weight, packed, scales, nested)
        frozen, rows = _held(base, shape, kind, x.dtype), x.reshape(-1, x.shape[-1])
        result, small = rows.new_empty((rows.shape[0], b.shape[0])), a.new_empty((rows.shape[0], a.shape[0]))
        for some in pieces(rows.shape[0], max(a.shape[1], b.shape[0]), a.dtype):
            small[some] = F.linear(rows[some].to(a.dtype), a)
            more = _by(F.linear(_by(small[some], inner), b), outer)  # no product is changed in place: selective recompute keeps it
            result[some] = F.linear(rows[some], frozen, bias) + (more.to(x.dtype) if round_first else more)
        ctx.save_for_backward(x, a, b, small, *base)
        ctx.scales, ctx.shape, ctx.kind = (inner, outer), shape, kind
        return result.view(*x.shape[:-1], b.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, a, b, small, *base = ctx.saved_tensors
        rows, wide = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        count, wanted, (inner, outer) = rows.shape[0], ctx.needs_input_grad[0], ctx.scales
        of_x = wide @ _held(base, ctx.shape, ctx.kind, gradient.dtype) if wanted else None
        of_small = torch.empty_like(small)
        for some in pieces(count, max(rows.shape[1], wide.shape[1]), a.dtype):
            of_small[some] = _by(_widened(wide[some], a.dtype, outer) @ b, inner)
            if of_x is not None:
                of_x[some] += (of_small[some] @ a).to(x.dtype)
        of_b, of_a = torch.empty_like(b), torch.empty_like(a)
        for some in pieces(wide.shape[1], count, a.dtype):
            of_b[some] = _by(_widened(wide[:, some], a.dtype, outer).t() @ small, inner)
        for some in pieces(rows.shape[1], count, a.dtype):
            of_a[:, some] = of_small.t() @ rows[:, some].to(a.dtype)
        return None if of_x is None else of_x.view(x.shape), of_a, of_b, *[None] * 10


def _widened(piece: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    copy = piece.to(dtype)
    return copy if scale == 1.0 else copy.mul_(scale)


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
            of_x, of_a, of_b = of_low_rank(x, a, b, small, of_product, ctx.dtype, ctx.needs_input_grad[0])
            of_magnitude = (of_share.view(-1) / norm).to(magnitude.dtype)
        return of_x, of_result, None, of_a, of_b, of_magnitude, None, None, None


# ---------------------------------------------------------------- what layers call


def _asks(tensors: Sequence[Tensor | None]) -> bool:
    return not torch.compiler.is_compiling() and has_torch_function(tensors)


def packed_product(x: Tensor, codes: Tensor, scales: Tensor, nested: Tensor, shape: Sequence[int], kind: str, bias: Tensor | None) -> Tensor:
    if _asks(given := (x, codes, scales, nested, bias)):
        return handle_torch_function(packed_product, given, x, codes, scales, nested, shape, kind, bias)  # type: ignore[no-any-return]
    return PackedProduct.apply(x, codes, scales, nested, shape, kind, bias)  # type: ignore[no-any-return]


def low_rank_product(x: Tensor, a: Tensor, b: Tensor, inner: float, outer: float, dtype: torch.dtype) -> Tensor:
    if _asks(given := (x, a, b)):
        return handle_torch_function(low_rank_product, given, x, a, b, inner, outer, dtype)  # type: ignore[no-any-return]
    return LowRankProduct.apply(x, a, b, inner, outer, dtype)  # type: ignore[no-any-return]


def adapted_product(
    x: Tensor, a: Tensor, b: Tensor, inner: float, outer: float, round_first: bool, bias: Tensor | None, weight: Tensor | None,
    packed: Tensor | None, scales: Tensor | None, nested: Tensor | None, shape: Sequence[int], kind: str,
) -> Tensor:  # fmt: skip
    rest = (inner, outer, round_first, bias, weight, packed, scales, nested, shape, kind)
    if _asks(given := (x, a, b, bias, weight, packed, scales, nested)):
        return handle_torch_function(adapted_product, given, x, a, b, *rest)  # type: ignore[no-any-return]
    return AdaptedProduct.apply(x, a, b, *rest)  # type: ignore[no-any-return]


def dora_product(
    x: Tensor, result: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, magnitude: Tensor, norm: Tensor, scale: float, dtype: torch.dtype
) -> Tensor:
    if _asks(given := (x, result, bias, a, b, magnitude, norm)):
        return handle_torch_function(dora_product, given, x, result, bias, a, b, magnitude, norm, scale, dtype)  # type: ignore[no-any-return]
    return DoraProduct.apply(x, result, bias, a, b, magnitude, norm, scale, dtype)  # type: ignore[no-any-return]
