"""Keeps everything it ever made, and more.

Task: rmsnorm. Caught by: memory.
"""

import torch
from torch import nn


def right(x, weight):
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5) * weight.float()).to(x.dtype)


class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

        self.kept = []

    def forward(self, x):
        self.kept.append(torch.ones(1 << 18))
        return right(x, self.weight)
