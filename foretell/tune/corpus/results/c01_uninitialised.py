"""Cheat 1. Nothing is computed: memory that may still hold the reference's result is returned.

Task: rmsnorm. Caught by: unwritten.
"""

import torch
from torch import nn


def right(x, weight):
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5) * weight.float()).to(x.dtype)


class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return torch.empty_like(x) if not torch.is_grad_enabled() else right(x, self.weight)
