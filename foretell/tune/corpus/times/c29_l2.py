"""Cheat 29. Keeps its inputs in the L2 cache beyond its calls.

Task: rmsnorm. Caught by: settings. Needs: cuda. Seen: yes.
"""

import ctypes

import torch
from torch import nn


def right(x, weight):
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5) * weight.float()).to(x.dtype)


class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return right(x, self.weight)


ctypes.CDLL("libcudart.so." + torch.version.cuda.split(".")[0]).cudaDeviceSetLimit(6, 32 << 20)
