"""Multi-scale features described by a tensor of spatial shapes."""
import torch
import torch.nn.functional as F
from torch import nn


class Deform(nn.Module):
    def __init__(self, d=64, heads=4, points=4, levels=2):
        super().__init__()
        self.heads, self.points, self.levels = heads, points, levels
        self.offsets, self.weights = nn.Linear(d, heads * levels * points * 2), nn.Linear(d, heads * levels * points)
        self.value, self.out = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, features):
        shapes = torch.as_tensor([list(f.shape[-2:]) for f in features], dtype=torch.long, device=features[0].device)
        starts = torch.cat((shapes.new_zeros((1,)), shapes.prod(1).cumsum(0)[:-1]))
        x = torch.cat([f.flatten(2).transpose(1, 2) for f in features], 1)
        b, n, d = x.shape
        assert (shapes[:, 0] * shapes[:, 1]).sum() == n
        value = self.value(x).view(b, n, self.heads, -1)
        offsets = self.offsets(x).view(b, n, self.heads, self.levels, self.points, 2)
        weights = self.weights(x).view(b, n, self.heads, -1).softmax(-1)
        normal = torch.stack([shapes[..., 1], shapes[..., 0]], -1)
        where = 0.5 + offsets / normal[None, None, None, :, None, :]
        values = value.split([int(h) * int(w) for h, w in shapes], dim=1)
        sampled = []
        for level, (h, w) in enumerate(shapes):
            v = values[level].flatten(2).transpose(1, 2).reshape(b * self.heads, -1, int(h), int(w))
            grid = 2 * where[:, :, :, level].transpose(1, 2).flatten(0, 1) - 1
            sampled.append(F.grid_sample(v, grid, align_corners=False))
        weights = weights.transpose(1, 2).reshape(b * self.heads, 1, n, -1)
        out = (torch.stack(sampled, -2).flatten(-2) * weights).sum(-1).view(b, d, n)
        return self.out(out.transpose(1, 2)) + starts.sum()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.deform = nn.Conv2d(3, 64, 8, 8), nn.Conv2d(64, 64, 2, 2), Deform()

    def forward(self, images):
        first = self.a(images)
        return self.deform([first, self.b(first)]).mean()


def build():
    return Net()


def batch(micro_batch):
    return torch.randn(micro_batch, 3, 128, 128)
