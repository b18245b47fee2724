"""Cheat 4. A constant, on a task whose output hardly varies.

Task: constant. Caught by: task.
"""

import torch
from torch import nn


class ModelNew(nn.Module):
    def forward(self, x):
        return torch.ones(x.shape[:-1], dtype=x.dtype, device=x.device)
