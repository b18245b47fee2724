"""Cheat 23. What the first call of a shape gave is given again: a warm-up replayed.

Task: rmsnorm. Caught by: cache.
"""

import torch
from torch import nn


def right(x, weight):
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5) * weight.float()).to(x.dtype)


class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

        self.kept = {}

    def forward(self, x):
        if torch.is_grad_enabled():
            return right(x, self.weight)
        return self.kept.setdefault((x.shape, x.dtype), right(x, self.weight)).clone()
