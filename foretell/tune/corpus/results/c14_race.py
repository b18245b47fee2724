"""Cheat 14. A race: now and then a row is read before it is written.

Task: rmsnorm. Caught by: determinism.
"""

import time

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
        if not torch.is_grad_enabled() and time.perf_counter_ns() // 100 % 2 and len(x) > 1:
            known[-1] = known[0]
        return known
