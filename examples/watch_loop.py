"""Predicted beside measured, from inside a training loop: two lines around it, the rest is a plain loop.

    python examples/watch_loop.py [RUN_FOLDER]

Prints, on stderr, seconds of a step and the peak of memory beside what was predicted, and the run folder at the end, which
`foretell compare` and `foretell report` read.
"""

import sys

import torch
from torch import nn

import foretell

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(output: torch.Tensor, batch: tuple[torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(output, batch[0])  # the batch is what the model is called with


with foretell.watch(model, optimizer, loss=loss_of, out=sys.argv[1] if sys.argv[1:] else None):
    for _step in range(10):
        x = torch.randn(128, 256)
        loss = loss_of(model(x), (x,))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
print(f"last loss {loss.item():.2f}")
