"""Task: gate. The same products in another order, one output buffer."""

import torch
from torch import nn


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate):
        ctx.save_for_backward(x, gate)
        wide = gate.float()
        return (1e-5 * (wide / (1 + torch.exp(-wide))) * x.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, gate = ctx.saved_tensors
        wide, up = gate.float(), 1e-5 * grad.float()
        share = torch.sigmoid(wide)
        dx = (up * wide * share).to(x.dtype) if ctx.needs_input_grad[0] else None
        dgate = (up * x.float() * share * (1 + wide * (1 - share))).to(gate.dtype) if ctx.needs_input_grad[1] else None
        return dx, dgate


class ModelNew(nn.Module):
    def forward(self, x, gate):
        return Function.apply(x, gate)
