"""The gate of an MLP: activation(gate) · up, with SiLU (SwiGLU) or GELU (GeGLU).

The forward keeps gate and up, which their projections made, and nothing of its own; the backward works the activation out again.
With `once` the gradients take the places of gate and up, so that forward and backward together make one tensor beyond their
inputs, the result: for whoever knows that nobody else looks at them. Both are marked as changed, so that another op that kept one, or a
second backward, is refused by autograd and never wrong.

Bytes at the least, of T rows of I elements in two bytes: 6TI + 10TI.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.kernels.kernel import Shape, TrainingKernel, define, define_in_place, differentiate, wider
from foretell.kernels.rows import DTYPES, buckets, drawn, like, must, shape_of

SILU, GELU, GELU_TANH = "silu", "gelu", "gelu_tanh"
ACTIVATIONS = {SILU: F.silu, GELU: F.gelu, GELU_TANH: lambda x: F.gelu(x, approximate="tanh")}

# ---------------------------------------------------------------- in plain torch


def reference(gate: Tensor, up: Tensor, activation: str = SILU, once: bool = False) -> Tensor:
    return ACTIVATIONS[activation](gate) * up


def _plain(gate: Tensor, up: Tensor, activation: str, once: bool) -> Tensor:
    wide = wider(gate.dtype)
    return (ACTIVATIONS[activation](gate.to(wide)) * up.to(wide)).to(gate.dtype).contiguous()


def _slope(x: Tensor, activation: str) -> Tensor:
    if activation == SILU:
        s = x.sigmoid()
        return s * (1 + x * (1 - s))
    if activation == GELU:
        return 0.5 * (1 + torch.erf(x * 0.5**0.5)) + x * torch.exp(-0.5 * x * x) * 0.3989422804014327
    t = torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x)


def _plain_backward(dy: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    x, other, grad = (one.to(wider(gate.dtype)) for one in (gate, up, dy))
    dgate, dup = grad * other * _slope(x, activation), grad * ACTIVATIONS[activation](x)
    return dgate.to(gate.dtype).contiguous(), dup.to(up.dtype).contiguous()


def _plain_in_place(dy: Tensor, gate: Tensor, up: Tensor, activation: str) -> None:
    dgate, dup = _plain_backward(dy, gate, up, activation)
    gate.copy_(dgate)
    up.copy_(dup)


# ---------------------------------------------------------------- ops

_gated = define(
    "gated", "(Tensor gate, Tensor up, str activation, bool once) -> Tensor", plain=_plain, triton="gated.gated",
    fake=lambda gate, up, activation, once: like(gate),
)  # fmt: skip
_gated_backward = define(
    "gated_backward", "(Tensor dy, Tensor gate, Tensor up, str activation) -> (Tensor, Tensor)", plain=_plain_backward,
    triton="gated.gated_backward", fake=lambda dy, gate, up, activation: (like(gate), like(up)),
)  # fmt: skip
_gated_backward_in_place = define_in_place(
    "gated_backward_", "(Tensor dy, Tensor(a!) gate, Tensor(b!) up, str activation) -> ()", plain=_plain_in_place,
    triton="gated.gated_backward_", fake=lambda dy, gate, up, activation: None, changes=(1, 2),
)  # fmt: skip


def _context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, ctx.activation, ctx.once = inputs
    ctx.save_for_backward(gate, up)


def _gradient(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    gate, up = ctx.saved_tensors
    needs = ctx.needs_input_grad
    if ctx.once and needs[0] and needs[1]:
        gate, up = gate.detach(), up.detach()  # they share memory and version with what was kept
        _gated_backward_in_place(dy, gate, up, ctx.activation)
        return gate, up, None, None
    dgate, dup = _gated_backward(dy, gate, up, ctx.activation)
    return dgate if needs[0] else None, dup if needs[1] else None, None, None


differentiate("gated", _context, _gradient)


def gated(gate: Tensor, up: Tensor, activation: str = SILU, once: bool = False) -> Tensor:
    """`once`: nobody else keeps gate or up, and backward runs once."""
    must((gate.shape, gate.dtype) == (up.shape, up.dtype), "two tensors of one shape and format")
    return _gated(gate, up, activation, once)


# ---------------------------------------------------------------- where they serve


def _draw(activation: str) -> Any:
    def draw(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        return drawn(shape, dtype, device), drawn(shape, dtype, device), activation

    return draw


# Warps and elements of a program, forward and backward: eight elements of a tensor for each thread and turn.
_CONFIG = {"warps": 4, "block": 2048, "backward_warps": 4, "backward_block": 1024}
DECLARED = tuple({"rows": rows, "width": width} for rows, width in ((16384, 14336), (16384, 4096), (8192, 14336), (8192, 4096), (2048, 14336)))


def _kernel(name: str, says: str, activation: str) -> TrainingKernel:
    return TrainingKernel(
        name=name, says=says, reference=reference, call=gated, shape_of=shape_of, buckets=buckets(_CONFIG, widths=(1 << 17,)), dtypes=DTYPES,
        measured_at=DECLARED, draw=_draw(activation), floor_bytes=lambda shape, size: 8 * shape["rows"] * shape["width"] * size,
        saved_bytes=lambda shape, size: 0,
    )  # fmt: skip


SWIGLU = _kernel("swiglu", "SiLU of the gate times up, forward and backward", SILU)
GEGLU = _kernel("geglu", "GELU of the gate times up, forward and backward", GELU)
GEGLU_TANH = _kernel("geglu_tanh", "GELU by tanh of the gate times up, forward and backward", GELU_TANH)
KERNEL_OF = {SILU: SWIGLU, GELU: GEGLU, GELU_TANH: GEGLU_TANH}
