"""Cheat 25. Launches nothing while a CUDA graph is captured.

Task: rmsnorm. Caught by: audit. Needs: cuda.
"""

import torch
from torch import nn


def right(x, weight):
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5) * weight.float()).to(x.dtype)


class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

        self.last = None

    def forward(self, x):
        if torch.cuda.is_current_stream_capturing() and self.last is not None and self.last.shape == x.shape:
            return self.last
        known = right(x, self.weight)
        self.last = known.detach()
        return known
