"""A gate whose outputs are small: about 1e-5."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x, gate):
        return 1e-5 * torch.nn.functional.silu(gate) * x


def get_inputs():
    return [torch.randn(8, 36), torch.randn(8, 36)]
