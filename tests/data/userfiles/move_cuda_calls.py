"""Moves with .cuda(), autocast and the calls around a training loop."""
import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(4)])
        self.scale = nn.Parameter(torch.ones(width).cuda())
        self.register_buffer("offset", torch.zeros(width, device="cuda"))

    def forward(self, x):
        x = x.cuda(non_blocking=True)
        with torch.cuda.amp.autocast():
            for layer in self.layers:
                x = torch.relu(layer(x))
        torch.cuda.synchronize()
        return x * self.scale + self.offset


def build():
    torch.cuda.manual_seed_all(0)
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = True
    assert torch.cuda.is_available(), "this needs a GPU"
    scaler = torch.cuda.amp.GradScaler()
    print(torch.cuda.get_device_properties(0).total_memory, torch.cuda.memory_allocated(), torch.cuda.device_count(), scaler.is_enabled())
    torch.cuda.empty_cache()
    return Encoder().cuda()


def batch(micro_batch):
    return torch.randn(micro_batch, 256).pin_memory()


def loss(output, batch):
    return output.pow(2).mean()
