"""A mixture of SwiGLU experts: rows sorted by expert, products of groups, and rows put together again.

    x ─► rows by expert ─► h = rows · inᵀ ─► a = silu(gate) · up ─► y = a · outᵀ ─► Σ share · y

Kept for backward are h and who went where: neither the sorted rows nor y (as SonicMoE does, arXiv 2512.14080). Backward sorts x once
more, makes a again from h while it differentiates it, and takes the gradient of a share as ⟨da, a⟩, which needs no y.

Bytes kept, of T tokens with K experts each, H wide, I inside, two bytes an element: 4TKI for h, 4TK + 4E for who went where; x (2TH) is
kept too where nobody else keeps it. Products of groups are `torch._grouped_mm` in bfloat16 on a GPU, and a loop over experts elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.kernels.kernel import Shape, ShapeBucket, TrainingKernel, define, differentiate, wider

LINE = 16
"""Bytes: rows of `torch._grouped_mm` begin at multiples."""


# ---------------------------------------------------------------- in plain torch


def reference(x: Tensor, index: Tensor, share: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """Expert by expert. x (tokens, width); index and share (tokens, choices); w_in (experts, 2 · inner, width), gate before up;
    w_out (experts, width, inner)."""
    out = torch.zeros_like(x)
    for expert in range(len(w_in)):
        token, choice = torch.where(index == expert)
        gate, up = F.linear(x[token], w_in[expert]).chunk(2, -1)
        made = F.linear(F.silu(gate) * up, w_out[expert]) * share[token, choice, None]
        out = out.index_add(0, token, made.to(out.dtype))
    return out


def _plain_activate(h: Tensor) -> Tensor:
    gate, up = h.to(wider(h.dtype)).chunk(2, -1)
    return (F.silu(gate) * up).to(h.dtype)


def _plain_activate_backward(h: Tensor, da: Tensor, share: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of rows without their share: gradients of h, the activation times the share, gradients of shares."""
    gate, up = h.to(wider(h.dtype)).chunk(2, -1)
    wide, part = da.to(gate.dtype), share.to(gate.dtype).unsqueeze(-1)
    open_ = torch.sigmoid(gate)
    a = gate * open_ * up
    up_to = wide * part
    dh = torch.cat([up_to * up * open_ * (1 + gate * (1 - open_)), up_to * gate * open_], -1)
    return dh.to(h.dtype), (a * part).to(h.dtype), (wide * a).sum(-1)


def _plain_combine(rows: Tensor, place: Tensor, share: Tensor | None) -> Tensor:
    found = rows.index_select(0, place.flatten()).view(*place.shape, rows.shape[1]).to(wider(rows.dtype))
    return (found if share is None else found * share.to(found.dtype).unsqueeze(-1)).sum(1).to(rows.dtype)


_activate = define(
    "moe_activate", "(Tensor h) -> Tensor", plain=_plain_activate, triton="moe.activate", fake=lambda h: h.new_empty(len(h), h.shape[1] // 2)
)
_activate_backward = define(
    "moe_activate_backward", "(Tensor h, Tensor da, Tensor share) -> (Tensor, Tensor, Tensor)", plain=_plain_activate_backward,
    triton="moe.activate_backward",
    fake=lambda h, da, share: (h.new_empty(h.shape), da.new_empty(da.shape), h.new_empty(len(h), dtype=wider(h.dtype))),
)  # fmt: skip
_combine = define(
    "moe_combine", "(Tensor rows, Tensor place, Tensor? share) -> Tensor", plain=_plain_combine, triton="moe.combine",
    fake=lambda rows, place, share: rows.new_empty(len(place), rows.shape[1]),
)  # fmt: skip


# ---------------------------------------------------------------- products of groups


def _grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows up to each end times the weight of their expert, (experts, in, out)."""
    if _by_torch(rows, weights):
        return torch._grouped_mm(rows, weights, offs=ends)
    found = rows.new_empty(len(rows), weights.shape[2])
    for expert, some in _groups(ends):
        torch.mm(rows[some], weights[expert], out=found[some])
    return found


def _grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """leftᵀ · right over the rows of each expert."""
    if _by_torch(left, right):
        return torch._grouped_mm(left.t(), right, offs=ends)
    found = left.new_empty(len(ends), left.shape[1], right.shape[1])
    for expert, some in _groups(ends):
        torch.mm(left[some].t(), right[some], out=found[expert])
    return found


def _by_torch(*given: Tensor) -> bool:
    return all(one.is_cuda and one.dtype == torch.bfloat16 and not any(size * 2 % LINE for size in one.shape[-1:]) for one in given)


def _groups(ends: Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for expert, end in enumerate(ends.tolist()):
        yield expert, slice(start, end)
        start = end


# ---------------------------------------------------------------- ops


def forward(x: Tensor, index: Tensor, share: Tensor, w_in: Tensor, w_out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the mixture gives, h, the order of the rows and where each expert's end."""
    ranked, order = index.flatten().sort(stable=True)
    ends = torch.searchsorted(ranked, torch.arange(len(w_in), device=x.device), right=True, out_int32=True)
    with torch.autocast(x.device.type, enabled=False):
        h = _grouped(x.index_select(0, order // index.shape[1]), w_in.transpose(1, 2), ends)
        y = _grouped(_activate(h), w_out.transpose(1, 2), ends)
        return _combine(y, _places(order, index.shape), share), h, order.to(torch.int32), ends


def backward(
    grad: Tensor, x: Tensor, share: Tensor, w_in: Tensor, w_out: Tensor, h: Tensor, order: Tensor, ends: Tensor, of_x: bool, of_share: bool,
    of_in: bool, of_out: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, shares and weights; what is not wanted is empty."""
    place, token = _places(order, share.shape), order // share.shape[1]
    none = [x.new_empty(0) for _ in range(4)]
    with torch.autocast(x.device.type, enabled=False):
        up = grad.index_select(0, token)
        dh, a, dshare = _activate_backward(h, _grouped(up, w_out, ends), share.flatten().index_select(0, order))
        dw_out = _grouped_outer(up, a, ends) if of_out else none[3]
        del up, a
        dw_in = _grouped_outer(dh, x.index_select(0, token), ends) if of_in else none[2]
        dx = _combine(_grouped(dh, w_in, ends), place, None) if of_x else none[0]
        return dx, dshare.index_select(0, place.flatten()).view(share.shape).to(share.dtype) if of_share else none[1], dw_in, dw_out


def _places(order: Tensor, shape: torch.Size) -> Tensor:
    """Where the row of each choice of each token is."""
    found = torch.empty_like(order)
    found[order.long()] = torch.arange(len(order), dtype=order.dtype, device=order.device)
    return found.view(shape)


def _fake_forward(x: Tensor, index: Tensor, share: Tensor, w_in: Tensor, w_out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, ints = index.numel(), torch.int32
    return x.new_empty(x.shape), x.new_empty(rows, w_in.shape[1]), x.new_empty(rows, dtype=ints), x.new_empty(len(w_in), dtype=ints)


def _fake_backward(grad: Tensor, x: Tensor, share: Tensor, w_in: Tensor, w_out: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty_like(one, memory_format=torch.contiguous_format) if wanted else x.new_empty(0)
        for one, wanted in zip((x, share, w_in, w_out), rest[-4:], strict=True)
    )


_op = define(
    "moe", "(Tensor x, Tensor index, Tensor share, Tensor w_in, Tensor w_out) -> (Tensor, Tensor, Tensor, Tensor)", plain=forward,
    triton="moe.moe", fake=_fake_forward,
)  # fmt: skip
_op_backward = define(
    "moe_backward",
    "(Tensor grad, Tensor x, Tensor share, Tensor w_in, Tensor w_out, Tensor h, Tensor order, Tensor ends, bool of_x, bool of_share, bool of_in, "
    "bool of_out) -> (Tensor, Tensor, Tensor, Tensor)",
    plain=backward, triton="moe.moe_backward", fake=_fake_backward,
)  # fmt: skip


def _context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    x, _, share, w_in, w_out = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(x, share, w_in, w_out, *output[1:])


def _gradient(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 5
    wanted = [ctx.needs_input_grad[place] for place in (0, 2, 3, 4)]
    found = _op_backward(grad.contiguous(), *ctx.saved_tensors, *wanted)
    dx, dshare, dw_in, dw_out = (one if want else None for one, want in zip(found, wanted, strict=True))
    return dx, None, dshare, dw_in, dw_out


differentiate("moe", _context, _gradient)


def moe(x: Tensor, index: Tensor, share: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """The mixture; every index names one of the experts. Under autocast products are in its format."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, w_in, w_out = x.to(dtype), w_in.to(dtype), w_out.to(dtype)
    found: Tensor = _op(x, index, share, w_in, w_out)[0]
    return found


# ---------------------------------------------------------------- where it serves


def shape_of(x: Tensor, index: Tensor, share: Tensor, w_in: Tensor, *_: Any) -> Shape:
    return {"tokens": len(x), "choices": index.shape[1], "width": x.shape[1], "inner": w_in.shape[1] // 2, "experts": len(w_in)}


def draw(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    tokens, choices, width, inner, experts = (shape[name] for name in ("tokens", "choices", "width", "inner", "experts"))
    score = torch.rand(tokens, experts, device=device)
    share, index = score.softmax(-1).topk(choices, -1)
    w_in = torch.randn(experts, 2 * inner, width, dtype=dtype, device=device) * width**-0.5
    w_out = torch.randn(experts, width, inner, dtype=dtype, device=device) * inner**-0.5
    return torch.randn(tokens, width, dtype=dtype, device=device), index, share.to(dtype), w_in, w_out


def saved_bytes(shape: Shape, size: int) -> int:
    """Beside x and shares, which are inputs."""
    rows = shape["tokens"] * shape["choices"]
    return rows * (2 * shape["inner"] * size + 4) + 4 * shape["experts"]


def floor_bytes(shape: Shape, size: int) -> int:
    """x, its gradient, results and theirs, weights and their gradients, and h written and read once."""
    weights = 3 * shape["experts"] * shape["inner"] * shape["width"]
    return size * (4 * shape["tokens"] * shape["width"] + 3 * weights + 4 * shape["tokens"] * shape["choices"] * shape["inner"])


DECLARED = (
    {"tokens": 16384, "choices": 8, "width": 2048, "inner": 1024, "experts": 64},
    {"tokens": 16384, "choices": 8, "width": 2048, "inner": 768, "experts": 128},
    {"tokens": 16384, "choices": 2, "width": 4096, "inner": 14336, "experts": 8},
)  # fmt: skip
BUCKETS = (ShapeBucket(name="all", limits={}, config={"warps": 4, "block": 1024, "row_warps": 8, "row_block": 2048}),)
KERNEL = TrainingKernel(
    name="moe", says="a mixture of SwiGLU experts: permutation, products of groups, activation, and no row kept twice", reference=reference, call=moe,
    shape_of=shape_of, buckets=BUCKETS, dtypes=(torch.bfloat16, torch.float16, torch.float32), measured_at=DECLARED, draw=draw,
    floor_bytes=floor_bytes, saved_bytes=saved_bytes,
)  # fmt: skip
