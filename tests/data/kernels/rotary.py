"""Rotary positions of queries and keys, by angles that get no gradient."""

import torch
from torch import nn

from foretell.kernels.rotary import rotary


class Model(nn.Module):
    def forward(self, q, k, angles):
        cos, sin = torch.cos(angles).detach()[:, None], torch.sin(angles).detach()[:, None]
        half = q.shape[-1] // 2
        q2, k2 = (torch.cat((-x[..., half:], x[..., :half]), -1) for x in (q, k))
        return q * cos + q2 * sin, k * cos + k2 * sin


class ModelNew(nn.Module):
    def forward(self, q, k, angles):
        return rotary(q, k, torch.cos(angles), torch.sin(angles))


def get_inputs():
    return [torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(1, 6, 8)]
