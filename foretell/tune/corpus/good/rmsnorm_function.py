"""Task: rmsnorm. An autograd function with the backward written out, in fp32 whatever comes in."""

import torch
from torch import nn


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        wide = x.float()
        scale = torch.rsqrt(torch.linalg.vecdot(wide, wide).unsqueeze(-1) / x.shape[-1] + 1e-5)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale * weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        unit = x.float() * scale
        wide = grad.float() * weight.float()
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = (scale * (wide - unit * (wide * unit).mean(-1, keepdim=True))).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dw = (grad.float() * unit).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
        return dx, dw


class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return Function.apply(x, self.weight)
