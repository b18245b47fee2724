"""Control flow that compilers like: torch.cond and while_loop."""
import torch
from torch import nn
from torch._higher_order_ops import while_loop


class Gate(nn.Module):
    def __init__(self, d=128):
        super().__init__()
        self.one, self.two = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        x = torch.cond(x.sum() > 0, lambda y: self.one(y).relu(), lambda y: self.two(y).sigmoid(), (x,))
        with torch.no_grad():
            _, norm = while_loop(lambda i, n: i < 3, lambda i, n: (i + 1, n * 0.5), (torch.tensor(0), x.detach().abs().mean()))
        return x * norm


def build():
    return Gate()


def batch(micro_batch):
    return torch.randn(micro_batch, 64, 128)


def loss(output, batch):
    return output.mean()
