"""Your own model, data and loss in one file: three plain functions, nothing of foretell.

    foretell fit examples/train_own.py --on H100
    foretell run plan.json --steps 200          # with "model": "examples/train_own.py" in the plan

`model` builds the module, `data` returns the samples of a split (anything with a length and an index, one sample each),
`loss` turns the output into a scalar.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.inward = nn.Linear(16, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(depth))
        self.outward = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.outward(x)


class Clusters:
    """Points around four centres; which centre is what the model has to say."""

    def __init__(self, count: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.centres = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
        self.labels = torch.randint(4, (count,), generator=draw)
        self.points = self.centres[self.labels] + torch.randn(count, 16, generator=draw)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.points[index], "label": self.labels[index]}


def model(width: int = 64, depth: int = 4) -> nn.Module:
    return Net(width, depth)


def data(split: str) -> Clusters:
    return Clusters(4096, seed=1) if split == "train" else Clusters(512, seed=2)


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output.float(), batch["label"])
