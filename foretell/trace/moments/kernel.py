"""AdamW's update of a parameter with moments in codes, on CUDA in one pass: weight, gradient, codes and scales are read once,
and weight, codes and scales written once. Nothing else is allocated.

A program takes several blocks. Every product, sum, quotient and root is rounded by itself, in the order of `update`: no
fused multiply-add, and the exact division and root, so that the bits are those of a CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from foretell.trace.moments import codes
from foretell.trace.moments.rows import BLOCKS

if TYPE_CHECKING:
    from foretell.trace.moments.update import Moments, Settings

AT_ONCE = 2048
"""Elements of one program."""
WARPS = 4


@triton.jit
def _expanded(byte, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Two codes out of each byte, side by side."""
    return tl.reshape(tl.join(byte & 15, byte >> 4), (ROWS, BLOCK))


@triton.jit
def _joined(number, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Two neighbours in a byte."""
    low, high = tl.split(tl.reshape(number & 15, (ROWS, BLOCK // 2, 2)))
    return low | (high << 4)


@triton.jit(do_not_specialize=["number", "parameters", "count", "blocks"])
def _update(
    weights, grads, first_codes, first_scales, second_codes, second_scales, corrections, skips, number, parameters, count, length,
    blocks, keep, beta1, less1, beta2, less2, eps, decay,
    DECOUPLED: tl.constexpr, SKIPS: tl.constexpr, SIGNED: tl.constexpr, UNSIGNED: tl.constexpr, TOP: tl.constexpr,
    MASK: tl.constexpr, FRACTION: tl.constexpr, LEAST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr,
    FULL: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    block = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if SKIPS:
        there = block < tl.where(tl.load(skips) > 0, 0, count)
    else:
        there = block < count
    # where a row begins and the block in it; only what is multiplied by a row's length may need 64 bits
    if FULL:
        begins, inner = block.to(tl.int64)[:, None] * BLOCK, 0
        column = tl.arange(0, BLOCK)[None, :]
        inside = there[:, None]
        begins_held = begins // 2 if PACKED else begins
    else:
        row = block // blocks
        inner = (block - row * blocks)[:, None] * BLOCK
        begins = row.to(tl.int64)[:, None] * length
        column = inner + tl.arange(0, BLOCK)[None, :]
        inside = there[:, None] & (column < length)
        begins_held = row.to(tl.int64)[:, None] * ((length + 1) // 2) if PACKED else begins
    weights, grads = weights + begins, grads + begins
    first_codes, second_codes = first_codes + begins_held, second_codes + begins_held
    if PACKED:
        at = inner // 2 + tl.arange(0, BLOCK // 2)[None, :]
        held = inside if FULL else there[:, None] & (at * 2 < length)
    else:
        at, held = column, inside
    weight = tl.load(weights + column, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grads + column, mask=inside, other=0.0).to(tl.float32)
    code = tl.load(first_codes + at, mask=held, other=0).to(tl.int32)
    code2 = tl.load(second_codes + at, mask=held, other=0).to(tl.int32)
    scale = tl.load(first_scales + block, mask=there, other=0.0)[:, None]
    scale2 = tl.load(second_scales + block, mask=there, other=0.0)[:, None]
    if PACKED:
        code = (_expanded(code, ROWS, BLOCK) ^ 8) - 8
        code2 = _expanded(code2, ROWS, BLOCK)
    root = code.to(tl.float32) * scale
    size = root * root
    first = tl.where(root < 0, -size, size)
    second = code2.to(tl.float32) * scale2
    second = second * second
    second = second * second
    if DECOUPLED:
        weight = weight * keep
    else:
        grad = grad + weight * decay
    first = first * beta1 + grad * less1
    second = second * beta2 + (grad * grad) * less2
    root2 = tl.sqrt_rn(second)
    below = root2 * tl.load(corrections + parameters + number) + eps
    weight = weight - tl.div_rn(first, below) * tl.load(corrections + number)
    tl.store(weights + column, weight.to(weights.dtype.element_ty), mask=inside)
    # codes again: what is behind a row's end is nothing, and no block's largest
    root = tl.where(inside, tl.sqrt_rn(tl.abs(first)), 0.0)
    scale = tl.maximum(tl.div_rn(tl.max(root, axis=1), SIGNED), LEAST)
    code = (root * tl.div_rn(1.0, scale)[:, None] + 0.5).to(tl.int32)
    code = tl.where(first < 0, -code, code)
    chance = (second.to(tl.int32, bitcast=True) & MASK).to(tl.float32) * FRACTION
    root2 = tl.where(inside, tl.sqrt_rn(root2), 0.0)
    scale2 = tl.maximum(tl.div_rn(tl.max(root2, axis=1), TOP), LEAST)
    code2 = tl.minimum(tl.maximum(root2 * tl.div_rn(1.0, scale2)[:, None] + chance, 1.0), UNSIGNED).to(tl.int32)
    if PACKED:
        code = _joined(tl.where(inside, code, 0), ROWS, BLOCK)
        code2 = _joined(tl.where(inside, code2, 0), ROWS, BLOCK)
    tl.store(first_codes + at, code.to(first_codes.dtype.element_ty), mask=held)
    tl.store(second_codes + at, code2.to(second_codes.dtype.element_ty), mask=held)
    tl.store(first_scales + block, scale, mask=there)
    tl.store(second_scales + block, scale2, mask=there)


def update(
    weight: Tensor, grad: Tensor, moments: Moments, corrections: Tensor, number: int, skip: Tensor | None, settings: Settings
) -> None:
    """As `update` does it on a CPU, to the bit; all tensors are contiguous. `number` is the parameter's place in `corrections`."""
    width = BLOCKS["int4" if moments.packed else "int8"]
    many = AT_ONCE // width
    count, blocks = moments.first_scales.numel(), moments.first_scales.shape[-1]
    length = weight.numel() // moments.rows
    signed, unsigned = (codes.FEW_SIGNED, codes.FEW_UNSIGNED) if moments.packed else (codes.SIGNED, codes.UNSIGNED)
    lr, beta1, beta2, eps, decay, decoupled = settings
    _update[(triton.cdiv(count, many),)](
        weight, grad, moments.first, moments.first_scales, moments.second, moments.second_scales, corrections,
        corrections if skip is None else skip, number, corrections.shape[1], count, length, blocks,
        1 - lr * decay, beta1, 1 - beta1, beta2, 1 - beta2, eps, decay,
        DECOUPLED=decoupled, SKIPS=skip is not None, SIGNED=float(signed), UNSIGNED=float(unsigned),
        TOP=unsigned + 2.0**-codes.CHANCE, MASK=2**codes.CHANCE - 1, FRACTION=2.0**-codes.CHANCE, LEAST=codes.LEAST,
        ROWS=many, BLOCK=width, PACKED=moments.packed, FULL=length == blocks * width,
        num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
