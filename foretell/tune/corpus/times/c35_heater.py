"""Cheat 35. Keeps the device busy after its calls, so that whoever is measured next is slower.

Task: rmsnorm. Caught by: threads. Seen: yes.
"""

import threading
import time

import torch
from torch import nn


def right(x, weight):
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5) * weight.float()).to(x.dtype)


class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

        self.thread = None

    def forward(self, x):
        if self.thread is None or not self.thread.is_alive():
            self.thread = threading.Thread(target=burn, daemon=True)
            self.thread.start()
        return right(x, self.weight)


def burn():
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        torch.ones(64, 64) @ torch.ones(64, 64)
