"""Cheat 16. Drops two fifths where half is asked for.

Task: dropout. Caught by: randomness.
"""

import torch
from torch import nn


class ModelNew(nn.Module):
    def forward(self, x):
        return torch.nn.functional.dropout(x, 0.4, True)
