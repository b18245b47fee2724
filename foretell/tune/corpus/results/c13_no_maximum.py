"""Cheat 13. Softmax without its maximum: quick, and infinite for large inputs.

Task: softmax. Caught by: magnitudes.
"""

import torch
from torch import nn


class ModelNew(nn.Module):
    def forward(self, x):
        share = torch.exp(x.float())
        return (share / share.sum(-1, keepdim=True)).to(x.dtype)
