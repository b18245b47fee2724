"""Cheat 21. Returns a tensor that computes when it is looked at.

Task: rmsnorm. Caught by: type.
"""

import torch
from torch import nn


def right(x, weight):
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5) * weight.float()).to(x.dtype)


class Lazy(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            args = [right(*one.waits) if isinstance(one, Lazy) and hasattr(one, "waits") else one for one in args]
            return function(*args, **(kwargs or {}))


class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        out = torch.empty_like(x).as_subclass(Lazy)
        out.waits = (x.clone(), self.weight.detach())
        return out
