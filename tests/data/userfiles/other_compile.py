"""torch.compile on the whole model and as a decorator."""
import torch
from torch import nn


@torch.compile
def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / 1.41421356))


@torch.compile(mode="reduce-overhead")
def add_scaled(a, b, scale: float):
    return a + b * scale


class MLP(nn.Module):
    def __init__(self, d=256):
        super().__init__()
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        return add_scaled(x, self.down(gelu(self.up(x))), 0.5)


def build():
    net = nn.Sequential(*[MLP() for _ in range(3)])
    net[1].compile()
    return torch.compile(net, fullgraph=True)


def batch(micro_batch):
    return torch.randn(micro_batch, 64, 256)


def loss(output, batch):
    return output.square().mean()
