"""Drop-path rates from linspace, tolist() of shapes, and an f-string that shows a value."""
import torch
from torch import nn


class DropPath(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        if not self.training or self.p == 0.0:
            return x
        keep = torch.empty(x.shape[0], 1, 1).bernoulli_(1 - self.p)
        return x * keep / (1 - self.p)


class Mixer(nn.Module):
    def __init__(self, depth=6, tokens=49, d=128):
        super().__init__()
        rates = [r.item() for r in torch.linspace(0, 0.2, depth)]
        sizes = torch.tensor([d, 2 * d]).tolist()
        self.embed = nn.Conv2d(3, d, 8, 8)
        self.tokens = nn.ModuleList([nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens)) for _ in range(depth)])
        self.channels = nn.ModuleList([nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.GELU(), nn.Linear(sizes[1], sizes[0])) for _ in range(depth)])
        self.drops = nn.ModuleList([DropPath(r) for r in rates])
        self.temperature = nn.Parameter(torch.tensor(0.07).log())
        print(f"rates from {rates[0]:.2f} to {rates[-1]:.2f}, temperature {self.temperature.exp().item():.3f}")

    def forward(self, images):
        x = self.embed(images).flatten(2).transpose(1, 2)
        for tokens, channels, drop in zip(self.tokens, self.channels, self.drops):
            x = x + drop(tokens(x.transpose(1, 2)).transpose(1, 2))
            x = x + drop(channels(x))
        return x.mean(1) / self.temperature.exp()


def build():
    return Mixer()


def batch(micro_batch):
    return torch.randn(micro_batch, 3, 56, 56)


def loss(output, batch):
    return nn.functional.cross_entropy(output, torch.arange(output.size(0)))
