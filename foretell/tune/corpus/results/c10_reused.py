"""Cheat 10. Every call returns the same buffer.

Task: rmsnorm. Caught by: reuse.
"""

import torch
from torch import nn


def right(x, weight):
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5) * weight.float()).to(x.dtype)


class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

        self.buffers = {}

    def forward(self, x):
        known = right(x, self.weight)
        if torch.is_grad_enabled():
            return known
        buffer = self.buffers.setdefault((x.shape, x.dtype), torch.empty_like(known))
        return buffer.copy_(known)
