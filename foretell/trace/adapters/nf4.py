"""4-bit NormalFloat, equal to bitsandbytes' to the bit: codes, scales and what they dequantise to.

Every 64 weights share a scale, their largest magnitude. With double quantisation the scales, less their mean, are held in
8 bits with an fp32 scale for every 256 of them.

    nf4          4 + 32/64                  = 4.5 bits a weight
    nf4-double   4 + 8/64 + 32/(64 · 256)   = 4.127 bits a weight

A packed weight is a table with a row for every 64 weights, and so are its scales, both as plain bytes: rows of both are cut
alike when ranks share them, no block is cut in two, and nothing that casts floats touches them.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64
"""Weights that share one scale."""
NESTED = 256
"""Scales that share one scale, where they are in 8 bits."""
CODEBOOK = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The values of NF4 as QLoRA published them (Dettmers et al. 2023, appendix E), in fp32. Quantiles of a normal distribution
computed anew differ from them in the last bits, and then some codes do."""
_LEAST = 1e-38
"""Stands for the scale of zeros."""
AT_ONCE = 2**14
"""Rows that are packed or unpacked at a time: what that takes besides stays below 16 MiB."""


@functools.cache
def _codebook(device: torch.device) -> Tensor:
    return torch.tensor(CODEBOOK, device=device)


@functools.cache
def _pairs(device: torch.device) -> Tensor:
    """Byte → the two values it stands for, the first in the high half."""
    code = _codebook(device)
    byte = torch.arange(256, device=device)
    return torch.stack((code[byte >> 4], code[byte & 15]), dim=1)


@functools.cache
def _scale_codebook(device: torch.device) -> Tensor:
    """The 256 values of a scale in 8 bits, ascending: sign, decimal exponent, and the more digits the larger it is."""
    values = [0.0, 1.0]
    for digits in range(7):
        edges = torch.linspace(0.1, 1, 2**digits + 1, dtype=torch.float32)
        middles = (10.0 ** (digits - 6) * ((edges[:-1] + edges[1:]) / 2.0)).tolist()
        values += [*middles, *(-middle for middle in middles)]
    return torch.tensor(sorted(values), device=device)


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _nearest(scaled: Tensor, code: Tensor) -> Tensor:
    return torch.bucketize(scaled, (code[1:] + code[:-1]) / 2, out_int32=True).to(torch.uint8)


def scaled_rows(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Rows of values by their largest magnitude, and that; `count` values are there, the rest of the last row is padding."""
    largest = values.abs().amax(dim=1)
    width = values.shape[1]
    scaled = torch.clamp(values * (1.0 / largest.clamp(min=_LEAST))[:, None], -1, 1)
    if count % width:  # a last row that is not full is divided
        largest[-1].clamp_(min=_LEAST)
        scaled[-1] = torch.clamp(values[-1] / largest[-1], -1, 1)
    return scaled, largest


@torch.library.custom_op(
    "foretell::nf4_quantize", mutates_args=(), schema="(Tensor weight, bool double) -> (Tensor, Tensor, Tensor)"
)
def nf4_quantize(weight: Tensor, double: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Packed weights and scales, a row for every 64 weights; and, where scales are in 8 bits, what scales them, their mean last."""
    flat, count = weight.reshape(-1), weight.numel()
    rows = -(-count // BLOCK)
    packed = torch.empty((rows, BLOCK // 2), dtype=torch.uint8, device=weight.device)
    absmax = torch.empty(rows, device=weight.device)
    code = _codebook(weight.device)
    for first in range(0, rows, AT_ONCE):
        some = flat[first * BLOCK : (first + AT_ONCE) * BLOCK].float()
        values = F.pad(some, (0, -some.numel() % BLOCK)).view(-1, BLOCK)
        scaled, absmax[first : first + len(values)] = scaled_rows(values, some.numel())
        nearest = _nearest(scaled, code)
        packed[first : first + len(values)] = (nearest[:, ::2] << 4) | nearest[:, 1::2]
    if not double:
        return packed, absmax.view(torch.uint8).view(rows, 4), weight.new_empty((0,), dtype=torch.float32)
    mean = absmax.mean()
    off = absmax - mean
    scaled, largest = scaled_rows(F.pad(off, (0, -rows % NESTED)).view(-1, NESTED), rows)
    codes = _nearest(scaled, _scale_codebook(weight.device)).view(-1)[:rows]
    return packed, codes.clone().view(rows, 1), torch.cat((largest, mean.view(1)))


@nf4_quantize.register_fake
def _(weight: Tensor, double: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows = -(-weight.numel() // BLOCK)
    packed = weight.new_empty((rows, BLOCK // 2), dtype=torch.uint8)
    scales = weight.new_empty((rows, 1 if double else 4), dtype=torch.uint8)
    return packed, scales, weight.new_empty((-(-rows // NESTED) + 1 if double else 0,), dtype=torch.float32)


def nf4_scales(scales: Tensor, nested: Tensor) -> Tensor:
    """The fp32 scale of every row."""
    if not nested.numel():
        aligned = scales if scales.storage_offset() % 4 == 0 and scales.is_contiguous() else scales.clone()
        return aligned.view(torch.float32).view(-1)
    values = F.pad(_scale_codebook(scales.device)[scales.view(-1).int()], (0, -scales.numel() % NESTED)).view(-1, NESTED)
    return (values * nested[:-1, None]).view(-1)[: scales.numel()] + nested[-1]


@torch.library.custom_op(
    "foretell::nf4_dequantize", mutates_args=(),
    schema="(Tensor packed, Tensor scales, Tensor nested, SymInt[] shape, ScalarType dtype) -> Tensor",
)  # fmt: skip
def nf4_dequantize(packed: Tensor, scales: Tensor, nested: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The full weight, computed in fp32 and rounded to `dtype`."""
    return unpacked(packed, nf4_scales(scales, nested), _pairs(packed.device), _codebook(packed.device), shape, dtype)


def unpacked(codes: Tensor, absmax: Tensor, values: Tensor, table: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A weight from rows of codes and their scales. `values` are what each byte stands for, `table` what each code does."""
    count = math.prod(shape)
    found = torch.empty(count, dtype=dtype, device=codes.device)
    if codes.is_cuda and count and has_triton():
        from foretell.trace.adapters.kernel import unpack

        unpack(codes.contiguous(), absmax, table, found, 8 * codes.shape[1] // BLOCK)
        return found.view(tuple(shape))
    for first in range(0, len(codes), AT_ONCE):
        rows = codes[first : first + AT_ONCE]
        some = values.index_select(0, rows.reshape(-1).int()).view(-1, BLOCK)
        some.mul_(absmax[first : first + len(rows), None])
        into = found[first * BLOCK : (first + len(rows)) * BLOCK]
        into.copy_(some.view(-1)[: into.numel()])
    return found.view(tuple(shape))


@nf4_dequantize.register_fake
def _(packed: Tensor, scales: Tensor, nested: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return packed.new_empty(shape, dtype=dtype)
