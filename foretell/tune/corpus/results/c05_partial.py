"""Cheat 5. Most rows are computed, the rest of the output is left as it is.

Task: rmsnorm. Caught by: values.
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
        out = torch.zeros_like(x)
        rows = 3 * x.shape[0] // 4
        out[:rows] = right(x[:rows], self.weight)
        return out
