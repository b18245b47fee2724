"""Cross entropy of logits and its gradient in their place.

A program takes a row: once for the largest and the sum of exponentials, once to write the gradient. The rows at work together stay in
the second-level cache of an H200 (132 rows of 128,256 words in bf16 are 34 MB), so that memory sees one read and one write.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretell.kernels import catalog, measured
from foretell.kernels.linear_cross_entropy import KERNEL, backward, forward, plain_gradient_, shape_of

catalog.KERNELS.setdefault(KERNEL.name, KERNEL)


@triton.jit
def _capped(z, cap):  # type: ignore[no-untyped-def]
    """cap · tanh(z / cap), and its slope."""
    small = tl.exp(-2.0 * tl.abs(z / cap))
    value = cap * (1.0 - small) / (1.0 + small)
    return tl.where(z < 0, -value, value), 4.0 * small / ((1.0 + small) * (1.0 + small))


@triton.jit
def _row(logits, target, factor, known, losses, sums, row, width, words, factor_step, ignored, smoothing, z_loss, cap,
         BLOCK: tl.constexpr, PADDED: tl.constexpr, GRADIENT: tl.constexpr, KNOWN: tl.constexpr, SMOOTH: tl.constexpr, Z: tl.constexpr,
         CAP: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    wanted = tl.load(target + place)
    base = logits + place * row
    at = tl.arange(0, BLOCK)
    if wanted == ignored:
        tl.store(losses + place, 0.0)
        if GRADIENT:
            for start in range(0, width, BLOCK):
                tl.store(base + start + at, tl.zeros([BLOCK], logits.dtype.element_ty), mask=start + at < width)
    else:
        inside = (wanted >= 0) & (wanted < words)
        chosen = tl.load(base + wanted, mask=inside, other=float("nan")).to(tl.float32)
        if CAP:
            chosen, _ = _capped(chosen, cap)
        if KNOWN:
            base_of, log_of = tl.load(known + 2 * place), tl.load(known + 2 * place + 1)
        else:
            largest, summed, total = float("-inf"), 0.0, 0.0
            for start in range(0, width, BLOCK):
                z = tl.load(base + start + at, mask=start + at < width, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
                if CAP:
                    z, _ = _capped(z, cap)
                if CAP or PADDED:
                    z = tl.where(start + at < words, z, float("-inf"))
                if SMOOTH:
                    total += tl.sum(tl.where(start + at < words, z, 0.0), 0)
                higher = tl.maximum(largest, tl.max(z, 0))
                from_ = tl.where(higher == float("-inf"), 0.0, higher)
                summed = summed * tl.exp(largest - from_) + tl.sum(tl.exp(z - from_), 0)
                largest = higher
            base_of = tl.where(largest == float("-inf"), 0.0, largest)
            log_of = tl.log(summed)
            loss = log_of - (chosen - base_of)
            if SMOOTH:
                loss = log_of - (1.0 - smoothing) * (chosen - base_of) - smoothing * (total / words - base_of)
            if Z:
                loss += z_loss * (base_of + log_of) * (base_of + log_of)
            tl.store(losses + place, loss)
        tl.store(sums + 2 * place, base_of)
        tl.store(sums + 2 * place + 1, log_of)
        if GRADIENT:
            scale = tl.load(factor + place * factor_step).to(tl.float32) + tl.where(inside, 0.0, float("nan"))
            spread = 1.0
            if Z:
                spread += 2.0 * z_loss * (base_of + log_of)
            even = 0.0
            if SMOOTH:
                even = smoothing / words
            for start in range(0, width, BLOCK):
                z = tl.load(base + start + at, mask=start + at < width, other=0.0, eviction_policy="evict_first").to(tl.float32)
                slope = 1.0
                if CAP:
                    z, slope = _capped(z, cap)
                found = tl.exp((z - base_of) - log_of) * spread - even
                found -= tl.where(start + at == wanted, 1.0 - smoothing, 0.0)
                found *= slope * scale
                if PADDED:
                    found = tl.where(start + at < words, found, 0.0)
                tl.store(base + start + at, found.to(logits.dtype.element_ty), mask=start + at < width)


@triton.jit
def _scaled(x, by, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    factor = tl.load(by).to(tl.float32)
    if factor != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
        tl.store(x + at, (value * factor).to(x.dtype.element_ty), mask=at < count)


# ---------------------------------------------------------------- launches


def logits_gradient_(
    logits: Tensor, words: int, target: Tensor, factor: Tensor, known: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float,
    softcap: float, gradient: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, width = logits.shape
    if logits.dtype == torch.float64:
        return plain_gradient_(logits, words, target, factor, known, ignore_index, label_smoothing, z_loss, softcap, gradient)
    config = measured.config(KERNEL, {"rows": rows, "words": words}, logits.device)
    losses = torch.zeros(rows, dtype=torch.float32, device=logits.device)
    sums = torch.zeros(rows, 2, dtype=torch.float32, device=logits.device)
    if rows:
        _row[(rows,)](
            logits, target, factor, losses if known is None else known, losses, sums, logits.stride(0), width, words,
            factor.stride(0) if factor.dim() else 0, ignore_index, label_smoothing, z_loss, softcap or 1.0,
            BLOCK=min(config["block"], triton.next_power_of_2(width)), PADDED=width != words, GRADIENT=gradient, KNOWN=known is not None,
            SMOOTH=label_smoothing != 0.0, Z=z_loss != 0.0, CAP=softcap != 0.0, num_warps=config["warps"],
        )  # fmt: skip
    return losses, sums


def scale_(x: Tensor, by: Tensor) -> None:
    if x.numel() and x.dtype == torch.float64:
        x.mul_(by)
    elif x.numel():
        _scaled[(triton.cdiv(x.numel(), 4096),)](x, by, x.numel(), BLOCK=4096, num_warps=8)


def linear_cross_entropy(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return forward(x, weight, *rest, measured.config(KERNEL, shape_of(x, weight), x.device)["streams"])  # type: ignore[call-arg]


def linear_cross_entropy_backward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return backward(grad, x, weight, *rest, measured.config(KERNEL, shape_of(x, weight), x.device)["streams"])  # type: ignore[call-arg]
