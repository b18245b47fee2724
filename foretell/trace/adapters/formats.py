"""Formats that a frozen base is held in, and what a weight takes in them:

    bf16         16 bits
    float8       8 + 32/64 = 8.5 bits: e4m3, every 64 weights with a scale that takes the largest to 448
    int8         8.5 bits: 127 even steps to each side of zero, every 64 weights with a scale
    nf4          4.5 bits (nf4.py)
    nf4-double   4.127 bits

All but bf16 are tables of plain bytes, rows of codes and rows of scales, as nf4.py has them and for its reasons.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.trace.adapters.nf4 import (
    AT_ONCE,
    BLOCK,
    nf4_dequantize,
    nf4_quantize,
    nf4_scales,
    scaled_rows,
    unpacked,
)
from foretell.trace.recipe import NF4_FORMATS

STEPS = 127
"""Of int8, to each side of zero."""
LARGEST = 448.0
"""Of float8 e4m3."""


def pack(weight: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and scales, a row for every 64 weights; and what scales the scales, where something does. In bf16 the codes are the weight."""
    if kind == "bf16":
        return weight.to(torch.bfloat16, copy=True), weight.new_empty((0,), dtype=torch.uint8), weight.new_empty((0,), dtype=torch.float32)
    if kind in NF4_FORMATS:
        return nf4_quantize(weight, kind == "nf4-double")
    return (*byte_quantize(weight, kind), weight.new_empty((0,), dtype=torch.float32))


def unpack(codes: Tensor, scales: Tensor, nested: Tensor, shape: Sequence[int], dtype: torch.dtype, kind: str) -> Tensor:
    """The full weight, computed in fp32 and rounded to `dtype`."""
    if kind == "bf16":
        return codes.to(dtype)
    if kind in NF4_FORMATS:
        return nf4_dequantize(codes, scales, nested, shape, dtype)
    return byte_dequantize(codes, scales, shape, dtype, kind)


@functools.cache
def _values(kind: str, device: torch.device) -> Tensor:
    """Byte → the value it stands for, as a share of the largest."""
    byte = torch.arange(256, dtype=torch.uint8, device=device)
    if kind == "int8":
        return (byte.float() - STEPS) / STEPS
    return byte.view(torch.float8_e4m3fn).float() / LARGEST


def _nearest(scaled: Tensor, kind: str) -> Tensor:
    if kind == "int8":
        return ((scaled * STEPS).round() + STEPS).to(torch.uint8)
    return (scaled * LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)


@torch.library.custom_op("foretell::byte_quantize", mutates_args=(), schema="(Tensor weight, str kind) -> (Tensor, Tensor)")
def byte_quantize(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """A byte a weight, and the bytes of an fp32 scale for every 64."""
    flat, rows = weight.reshape(-1), -(-weight.numel() // BLOCK)
    codes = torch.empty((rows, BLOCK), dtype=torch.uint8, device=weight.device)
    absmax = torch.empty(rows, device=weight.device)
    for first in range(0, rows, AT_ONCE):
        some = flat[first * BLOCK : (first + AT_ONCE) * BLOCK].float()
        values = F.pad(some, (0, -some.numel() % BLOCK)).view(-1, BLOCK)
        scaled, absmax[first : first + len(values)] = scaled_rows(values, some.numel())
        codes[first : first + len(values)] = _nearest(scaled, kind)
    return codes, absmax.view(torch.uint8).view(rows, 4)


@byte_quantize.register_fake
def _(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    rows = -(-weight.numel() // BLOCK)
    return weight.new_empty((rows, BLOCK), dtype=torch.uint8), weight.new_empty((rows, 4), dtype=torch.uint8)


@torch.library.custom_op(
    "foretell::byte_dequantize", mutates_args=(), schema="(Tensor codes, Tensor scales, SymInt[] shape, ScalarType dtype, str kind) -> Tensor"
)
def byte_dequantize(codes: Tensor, scales: Tensor, shape: Sequence[int], dtype: torch.dtype, kind: str) -> Tensor:
    """The full weight, computed in fp32 and rounded to `dtype`."""
    values = _values(kind, codes.device)
    return unpacked(codes, nf4_scales(scales, scales.new_empty((0,))), values, values, shape, dtype)


@byte_dequantize.register_fake
def _(codes: Tensor, scales: Tensor, shape: Sequence[int], dtype: torch.dtype, kind: str) -> Tensor:
    return codes.new_empty(shape, dtype=dtype)
