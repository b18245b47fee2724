"""Activation of a gate times up: rows side by side, forward and backward. The backward may write over what it reads."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretell.kernels import measured
from foretell.kernels.gated import GELU, GELU_TANH, KERNEL_OF, SILU
from foretell.kernels.kernel import wider
from foretell.kernels.rows import as_rows

_KIND = {SILU: 0, GELU: 1, GELU_TANH: 2}


@triton.jit
def activated(x, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """The activation and its slope."""
    if KIND == 0:
        s = tl.sigmoid(x)
        value = x * s
        slope = s + value * (1.0 - s)
    elif KIND == 1:
        half = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        value = x * half
        slope = half + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    else:
        # (1 + tanh z) / 2 is the sigmoid of 2z; beyond 30 it is 0 or 1, and the cube of more could be infinite.
        near = tl.minimum(tl.maximum(x, -30.0), 30.0)
        half = tl.sigmoid(1.5957691216057308 * (near + 0.044715 * near * near * near))
        value = x * half
        slope = half + value * (1.0 - half) * 1.5957691216057308 * (1.0 + 0.134145 * near * near)
    return value, slope


@triton.jit
def forward_gate(gate, up, y, width, gate_row, up_row, KIND: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(gate + row * gate_row + at, mask=inside, other=0.0).to(WIDE)
    other = tl.load(up + row * up_row + at, mask=inside, other=0.0).to(WIDE)
    value, _ = activated(x, KIND)
    tl.store(y + row * width + at, (value * other).to(y.dtype.element_ty), mask=inside)


@triton.jit
def backward_gate(dy, gate, up, dgate, dup, width, dy_row, gate_row, up_row, dgate_row, dup_row, KIND: tl.constexpr, BLOCK: tl.constexpr,
                  WIDE: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    grad = tl.load(dy + row * dy_row + at, mask=inside, other=0.0).to(WIDE)
    x = tl.load(gate + row * gate_row + at, mask=inside, other=0.0).to(WIDE)
    other = tl.load(up + row * up_row + at, mask=inside, other=0.0).to(WIDE)
    value, slope = activated(x, KIND)
    tl.store(dgate + row * dgate_row + at, (grad * other * slope).to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + row * dup_row + at, (grad * value).to(dup.dtype.element_ty), mask=inside)


def _sized(*tensors: Tensor) -> tuple[int, int]:
    """Rows and width to run over: one row where all are contiguous."""
    first = tensors[0]
    if all(one.is_contiguous() for one in tensors):
        return 1, first.numel()
    return int(first.shape[0]), int(first.shape[1])


MOST_ROWS = 65535
"""Of a grid's second axis."""


def _settings(activation: str, gate: Tensor, backward: str) -> dict[str, Any]:
    chosen = measured.config(KERNEL_OF[activation], {"rows": gate.shape[:-1].numel(), "width": gate.shape[-1]}, gate.device)
    wide = tl.float64 if wider(gate.dtype) == torch.float64 else tl.float32
    launch = {"num_warps": chosen[f"{backward}warps"], "enable_fp_fusion": True}
    return {"KIND": _KIND[activation], "BLOCK": chosen[f"{backward}block"], "WIDE": wide, **launch}


def gated(gate: Tensor, up: Tensor, activation: str, once: bool) -> Tensor:
    y = torch.empty_like(gate, memory_format=torch.contiguous_format)
    if gate.numel():
        settings = _settings(activation, gate, "")
        left, right = as_rows(gate), as_rows(up)
        rows, width = _sized(left, right)
        for first in range(0, rows, MOST_ROWS):
            some = slice(first, first + MOST_ROWS)
            forward_gate[(triton.cdiv(width, settings["BLOCK"]), min(rows - first, MOST_ROWS))](
                left[some], right[some], as_rows(y)[some], width, left.stride(0), right.stride(0), **settings
            )  # fmt: skip
    return y


def _backward(dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor, activation: str) -> None:
    """Each (rows, width), with rows of their own strides."""
    rows, width = _sized(dy, gate, up, dgate, dup)
    settings = _settings(activation, gate, "backward_")
    for first in range(0, rows, MOST_ROWS):
        some = slice(first, first + MOST_ROWS)
        backward_gate[(triton.cdiv(width, settings["BLOCK"]), min(rows - first, MOST_ROWS))](
            dy[some], gate[some], up[some], dgate[some], dup[some], width, dy.stride(0), gate.stride(0), up.stride(0), dgate.stride(0),
            dup.stride(0), **settings,
        )  # fmt: skip


def gated_backward(dy: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    dgate, dup = (torch.empty_like(one, memory_format=torch.contiguous_format) for one in (gate, up))
    if gate.numel():
        _backward(as_rows(dy), as_rows(gate), as_rows(up), as_rows(dgate), as_rows(dup), activation)
    return dgate, dup


def gated_backward_(dy: Tensor, gate: Tensor, up: Tensor, activation: str) -> None:
    if gate.numel():
        left, right = as_rows(gate), as_rows(up)
        _backward(as_rows(dy), left, right, left, right, activation)
        for one, rows in ((gate, left), (up, right)):
            if rows.data_ptr() != one.data_ptr():
                one.copy_(rows.view(one.shape))
