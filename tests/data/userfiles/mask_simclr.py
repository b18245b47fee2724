"""SimCLR's loss with an off-diagonal mask, labels by eye and boolean rows."""
import torch
import torch.nn.functional as F
from torch import nn


def info_nce(z, n):
    labels = torch.cat([torch.arange(n) for _ in range(2)], dim=0)
    labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
    z = F.normalize(z, dim=1)
    sim = z @ z.T
    mask = torch.eye(labels.shape[0], dtype=torch.bool)
    labels = labels[~mask].view(labels.shape[0], -1)
    sim = sim[~mask].view(sim.shape[0], -1)
    positives = sim[labels.bool()].view(labels.shape[0], -1)
    negatives = sim[~labels.bool()].view(sim.shape[0], -1)
    logits = torch.cat([positives, negatives], dim=1) / 0.07
    return F.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long))


class SimCLR(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 32, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 128))

    def forward(self, one, two):
        return info_nce(self.net(torch.cat([one, two])), one.size(0))


def build():
    return SimCLR()


def batch(micro_batch):
    return torch.randn(micro_batch, 3, 32, 32), torch.randn(micro_batch, 3, 32, 32)
