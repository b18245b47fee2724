"""Rotary positions of queries and keys, in one launch.

    q, k         (batch, heads, tokens, width), of any strides but between elements
    cos, sin     (batch or 1, tokens, width), or of half the width where both halves turn alike
    first half   x1 · cos1 - x2 · sin1
    second half  x2 · cos2 + x1 · sin2

Nothing is kept but cos and sin, which every layer shares; the backward turns the other way. Angles get no gradient.

Bytes at the least, of T tokens of N heads of D elements in two bytes: 4TND + 4TND.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foretell.kernels.kernel import Shape, ShapeBucket, TrainingKernel, define, differentiate, wider
from foretell.kernels.rows import DTYPES, ROWS, must


def _turned(x: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> Tensor:
    x1, x2 = x.chunk(2, -1)
    half, twice = x.shape[-1] // 2, cos.shape[-1] == x.shape[-1]
    cos1, sin1 = cos[..., :half].unsqueeze(1), sin[..., :half].unsqueeze(1)
    cos2, sin2 = (cos[..., half:].unsqueeze(1), sin[..., half:].unsqueeze(1)) if twice else (cos1, sin1)
    if back:
        return torch.cat((x1 * cos1 + x2 * sin2, x2 * cos2 - x1 * sin1), -1)
    return torch.cat((x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2), -1)


def reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _turned(q, cos, sin), _turned(k, cos, sin)


def _plain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _both(q, k, cos, sin, back=False)


def _plain_backward(dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _both(dq, dk, cos, sin, back=True)


def _both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> tuple[Tensor, Tensor]:
    wide = wider(q.dtype)
    q_out, k_out = (torch.empty_like(x).copy_(_turned(x.to(wide), cos.to(wide), sin.to(wide), back)) for x in (q, k))
    return q_out, k_out


_rotary = define(
    "rotary", "(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)", plain=_plain, triton="rotary.rotary",
    fake=lambda q, k, cos, sin: (torch.empty_like(q), torch.empty_like(k)),
)  # fmt: skip
_rotary_backward = define(
    "rotary_backward", "(Tensor dq, Tensor dk, Tensor cos, Tensor sin) -> (Tensor, Tensor)", plain=_plain_backward,
    triton="rotary.rotary_backward", fake=lambda dq, dk, cos, sin: (torch.empty_like(dq), torch.empty_like(dk)),
)  # fmt: skip


def _context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, cos, sin = inputs
    ctx.mark_non_differentiable(*(one for one, trained in zip(output, ctx.needs_input_grad, strict=False) if not trained))
    ctx.save_for_backward(cos, sin)


def _gradient(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    dq, dk = _rotary_backward(dq, dk, *ctx.saved_tensors)
    return dq if needs[0] else None, dk if needs[1] else None, None, None


differentiate("rotary", _context, _gradient)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    batch, _, tokens, width = q.shape
    must((k.shape[0], k.shape[2], k.shape[3], width % 2) == (batch, tokens, width, 0), "queries and keys of the same tokens and of even width")
    must(cos.shape == sin.shape and cos.shape[0] in (1, batch) and cos.shape[1] == tokens and cos.shape[2] in (width, width // 2),
         "a cosine and a sine for each token and element, or for half of them")  # fmt: skip
    q, k = _rotary(q, k, cos.detach(), sin.detach())
    return q, k


# ---------------------------------------------------------------- where it serves


def shape_of(q: Tensor, k: Tensor, *_: Any) -> Shape:
    return {"tokens": q.shape[0] * q.shape[2], "heads": q.shape[1], "kv_heads": k.shape[1], "width": q.shape[3]}


def draw(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """As attention has them: heads beside each other in memory, of sequences of 2,048."""
    tokens, width = shape["tokens"], shape["width"]
    batch = max(1, tokens // 2048)
    q, k = (torch.randn(batch, tokens // batch, shape[name], width, dtype=dtype, device=device).transpose(1, 2) for name in ("heads", "kv_heads"))
    angle = torch.rand(1, tokens // batch, width, device=device) * 6
    return q, k, angle.cos().to(dtype), angle.sin().to(dtype)


_CONFIG = {"warps": 4, "block": 32}
"""Warps of a program, which has one token, and heads at a time."""
_WIDTHS = {"heads": (1, 256), "kv_heads": (1, 256), "width": (2, 256)}
ROTARY = TrainingKernel(
    name="rotary", says="rotary positions of queries and keys, forward and backward", reference=reference, call=rotary, shape_of=shape_of,
    buckets=tuple(ShapeBucket(name=f"{name} tokens", limits={"tokens": tokens, **_WIDTHS}, config=_CONFIG) for name, tokens in ROWS.items()),
    dtypes=DTYPES, draw=draw, no_gradient=(2, 3),
    measured_at=tuple({"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "width": width}
                      for tokens, heads, kv_heads, width in ((16384, 32, 8, 128), (8192, 32, 8, 128), (16384, 32, 8, 64), (2048, 32, 8, 128))),
    floor_bytes=lambda shape, size: 4 * shape["tokens"] * (shape["heads"] + shape["kv_heads"]) * shape["width"] * size,
    saved_bytes=lambda shape, size: 0,
)  # fmt: skip
