"""Task: masked. Both sums as products of rows, in fp32."""

from torch import nn


class ModelNew(nn.Module):
    def forward(self, x, mask):
        rows, wide = x.float(), mask.float()
        total = (rows.unsqueeze(-2) @ wide.unsqueeze(-1)).flatten(-2).squeeze(-1)
        count = wide @ wide.new_ones(wide.shape[-1])
        return (total / count.clamp_min(1)).to(x.dtype)
