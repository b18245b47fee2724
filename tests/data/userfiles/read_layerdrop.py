"""LayerDrop: whole layers are skipped by a draw."""
import torch
from torch import nn


class Wave(nn.Module):
    def __init__(self, d=128, depth=6, p=0.1):
        super().__init__()
        self.p = p
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(d, 4, 256, batch_first=True, dropout=0.0) for _ in range(depth)])
        self.out = nn.Linear(d, 32)

    def forward(self, x):
        for layer in self.layers:
            if self.training and torch.rand(1).item() < self.p:
                continue
            x = layer(x)
        if torch.rand(()) > 0.99:
            x = x.detach()
        return self.out(x)


def build():
    return Wave()


def batch(micro_batch):
    return torch.randn(micro_batch, 100, 128)


def loss(output, batch):
    return output.logsumexp(-1).mean()
