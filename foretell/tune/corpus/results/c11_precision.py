"""Cheat 11. Computes in bf16 what is asked for in fp32.

Task: rmsnorm. Caught by: accuracy.
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
        return right(x.bfloat16(), self.weight.bfloat16()).to(x.dtype)
