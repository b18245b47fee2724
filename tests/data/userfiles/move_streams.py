"""Prefetching on a side stream, events, and a checkpoint mapped to the device: habits of older repositories."""
import torch
from torch import nn


class Prefetcher:
    def __init__(self, tensors):
        self.tensors = tensors
        self.stream = torch.cuda.Stream()

    def next(self):
        with torch.cuda.stream(self.stream):
            moved = [t.cuda(non_blocking=True).float() for t in self.tensors]
        torch.cuda.current_stream().wait_stream(self.stream)
        for t in moved:
            t.record_stream(torch.cuda.current_stream())
        return moved


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        start = torch.cuda.Event(enable_timing=True)
        start.record()
        y = self.head(self.body(x).mean((2, 3)))
        if y.is_cuda:
            y = y.contiguous()
        return y


def build():
    if not torch.cuda.is_available():
        raise RuntimeError("no GPU found")
    torch.cuda.set_device(0)
    net = Net()
    net.load_state_dict(Net().state_dict())
    return net.to("cuda:0", non_blocking=True)


def batch(micro_batch):
    images, = Prefetcher([torch.randint(0, 255, (micro_batch, 3, 48, 48), dtype=torch.uint8)]).next()
    return images / 255.0


def loss(output, batch):
    return nn.functional.cross_entropy(output, torch.zeros(output.shape[0], dtype=torch.int64, device=output.device))
