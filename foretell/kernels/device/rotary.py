"""Rotary positions: a program turns a token's heads, queries and keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretell.kernels import measured
from foretell.kernels.kernel import wider
from foretell.kernels.rotary import ROTARY, shape_of


@triton.jit
def turn(x, out, heads, x_head, out_head, cos1, sin1, cos2, sin2, HALF: tl.constexpr, HALVES: tl.constexpr, BLOCK: tl.constexpr,
         BACK: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    at = tl.arange(0, HALVES)
    for start in range(0, heads, BLOCK):
        head = start + tl.arange(0, BLOCK)
        inside = (head < heads)[:, None] & (at < HALF)[None, :]
        place = x + head.to(tl.int64)[:, None] * x_head + at[None, :]
        x1 = tl.load(place, mask=inside, other=0.0).to(WIDE)
        x2 = tl.load(place + HALF, mask=inside, other=0.0).to(WIDE)
        if BACK:
            y1 = x1 * cos1[None, :] + x2 * sin2[None, :]
            y2 = x2 * cos2[None, :] - x1 * sin1[None, :]
        else:
            y1 = x1 * cos1[None, :] - x2 * sin1[None, :]
            y2 = x2 * cos2[None, :] + x1 * sin2[None, :]
        place = out + head.to(tl.int64)[:, None] * out_head + at[None, :]
        tl.store(place, y1.to(out.dtype.element_ty), mask=inside)
        tl.store(place + HALF, y2.to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate(q, k, q_out, k_out, cos, sin, tokens, heads, kv_heads, q_batch, q_head, q_token, k_batch, k_head, k_token,
           q_out_batch, q_out_head, q_out_token, k_out_batch, k_out_head, k_out_token, cos_batch, cos_token, sin_batch, sin_token,
           HALF: tl.constexpr, HALVES: tl.constexpr, BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, TWICE: tl.constexpr, BACK: tl.constexpr,
           WIDE: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    batch, token = program // tokens, program % tokens
    at = tl.arange(0, HALVES)
    cos_at = cos + batch * cos_batch + token * cos_token + at
    sin_at = sin + batch * sin_batch + token * sin_token + at
    cos1 = tl.load(cos_at, mask=at < HALF, other=0.0).to(WIDE)
    sin1 = tl.load(sin_at, mask=at < HALF, other=0.0).to(WIDE)
    cos2, sin2 = cos1, sin1
    if TWICE:
        cos2 = tl.load(cos_at + HALF, mask=at < HALF, other=0.0).to(WIDE)
        sin2 = tl.load(sin_at + HALF, mask=at < HALF, other=0.0).to(WIDE)
    turn(q + batch * q_batch + token * q_token, q_out + batch * q_out_batch + token * q_out_token, heads, q_head, q_out_head,
         cos1, sin1, cos2, sin2, HALF, HALVES, BLOCK, BACK, WIDE)  # fmt: skip
    turn(k + batch * k_batch + token * k_token, k_out + batch * k_out_batch + token * k_out_token, kv_heads, k_head, k_out_head,
         cos1, sin1, cos2, sin2, HALF, HALVES, KV_BLOCK, BACK, WIDE)  # fmt: skip


def _beside(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    batch, heads, tokens, width = q.shape
    if not batch * tokens * width:
        return q_out, k_out
    q_in, k_in, cos, sin = _beside(q), _beside(k), _beside(cos), _beside(sin)
    if q_out.stride(-1) != 1 or k_out.stride(-1) != 1:
        answer = _both(q_in, k_in, cos, sin, back)
        return q_out.copy_(answer[0]), k_out.copy_(answer[1])
    chosen = measured.config(ROTARY, shape_of(q, k), q.device)
    repeated = cos.shape[0] == 1
    rotate[(batch * tokens,)](
        q_in, k_in, q_out, k_out, cos, sin, tokens, heads, k.shape[1], *q_in.stride()[:3], *k_in.stride()[:3], *q_out.stride()[:3],
        *k_out.stride()[:3], 0 if repeated else cos.stride(0), cos.stride(1), 0 if repeated else sin.stride(0), sin.stride(1),
        HALF=width // 2, HALVES=triton.next_power_of_2(width // 2), BLOCK=min(chosen["block"], triton.next_power_of_2(max(1, heads))),
        KV_BLOCK=min(chosen["block"], triton.next_power_of_2(max(1, k.shape[1]))), TWICE=cos.shape[-1] == width, BACK=back,
        WIDE=tl.float64 if wider(q.dtype) == torch.float64 else tl.float32, num_warps=chosen["warps"],
        enable_fp_fusion=True,
    )  # fmt: skip
    return q_out, k_out


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _both(q, k, cos, sin, back=False)


def rotary_backward(dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _both(dq, dk, cos, sin, back=True)
