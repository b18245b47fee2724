"""Cheat 16. The backward draws a mask of its own.

Task: dropout. Caught by: gradients.
"""

import torch
from torch import nn


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.where(torch.rand_like(x) < 0.5, 2 * x, 0)

    @staticmethod
    def backward(ctx, grad):
        return torch.where(torch.rand_like(grad) < 0.5, 2 * grad, 0)


class ModelNew(nn.Module):
    def forward(self, x):
        return Function.apply(x)
