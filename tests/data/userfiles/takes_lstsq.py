"""Least squares in forward, in fp32, beside values that autocast has made bf16."""
import torch
from torch import nn


class Fitted(nn.Module):
    def __init__(self, d=12, k=5):
        super().__init__()
        self.inp, self.weight = nn.Linear(d, d), nn.Parameter(torch.randn(k, d))
        self.register_buffer("knots", torch.linspace(-1, 1, k))

    def forward(self, x):
        bases = torch.relu(x.float().mean(1, keepdim=True) - self.knots) + 0.1
        with torch.no_grad():
            self.weight.copy_(torch.linalg.lstsq(bases, self.inp(x)).solution)
        return bases @ self.weight + self.inp(x)


def build():
    return Fitted()


def batch(micro_batch):
    return {"x": torch.randn(16 * micro_batch, 12), "y": torch.randn(16 * micro_batch, 12)}


def loss(output, batch):
    return nn.functional.mse_loss(output, batch["y"])
