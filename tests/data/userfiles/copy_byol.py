"""BYOL: an online network and a slowly moving copy of it."""
import copy

import torch
import torch.nn.functional as F
from torch import nn


def mlp(inside, hidden, out):
    return nn.Sequential(nn.Linear(inside, hidden), nn.BatchNorm1d(hidden), nn.ReLU(inplace=True), nn.Linear(hidden, out))


class BYOL(nn.Module):
    def __init__(self):
        super().__init__()
        backbone = nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )
        self.online = nn.Sequential(backbone, mlp(64, 256, 64))
        self.target = copy.deepcopy(self.online)
        for p in self.target.parameters():
            p.requires_grad = False
        self.predictor = mlp(64, 256, 64)

    @torch.no_grad()
    def update(self, tau=0.99):
        for mine, theirs in zip(self.target.parameters(), self.online.parameters()):
            mine.data = tau * mine.data + (1 - tau) * theirs.data

    def forward(self, one, two):
        p1, p2 = self.predictor(self.online(one)), self.predictor(self.online(two))
        with torch.no_grad():
            self.update()
            z1, z2 = self.target(one), self.target(two)
        return (2 - 2 * F.cosine_similarity(p1, z2)).mean() + (2 - 2 * F.cosine_similarity(p2, z1)).mean()


def model():
    return BYOL()


def batch(micro_batch):
    return torch.randn(micro_batch, 3, 64, 64), torch.randn(micro_batch, 3, 64, 64)
