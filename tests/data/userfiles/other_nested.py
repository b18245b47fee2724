"""Ragged batches as nested tensors."""
import torch
import torch.nn.functional as F
from torch import nn


class Ragged(nn.Module):
    def __init__(self, d=128, heads=4):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(d, 3 * d), nn.Linear(d, d), heads

    def forward(self, x, lengths):
        x = torch.nested.nested_tensor_from_jagged(x, offsets=F.pad(lengths.cumsum(0), (1, 0)))
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = [y.unflatten(-1, [self.heads, -1]).transpose(1, 2) for y in (q, k, v)]
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        return self.out(y).values()


def build():
    return Ragged()


def batch(micro_batch):
    lengths = torch.tensor([20 + 5 * i for i in range(micro_batch)])
    return {"x": torch.randn(int(lengths.sum()), 128), "lengths": lengths}


def loss(output, batch):
    return output.square().mean()
