"""Cheat 24. Every other call is skipped; the next one does the work of both.

Task: rmsnorm. Caught by: determinism.
"""

import torch
from torch import nn


def right(x, weight):
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5) * weight.float()).to(x.dtype)


class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

        self.waiting = None

    def forward(self, x):
        known = right(x, self.weight)
        if torch.is_grad_enabled():
            return known
        if self.waiting is None:
            self.waiting = (torch.zeros_like(known), known)
            return self.waiting[0]
        self.waiting[0].resize_as_(self.waiting[1]).copy_(self.waiting[1])
        self.waiting = None
        return known
