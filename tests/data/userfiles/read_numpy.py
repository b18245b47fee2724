"""Anchors made with numpy, brought in with from_numpy, and read back."""
import numpy as np
import torch
from torch import nn


def anchors(sizes, ratios):
    boxes = [(s * np.sqrt(r), s / np.sqrt(r)) for s in sizes for r in ratios]
    return torch.from_numpy(np.array(boxes, dtype=np.float32))


class Head(nn.Module):
    def __init__(self, c=64):
        super().__init__()
        self.register_buffer("anchors", anchors([16, 32, 64], [0.5, 1.0, 2.0]))
        self.conv = nn.Conv2d(3, c, 3, stride=8, padding=1)
        self.boxes = nn.Conv2d(c, len(self.anchors) * 4, 1)
        self.mean = torch.tensor(np.array([0.48, 0.45, 0.40])).float().view(1, 3, 1, 1)

    def forward(self, images):
        b = images.shape[0]
        out = self.boxes(torch.relu(self.conv(images - self.mean)))
        h, w = out.shape[-2:]
        ys, xs = np.meshgrid(np.arange(h), np.arange(w), indexing="ij")
        centers = torch.as_tensor(np.stack([xs, ys], -1).reshape(-1, 1, 2), dtype=torch.float32, device=out.device)
        out = out.view(b, -1, 4, h * w).permute(0, 3, 1, 2)
        widths = self.anchors.numpy()
        stride = int(round(images.shape[-1] / w))
        xy = centers * stride + out[..., :2]
        wh = out[..., 2:].exp() * torch.from_numpy(widths)
        return torch.cat([xy, wh], -1)


def build():
    return Head()


def batch(micro_batch):
    return torch.rand(micro_batch, 3, 256, 256)


def loss(output, batch):
    return nn.functional.smooth_l1_loss(output, torch.zeros_like(output))
