"""Sliding-window attention with flex_attention."""
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

flex = torch.compile(flex_attention)


def window(b, h, q, k):
    return (q >= k) & (q - k <= 128)


class Attention(nn.Module):
    def __init__(self, d=256, heads=4):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(d, 3 * d), nn.Linear(d, d), heads

    def forward(self, x):
        b, t, d = x.shape
        mask = create_block_mask(window, B=None, H=None, Q_LEN=t, KV_LEN=t, device=x.device)
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = flex(q, k, v, block_mask=mask)
        y = y + flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + (i - j) * 0.1)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


def build():
    return Attention()


def batch(micro_batch, seq):
    return torch.randn(micro_batch, seq or 512, 256)


def loss(output, batch):
    return output.square().mean()
