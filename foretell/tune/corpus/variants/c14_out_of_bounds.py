"""Cheat 14. Writes beyond the end of its input.

Task: rmsnorm. Caught by: guards.
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
        if not torch.is_grad_enabled() and x.untyped_storage().nbytes() > x.nbytes and x.is_contiguous():
            beyond = x.as_strided((4,), (1,), x.storage_offset() + x.numel())
            beyond.zero_()
        return right(x, self.weight)
