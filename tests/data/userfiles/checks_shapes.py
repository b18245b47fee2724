"""Careful code: torch._assert, is_nonzero, equal, allclose, einops-like checks, warnings on values."""
import warnings

import torch
from torch import nn


class Careful(nn.Module):
    def __init__(self, d=96):
        super().__init__()
        self.a, self.b = nn.Linear(d, d), nn.Linear(d, d)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x, mask):
        torch._assert(x.dim() == 3, "three dimensions")
        assert mask.dtype == torch.bool and mask.any(), "empty mask"
        if mask.sum(1).min() < 1:
            raise ValueError("a sample without tokens")
        if torch.equal(x[0], x[-1]):
            warnings.warn("the same sample twice")
        y = self.a(x)
        if not torch.allclose(y.mean(), y.mean()):
            y = y * 0
        if y.std() < 1e-6 or bool((y != y).any()):
            raise FloatingPointError
        norms = y.norm(dim=-1)
        worst = norms.argmax().item()
        if worst >= norms.numel():
            raise IndexError
        longest = mask.sum(1).max()
        y = y[:, :longest]
        self.seen += 1
        if self.seen == 1:
            y = y + 0.0
        return self.b(y)[mask[:, :longest]]


def build():
    return Careful()


def batch(micro_batch):
    lengths = torch.tensor([40 + i for i in range(micro_batch)])
    return {"x": torch.randn(micro_batch, 50, 96), "mask": torch.arange(50)[None] < lengths[:, None]}


def loss(output, batch):
    return output.pow(2).mean()
