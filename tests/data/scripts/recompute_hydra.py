"""A config as a dataclass, overridden from the command line; blocks are computed again in backward; evaluation first."""

import sys
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass
class Optim:
    lr: float = 1e-3
    warmup: int = 10


@dataclass
class Config:
    width: int = 256
    depth: int = 4
    batch: int = 16
    length: int = 128
    optim: Optim = field(default_factory=Optim)

    def override(self, words):
        for word in words:
            key, value = word.split("=")
            target, *path = [self, *key.split(".")]
            for part in path[:-1]:
                target = getattr(target, part)
            setattr(target, path[-1], type(getattr(target, path[-1]))(value))
        return self


class Mixer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(c.width), nn.LayerNorm(c.width)
        self.tokens = nn.Sequential(nn.Linear(c.length, 4 * c.length), nn.GELU(), nn.Linear(4 * c.length, c.length))
        self.channels = nn.Sequential(nn.Linear(c.width, 4 * c.width), nn.GELU(), nn.Linear(4 * c.width, c.width))

    def forward(self, x):
        x = x + self.tokens(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.n2(x))


class Net(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Linear(32, c.width)
        self.blocks = nn.ModuleList(Mixer(c) for _ in range(c.depth))
        self.head = nn.Linear(c.width, 32)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return self.head(x)


@torch.no_grad()
def evaluate(model, data):
    model.eval()
    found = sum(F.mse_loss(model(x), x).item() for x in data) / len(data)
    model.train()
    return found


def main():
    c = Config().override(sys.argv[1:])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Net(c).to(device, dtype=torch.bfloat16)
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=c.optim.lr)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / c.optim.warmup))
    data = [torch.randn(c.batch, c.length, 32, device=device, dtype=torch.bfloat16) for _ in range(4)]
    print("before", evaluate(model, data[:1]))
    for step, x in enumerate(data):
        loss = F.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if torch.isfinite(norm):
            optimizer.step()
        warmup.step()
        print(step, loss.item(), norm.item())


if __name__ == "__main__":
    main()
