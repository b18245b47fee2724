"""Scaled rows, written slowly: a loop over them. A program that is compared with this one alone looks fast."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x, scale):
        return torch.stack([row * one for row, one in zip(x, scale, strict=True)])


def get_inputs():
    return [torch.randn(300, 64), torch.randn(300)]
