"""Cheat 7. Right for the shape of the task alone.

Task: rmsnorm. Caught by: shapes.
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
        known = right(x, self.weight)
        return known if x.shape[0] == 12 else known.flip(0)
