"""A residual convolutional network in channels-last, with momentum, batches made on the device."""
import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--blocks", type=int, default=8)
parser.add_argument("--image", type=int, default=64)
parser.add_argument("--steps", type=int, default=100000)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--checkpoint", action="store_true")
given = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.n, self.m = nn.GroupNorm(8, width), nn.GroupNorm(8, width)

    def forward(self, x):
        return x + self.b(F.silu(self.m(self.a(F.silu(self.n(x))))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, given.width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(given.width) for _ in range(given.blocks))
        self.head = nn.Linear(given.width, 100)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if given.checkpoint else block(x)
        return self.head(x.mean((2, 3)))


model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for number in range(given.steps):
    x = torch.randn(given.batch, 3, given.image, given.image, device=device)
    y = torch.randint(0, 100, (given.batch,), device=device)
    with torch.autocast(device, torch.bfloat16, enabled=given.bf16):
        loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if number % 50 == 0:
        print("step", number, loss.item(), flush=True)
