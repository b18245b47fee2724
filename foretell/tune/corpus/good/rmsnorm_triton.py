"""Task: rmsnorm. Triton, a row for each program, forward and backward. Needs: triton."""

import torch
import triton
import triton.language as tl
from torch import nn


@triton.jit
def forward_row(x, weight, out, scales, row, width, BLOCK: tl.constexpr):
    place = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + place * row + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + 1e-5)
    tl.store(scales + place, scale)
    learned = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place * width + at, (value * scale * learned).to(out.dtype.element_ty), mask=inside)


@triton.jit
def backward_row(grad, x, weight, scales, dx, dweight, row, width, BLOCK: tl.constexpr):
    place = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < width
    scale = tl.load(scales + place)
    unit = tl.load(x + place * row + at, mask=inside, other=0.0).to(tl.float32) * scale
    up = tl.load(grad + place * width + at, mask=inside, other=0.0).to(tl.float32)
    learned = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    wide = up * learned
    tl.store(dx + place * width + at, (scale * (wide - unit * (tl.sum(wide * unit, 0) / width))).to(dx.dtype.element_ty), mask=inside)
    tl.store(dweight + place * width + at, up * unit, mask=inside)


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        width = x.shape[-1]
        rows = x.reshape(-1, width)
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        scales = torch.empty(rows.shape[0], dtype=torch.float32, device=x.device)
        if rows.numel():
            forward_row[(rows.shape[0],)](rows, weight, out, scales, rows.stride(0), width, BLOCK=triton.next_power_of_2(width))
        ctx.save_for_backward(rows, weight, scales)
        return out

    @staticmethod
    def backward(ctx, grad):
        rows, weight, scales = ctx.saved_tensors
        width = rows.shape[-1]
        dx = torch.empty(grad.shape, dtype=rows.dtype, device=rows.device)
        parts = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
        if rows.numel():
            backward_row[(rows.shape[0],)](grad.contiguous(), rows, weight, scales, dx, parts, rows.stride(0), width,
                                           BLOCK=triton.next_power_of_2(width))  # fmt: skip
        return dx, parts.sum(0).to(weight.dtype)


class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return Function.apply(x, self.weight)
