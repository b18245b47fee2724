"""Task: rows. All rows at once."""

from torch import nn


class ModelNew(nn.Module):
    def forward(self, x, scale):
        return x * scale[:, None]
