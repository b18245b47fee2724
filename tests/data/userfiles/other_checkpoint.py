"""The author's own activation checkpointing, an own autograd function, and weights shared by hand."""
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        return 2 * x * grad


class Net(nn.Module):
    def __init__(self, d=128):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d)) for _ in range(4)])
        self.tail = nn.Sequential(*[nn.Linear(d, d) for _ in range(4)])
        self.tail[1].weight = self.tail[0].weight

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=True)
        x = Square.apply(x)
        return checkpoint_sequential(self.tail, 2, x, use_reentrant=False)


def build():
    return Net()


def batch(micro_batch):
    return torch.randn(micro_batch, 64, 128, requires_grad=True)


def loss(output, batch):
    return output.mean()
