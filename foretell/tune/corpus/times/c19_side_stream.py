"""Cheat 19. Computes on a stream that nobody waits for.

Task: rmsnorm. Caught by: deferred. Needs: cuda.
"""

import torch
from torch import nn


def right(x, weight):
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5) * weight.float()).to(x.dtype)


class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

        self.stream = torch.cuda.Stream()

    def forward(self, x):
        if torch.is_grad_enabled():
            return right(x, self.weight)
        out = torch.empty_like(x)
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(20_000_000)
            out.copy_(right(x, self.weight))
        return out
