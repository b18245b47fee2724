"""Adaptive computation: the number of rounds is read from the data, and a temperature is clamped by Python."""
import torch
from torch import nn


class Ponder(nn.Module):
    def __init__(self, d=128, rounds=5):
        super().__init__()
        self.cell, self.halt, self.rounds = nn.GRUCell(d, d), nn.Linear(d, 1), rounds
        self.register_buffer("calls", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        h = torch.zeros_like(x)
        done = torch.zeros(x.size(0), dtype=torch.bool)
        for _ in range(self.rounds):
            h = self.cell(x, h)
            p = torch.sigmoid(self.halt(h)).squeeze(-1)
            done = done | (p > 0.99)
            if done.all():
                break
        if self.calls.item() % 2 == 1:
            h = h * 1.0
        scale = max(float(h.abs().max()), 1e-6)
        return h / scale


def build():
    return Ponder()


def batch(micro_batch):
    return torch.randn(micro_batch, 128)


def loss(output, batch):
    return output.abs().mean()
