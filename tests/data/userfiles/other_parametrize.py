"""Spectral and weight norm, orthogonal layers, an own parametrization."""
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).transpose(-1, -2)


def build():
    symmetric = nn.Linear(128, 128)
    parametrize.register_parametrization(symmetric, "weight", Symmetric())
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(64, 128)), nn.ReLU(), spectral_norm(nn.Linear(128, 128)), nn.ReLU(), symmetric,
        parametrizations.spectral_norm(nn.Linear(128, 128)), nn.ReLU(), weight_norm(nn.Linear(128, 128)),
        parametrizations.orthogonal(nn.Linear(128, 64)),
    )


def batch(micro_batch):
    return torch.randn(micro_batch, 100, 64)


def loss(output, batch):
    return output.square().mean()
