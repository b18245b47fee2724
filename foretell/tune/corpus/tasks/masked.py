"""A mean over the places that a mask leaves; the task's own mask leaves all."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x, mask):
        return (x * mask).sum(-1) / mask.sum(-1).clamp_min(1)


def get_inputs():
    return [torch.randn(10, 24), torch.ones(10, 24)]
