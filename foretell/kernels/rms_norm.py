"""RMSNorm, alone and with the residual add before it.

    rms_norm        y = x · rstd · (offset + weight), rstd = 1 / √(mean x² + eps)
    add_rms_norm    sum = x + residual; y = rms_norm(sum)

The forward keeps rstd, a float32 for each row. The backward reads a row once and holds it, so that it moves dy, x and dx and no more;
dweight is added up in float32 by a few programs for each multiprocessor, and their parts once more at the end. `offset` is 1 for
models that store the weight less one.

Bytes at the least, of T rows of H elements in two bytes: 4TH + 6TH alone, 8TH + 8TH with the add.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foretell.kernels.kernel import Shape, TrainingKernel, define, differentiate, in_float32_under_autocast, wider
from foretell.kernels.rows import DECLARED, DTYPES, apart, buckets, drawn, each_row, like, must, shape_of

# ---------------------------------------------------------------- in plain torch


def reference(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return scaled if weight is None else scaled * (offset + weight)


def add_reference(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, reference(total, weight, eps, offset)


def _plain(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    wide = x.to(wider(x.dtype))
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = wide * rstd
    return (y if weight is None else y * (offset + weight.to(y.dtype))).to(x.dtype).contiguous(), rstd.flatten()


def _plain_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, wants_weight: bool, dsum: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    scale = rstd.view(*x.shape[:-1], 1)
    unit, up = x.to(scale.dtype) * scale, dy.to(scale.dtype)
    wide = up if weight is None else up * (offset + weight.to(scale.dtype))
    dx = scale * (wide - unit * (wide * unit).mean(-1, keepdim=True))
    if dsum is not None:
        dx = dx + dsum.to(dx.dtype)
    dweight = (up * unit).flatten(0, -2).sum(0).to(weight.dtype) if wants_weight and weight is not None else x.new_empty(0)
    return dx.to(x.dtype).contiguous(), dweight


def _add_plain(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float) -> tuple[Tensor, Tensor, Tensor]:
    total = (x + residual).contiguous()
    return total, *_plain(total, weight, eps, offset)


def _add_plain_backward(
    dy: Tensor, dsum: Tensor, total: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, wants_weight: bool
) -> tuple[Tensor, Tensor]:
    return _plain_backward(dy, total, weight, rstd, offset, wants_weight, dsum)


# ---------------------------------------------------------------- ops


def _fake_backward(x: Tensor, weight: Tensor | None, wants_weight: bool) -> tuple[Tensor, Tensor]:
    return like(x), (x if weight is None else weight).new_empty(x.shape[-1] if wants_weight else 0)


_rms_norm = define(
    "rms_norm", "(Tensor x, Tensor? weight, float eps, float offset) -> (Tensor, Tensor)", plain=_plain, triton="norm.rms_norm",
    fake=lambda x, weight, eps, offset: (like(x), each_row(x)),
)  # fmt: skip
_rms_norm_backward = define(
    "rms_norm_backward", "(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, float offset, bool wants_weight) -> (Tensor, Tensor)",
    plain=_plain_backward, triton="norm.rms_norm_backward",
    fake=lambda dy, x, weight, rstd, offset, wants_weight: _fake_backward(x, weight, wants_weight),
)  # fmt: skip
_add_rms_norm = define(
    "add_rms_norm", "(Tensor x, Tensor residual, Tensor? weight, float eps, float offset) -> (Tensor, Tensor, Tensor)", plain=_add_plain,
    triton="norm.add_rms_norm", fake=lambda x, residual, weight, eps, offset: (like(x), like(x), each_row(x)),
)  # fmt: skip
_add_rms_norm_backward = define(
    "add_rms_norm_backward",
    "(Tensor dy, Tensor dsum, Tensor sum, Tensor? weight, Tensor rstd, float offset, bool wants_weight) -> (Tensor, Tensor)",
    plain=_add_plain_backward, triton="norm.add_rms_norm_backward",
    fake=lambda dy, dsum, total, weight, rstd, offset, wants_weight: _fake_backward(total, weight, wants_weight),
)  # fmt: skip


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, ctx.offset = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, output[1])


def _gradient(ctx: Any, dy: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None, None
    x, weight, rstd = ctx.saved_tensors
    wants_weight = ctx.needs_input_grad[1]
    dx, dweight = _rms_norm_backward(dy, x, weight, rstd, ctx.offset, wants_weight)
    return dx if ctx.needs_input_grad[0] else None, dweight if wants_weight else None, None, None


def _add_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, _, weight, _, ctx.offset = inputs
    total, _, rstd = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*apart(ctx, total), rstd)
    ctx.save_for_backward(total, weight, rstd)


def _add_gradient(ctx: Any, dsum: Tensor | None, dy: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    if dy is None:
        return dsum if needs[0] else None, dsum if needs[1] else None, None, None, None
    total, weight, rstd = ctx.saved_tensors
    if dsum is None:
        dx, dweight = _rms_norm_backward(dy, total, weight, rstd, ctx.offset, needs[2])
    else:
        dx, dweight = _add_rms_norm_backward(dy, dsum, total, weight, rstd, ctx.offset, needs[2])
    return dx if needs[0] else None, dx if needs[1] else None, dweight if needs[2] else None, None, None


differentiate("rms_norm", _context, _gradient)
differentiate("add_rms_norm", _add_context, _add_gradient)
in_float32_under_autocast("rms_norm")
in_float32_under_autocast("add_rms_norm")


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    must(weight is None or weight.shape == x.shape[-1:], "a weight for each element of a row")
    return _rms_norm(x, weight, eps, offset)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    must(weight is None or weight.shape == x.shape[-1:], "a weight for each element of a row")
    must((x.shape, x.dtype) == (residual.shape, residual.dtype), "two tensors of one shape and format")
    total, y, _ = _add_rms_norm(x, residual, weight, eps, offset)
    return total, y


# ---------------------------------------------------------------- where they serve


def draw(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    return drawn(shape, dtype, device), 1 + 0.1 * torch.randn(shape["width"], dtype=dtype, device=device), 1e-5


def add_draw(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    return drawn(shape, dtype, device), *draw(shape, dtype, device)


# Of each width, as `rows.py` has them.
_CONFIGS = (
    {"warps": 2, "each": 1, "backward_warps": 4, "per_sm": 8, "ahead": 1, "hold": 1, "again": 0},
    {"warps": 4, "each": 1, "backward_warps": 4, "per_sm": 4, "ahead": 1, "hold": 1, "again": 0},
    {"warps": 4, "each": 1, "backward_warps": 8, "per_sm": 4, "ahead": 0, "hold": 0, "again": 0},
    {"warps": 8, "each": 1, "backward_warps": 16, "per_sm": 1, "ahead": 1, "hold": 1, "again": 0},
    {"warps": 16, "each": 1, "backward_warps": 16, "per_sm": 1, "ahead": 0, "hold": 0, "again": 0},
)
_ADD_CONFIGS = (
    {"warps": 2, "each": 1, "backward_warps": 4, "per_sm": 7, "ahead": 1, "hold": 1, "again": 0},
    {"warps": 4, "each": 1, "backward_warps": 8, "per_sm": 3, "ahead": 1, "hold": 1, "again": 0},
    {"warps": 4, "each": 1, "backward_warps": 8, "per_sm": 3, "ahead": 0, "hold": 0, "again": 0},
    {"warps": 8, "each": 1, "backward_warps": 16, "per_sm": 1, "ahead": 1, "hold": 1, "again": 0},
    {"warps": 16, "each": 1, "backward_warps": 16, "per_sm": 1, "ahead": 0, "hold": 0, "again": 1},
)

RMS_NORM = TrainingKernel(
    name="rms_norm", says="RMSNorm, forward and backward", reference=reference, call=rms_norm, shape_of=shape_of,
    buckets=buckets(*_CONFIGS), dtypes=DTYPES, measured_at=DECLARED, draw=draw,
    floor_bytes=lambda shape, size: 5 * shape["rows"] * shape["width"] * size,
    saved_bytes=lambda shape, size: 4 * shape["rows"],
)  # fmt: skip
ADD_RMS_NORM = TrainingKernel(
    name="add_rms_norm", says="residual add and RMSNorm, forward and backward", reference=add_reference, call=add_rms_norm, shape_of=shape_of,
    buckets=buckets(*_ADD_CONFIGS), dtypes=DTYPES, measured_at=DECLARED, draw=add_draw,
    floor_bytes=lambda shape, size: 8 * shape["rows"] * shape["width"] * size, saved_bytes=lambda shape, size: 4 * shape["rows"],
)  # fmt: skip
