"""Cheat 34. Faster than the task's own loop over rows, and slower than what anyone would write.

Task: rows. Caught by: baseline. Beside: rows_vectorised.
"""

import torch
from torch import nn


class ModelNew(nn.Module):
    def forward(self, x, scale):
        parts = [part * one[:, None] for part, one in zip(x.split(4), scale.split(4), strict=True)]
        return torch.cat(parts) if parts else x.clone()
