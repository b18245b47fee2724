"""Cheat 15. The gradient of the weight is right only when the input's is asked for too.

Task: rmsnorm. Caught by: subsets.
"""

import torch
from torch import nn


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
        ctx.save_for_backward(x, weight, scale)
        return (x.float() * scale * weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        unit, wide = x.float() * scale, grad.float() * weight.float()
        dweight = (grad.float() * unit).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, torch.zeros_like(dweight)
        return (scale * (wide - unit * (wide * unit).mean(-1, keepdim=True))).to(x.dtype), dweight


class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return Function.apply(x, self.weight)
