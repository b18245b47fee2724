"""Task: dropout. The mask is kept as flags, and drawn by torch's own generator."""

import torch
from torch import nn


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        kept = torch.rand(x.shape, device=x.device) < 0.5
        ctx.save_for_backward(kept)
        return torch.where(kept, 2 * x, 0)

    @staticmethod
    def backward(ctx, grad):
        (kept,) = ctx.saved_tensors
        return torch.where(kept, 2 * grad, 0)


class ModelNew(nn.Module):
    def forward(self, x):
        return Function.apply(x)
