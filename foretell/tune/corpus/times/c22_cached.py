"""Cheat 22. Keeps results by address, version and shape of what came in.

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
        key = (x.data_ptr(), x._version, x.shape, x.stride(), x.dtype, self.weight._version)
        if key not in self.kept:
            self.kept[key] = (x, right(x, self.weight))
        return self.kept[key][1].clone()
