"""A Fourier neural operator with complex weights."""
import torch
from torch import nn


class Spectral(nn.Module):
    def __init__(self, c, modes):
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(c, c, modes, modes, dtype=torch.cfloat) / c)

    def forward(self, x):
        f = torch.fft.rfft2(x)
        out = torch.zeros_like(f)
        m = self.modes
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", f[:, :, :m, :m], self.weight)
        return torch.fft.irfft2(out, s=x.shape[-2:])


class FNO(nn.Module):
    def __init__(self, c=16, modes=8):
        super().__init__()
        self.lift, self.lower = nn.Conv2d(1, c, 1), nn.Conv2d(c, 1, 1)
        self.layers = nn.ModuleList([Spectral(c, modes) for _ in range(3)])

    def forward(self, x):
        x = self.lift(x)
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return self.lower(x)


def build():
    return FNO()


def batch(micro_batch):
    return torch.randn(micro_batch, 1, 64, 64)


def loss(output, batch):
    return (output - batch).square().mean()
