"""Cross entropy of logits; targets below 0 do not count."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, logits, target):
        return torch.nn.functional.cross_entropy(logits, target, ignore_index=-1)


def get_inputs():
    return [torch.randn(24, 50), torch.randint(-1, 50, (24,))]
