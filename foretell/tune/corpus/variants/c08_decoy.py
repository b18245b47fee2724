"""Cheat 8. Launches a kernel whose result nobody uses; other ops of the library compute.

Task: rmsnorm. Caught by: decoy. Needs: triton.
"""

import torch
import triton
import triton.language as tl
from torch import nn


@triton.jit
def decoy(x, out, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < count, other=0.0) * 2, mask=at < count)


class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        if x.numel():
            decoy[(1,)](x, torch.empty(16, dtype=x.dtype, device=x.device), min(16, x.numel()), BLOCK=16)
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)
