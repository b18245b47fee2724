"""GELU of a gate times up."""

import torch
from torch import nn

from foretell.kernels.gated import gated


class Model(nn.Module):
    def forward(self, gate, up):
        return nn.functional.gelu(gate) * up


class ModelNew(nn.Module):
    def forward(self, gate, up):
        return gated(gate, up, "gelu")


def get_inputs():
    return [torch.randn(12, 40), torch.randn(12, 40)]
