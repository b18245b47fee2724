"""Rejection sampling, a solver that stops when it has converged, and a while with a tensor."""
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.a = nn.Linear(64, 64)
    def forward(self, x):
        while True:
            p = torch.rand(1)
            if p < 0.3:
                break
        z = x
        for _ in range(50):
            new = torch.tanh(self.a(z)) + x
            if (new - z).norm() / z.norm() < 1e-4:
                z = new
                break
            z = new
        err = (z - x).abs().max()
        while err > 1e-3:
            err = err * 0.5
        res = 1.0
        while res > 1e-2:
            z = z - 0.1 * self.a(z)
            res = z.norm().item()
        while True:
            e = z.std().item()
            if e < 0.1:
                break
            z = z * 0.9
        return z.mean()
def build(): return Net()
def batch(micro_batch): return torch.randn(micro_batch, 64)
