"""Cheat 12. Zeros, where outputs are smaller than what an absolute tolerance lets pass.

Task: gate. Caught by: values.
"""

import torch
from torch import nn


class ModelNew(nn.Module):
    def forward(self, x, gate):
        return 0 * x * gate


assert torch.allclose(torch.full((3,), 1e-5), torch.zeros(3), atol=1e-4)
