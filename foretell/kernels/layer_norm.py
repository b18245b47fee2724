"""LayerNorm, alone and with the residual add before it.

    layer_norm      y = (x - mean) · rstd · weight + bias
    add_layer_norm  sum = x + residual; y = layer_norm(sum)

As `rms_norm.py`, with mean and rstd kept; the spread is taken around the mean, from the row that is held.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foretell.kernels.kernel import Shape, TrainingKernel, define, differentiate, in_float32_under_autocast, wider
from foretell.kernels.rows import DECLARED, DTYPES, apart, buckets, drawn, each_row, like, must, shape_of

# ---------------------------------------------------------------- in plain torch


def reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def add_reference(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, reference(total, weight, bias, eps)


def _plain(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    wide = x.to(wider(x.dtype))
    mean = wide.mean(-1, keepdim=True)
    rstd = torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + eps)
    y = (wide - mean) * rstd
    y = y if weight is None else y * weight.to(y.dtype)
    y = y if bias is None else y + bias.to(y.dtype)
    return y.to(x.dtype).contiguous(), mean.flatten(), rstd.flatten()


def _plain_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, wants_weight: bool, wants_bias: bool, dsum: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    scale = rstd.view(*x.shape[:-1], 1)
    unit, up = (x.to(scale.dtype) - mean.view_as(scale)) * scale, dy.to(scale.dtype)
    wide = up if weight is None else up * weight.to(scale.dtype)
    dx = scale * (wide - unit * (wide * unit).mean(-1, keepdim=True) - wide.mean(-1, keepdim=True))
    if dsum is not None:
        dx = dx + dsum.to(dx.dtype)
    learned = x if weight is None else weight
    dweight = (up * unit).flatten(0, -2).sum(0).to(learned.dtype) if wants_weight else learned.new_empty(0)
    dbias = up.flatten(0, -2).sum(0).to(learned.dtype) if wants_bias else learned.new_empty(0)
    return dx.to(x.dtype).contiguous(), dweight, dbias


def _add_plain(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = (x + residual).contiguous()
    return total, *_plain(total, weight, bias, eps)


def _add_plain_backward(
    dy: Tensor, dsum: Tensor, total: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, wants_weight: bool, wants_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _plain_backward(dy, total, weight, mean, rstd, wants_weight, wants_bias, dsum)


# ---------------------------------------------------------------- ops


def _fake_backward(x: Tensor, weight: Tensor | None, wants_weight: bool, wants_bias: bool) -> tuple[Tensor, Tensor, Tensor]:
    learned = x if weight is None else weight
    return like(x), learned.new_empty(x.shape[-1] if wants_weight else 0), learned.new_empty(x.shape[-1] if wants_bias else 0)


_layer_norm = define(
    "layer_norm", "(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)", plain=_plain, triton="norm.layer_norm",
    fake=lambda x, weight, bias, eps: (like(x), each_row(x), each_row(x)),
)  # fmt: skip
_layer_norm_backward = define(
    "layer_norm_backward",
    "(Tensor dy, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, bool wants_weight, bool wants_bias) -> (Tensor, Tensor, Tensor)",
    plain=_plain_backward, triton="norm.layer_norm_backward",
    fake=lambda dy, x, weight, mean, rstd, wants_weight, wants_bias: _fake_backward(x, weight, wants_weight, wants_bias),
)  # fmt: skip
_add_layer_norm = define(
    "add_layer_norm", "(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor, Tensor)",
    plain=_add_plain, triton="norm.add_layer_norm",
    fake=lambda x, residual, weight, bias, eps: (like(x), like(x), each_row(x), each_row(x)),
)  # fmt: skip
_add_layer_norm_backward = define(
    "add_layer_norm_backward",
    "(Tensor dy, Tensor dsum, Tensor sum, Tensor? weight, Tensor mean, Tensor rstd, bool wants_weight, bool wants_bias)"
    " -> (Tensor, Tensor, Tensor)",
    plain=_add_plain_backward, triton="norm.add_layer_norm_backward",
    fake=lambda dy, dsum, total, weight, mean, rstd, wants_weight, wants_bias: _fake_backward(total, weight, wants_weight, wants_bias),
)  # fmt: skip


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, _, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.save_for_backward(x, weight, output[1], output[2])


def _gradient(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None, None
    needs = ctx.needs_input_grad
    dx, dweight, dbias = _layer_norm_backward(dy, *ctx.saved_tensors, needs[1], needs[2])
    return dx if needs[0] else None, dweight if needs[1] else None, dbias if needs[2] else None, None


def _add_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    total, _, mean, rstd = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*apart(ctx, total), mean, rstd)
    ctx.save_for_backward(total, inputs[2], mean, rstd)


def _add_gradient(ctx: Any, dsum: Tensor | None, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    if dy is None:
        return dsum if needs[0] else None, dsum if needs[1] else None, None, None, None
    if dsum is None:
        dx, dweight, dbias = _layer_norm_backward(dy, *ctx.saved_tensors, needs[2], needs[3])
    else:
        dx, dweight, dbias = _add_layer_norm_backward(dy, dsum, *ctx.saved_tensors, needs[2], needs[3])
    return dx if needs[0] else None, dx if needs[1] else None, dweight if needs[2] else None, dbias if needs[3] else None, None


differentiate("layer_norm", _context, _gradient)
differentiate("add_layer_norm", _add_context, _add_gradient)
in_float32_under_autocast("layer_norm")
in_float32_under_autocast("add_layer_norm")


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    must(all(one is None or one.shape == x.shape[-1:] for one in (weight, bias)), "a weight and a bias for each element of a row")
    return _layer_norm(x, weight, bias, eps)[0]


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    must(all(one is None or one.shape == x.shape[-1:] for one in (weight, bias)), "a weight and a bias for each element of a row")
    must((x.shape, x.dtype) == (residual.shape, residual.dtype), "two tensors of one shape and format")
    total, y, _, _ = _add_layer_norm(x, residual, weight, bias, eps)
    return total, y


# ---------------------------------------------------------------- where they serve


def draw(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    width = shape["width"]
    weight, bias = (0.1 * torch.randn(width, dtype=dtype, device=device) for _ in range(2))
    return drawn(shape, dtype, device), 1 + weight, bias, 1e-5


def add_draw(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    return drawn(shape, dtype, device), *draw(shape, dtype, device)


# Of each width, as `rows.py` has them.
_CONFIGS = (
    {"warps": 2, "each": 1, "backward_warps": 4, "per_sm": 7, "ahead": 1, "hold": 1, "again": 0},
    {"warps": 4, "each": 1, "backward_warps": 8, "per_sm": 3, "ahead": 1, "hold": 1, "again": 0},
    {"warps": 4, "each": 1, "backward_warps": 8, "per_sm": 2, "ahead": 1, "hold": 1, "again": 0},
    {"warps": 8, "each": 1, "backward_warps": 16, "per_sm": 1, "ahead": 1, "hold": 1, "again": 0},
    {"warps": 16, "each": 1, "backward_warps": 16, "per_sm": 1, "ahead": 0, "hold": 0, "again": 1},
)
_ADD_CONFIGS = (
    {"warps": 2, "each": 1, "backward_warps": 4, "per_sm": 6, "ahead": 1, "hold": 1, "again": 0},
    {"warps": 4, "each": 1, "backward_warps": 8, "per_sm": 3, "ahead": 1, "hold": 1, "again": 0},
    {"warps": 4, "each": 1, "backward_warps": 8, "per_sm": 2, "ahead": 0, "hold": 0, "again": 0},
    {"warps": 8, "each": 1, "backward_warps": 16, "per_sm": 1, "ahead": 0, "hold": 0, "again": 0},
    {"warps": 16, "each": 1, "backward_warps": 16, "per_sm": 1, "ahead": 0, "hold": 0, "again": 1},
)

LAYER_NORM = TrainingKernel(
    name="layer_norm", says="LayerNorm, forward and backward", reference=reference, call=layer_norm, shape_of=shape_of, buckets=buckets(*_CONFIGS),
    dtypes=DTYPES, measured_at=DECLARED, draw=draw, floor_bytes=lambda shape, size: 5 * shape["rows"] * shape["width"] * size,
    saved_bytes=lambda shape, size: 8 * shape["rows"],
)  # fmt: skip
ADD_LAYER_NORM = TrainingKernel(
    name="add_layer_norm", says="residual add and LayerNorm, forward and backward", reference=add_reference, call=add_layer_norm,
    shape_of=shape_of, buckets=buckets(*_ADD_CONFIGS), dtypes=DTYPES, measured_at=DECLARED, draw=add_draw,
    floor_bytes=lambda shape, size: 8 * shape["rows"] * shape["width"] * size, saved_bytes=lambda shape, size: 8 * shape["rows"],
)  # fmt: skip
