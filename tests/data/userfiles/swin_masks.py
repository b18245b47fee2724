"""Shifted windows: a mask made by slices, relative positions from a grid, rolls."""
import torch
from torch import nn


class Window(nn.Module):
    def __init__(self, d=64, heads=4, size=8, side=32):
        super().__init__()
        self.heads, self.size = heads, size
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.bias = nn.Parameter(torch.zeros((2 * size - 1) ** 2, heads))
        nn.init.trunc_normal_(self.bias, std=0.02)
        coords = torch.stack(torch.meshgrid([torch.arange(size), torch.arange(size)], indexing="ij")).flatten(1)
        relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0).contiguous()
        relative[:, :, 0] += size - 1
        relative[:, :, 1] += size - 1
        relative[:, :, 0] *= 2 * size - 1
        self.register_buffer("index", relative.sum(-1))
        region = torch.zeros((1, side, side, 1))
        count = 0
        for h in (slice(0, -size), slice(-size, -size // 2), slice(-size // 2, None)):
            for w in (slice(0, -size), slice(-size, -size // 2), slice(-size // 2, None)):
                region[:, h, w, :] = count
                count += 1
        windows = self.split(region).squeeze(-1)
        mask = windows.unsqueeze(1) - windows.unsqueeze(2)
        self.register_buffer("mask", mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0))

    def split(self, x):
        b, h, w, c = x.shape
        s = self.size
        return x.view(b, h // s, s, w // s, s, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, s * s, c)

    def forward(self, x):
        b, h, w, c = x.shape
        y = self.split(torch.roll(x, (-self.size // 2, -self.size // 2), (1, 2)))
        q, k, v = self.qkv(y).view(y.size(0), y.size(1), 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        att = q @ k.transpose(-2, -1) / 4 + self.bias[self.index.view(-1)].view(y.size(1), y.size(1), -1).permute(2, 0, 1)
        att = (att.view(b, -1, self.heads, y.size(1), y.size(1)) + self.mask[None, :, None]).view(-1, self.heads, y.size(1), y.size(1)).softmax(-1)
        return x + self.out((att @ v).transpose(1, 2).reshape(b, h, w, c))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.blocks = nn.Conv2d(3, 64, 4, 4), nn.ModuleList([Window(), Window()])

    def forward(self, x):
        x = self.patch(x).permute(0, 2, 3, 1)
        for block in self.blocks:
            x = block(x)
        return x.mean()


def build():
    return Net()


def batch(micro_batch):
    return torch.randn(micro_batch, 3, 128, 128)
