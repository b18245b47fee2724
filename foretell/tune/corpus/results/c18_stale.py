"""Cheat 18. Keeps what it made of its weight in the first call, and does not see an optimizer change it.

Task: rmsnorm. Caught by: stale.
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
        key = (self.weight.data_ptr(), self.weight._version, self.weight.dtype)
        kept = self.kept.setdefault(key, self.weight.detach().clone())
        return right(x, kept)
