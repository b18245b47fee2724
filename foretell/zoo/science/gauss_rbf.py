"""Gaussian radial basis function networks (D'Agostino, Ilievski, Shoemaker 2023, "Learning Active Subspaces and Discovering
Important Features with Gaussian Radial Basis Functions Neural Networks").

Kept: f(x) = sum of w exp(-(x - c)' P (x - c) / 2) + b with one precision matrix P = L L' for all centres, learned together
with centres and weights, L a full lower triangle; mean square error (or cross entropy, `task` "classes") with penalties on w and
on L.  Directions that do not matter lose their precision, so the spectrum of P says what the function depends on:
`spectrum` gives its eigenvalues and eigenvectors, largest first, and `importance` the weight of every feature in them.

A sample of a batch is a table of `rows` rows, since a single row is too little to be a step.  Distances are expanded,
|u|^2 + |v|^2 - 2 u v', one product of matrices instead of a tensor of all differences.  Left out: the paper's choice of
centres among the data (they start anywhere) and its search for the weights of the penalties.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TASKS = ("regression", "classes")
WEIGHTS, PRECISION = 1e-4, 1e-3
"""Of the penalties."""


class Gaussians(nn.Module):
    """(..., features) → (..., centres): how near each centre is, seen through the precision matrix."""

    below: Tensor

    def __init__(self, features: int, centres: int) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.empty(centres, features))
        self.lower = nn.Parameter(torch.empty(features, features))
        self.register_buffer("below", torch.ones(features, features).tril(), persistent=False)
        nn.init.normal_(self.centres)
        nn.init.eye_(self.lower)
        with torch.no_grad():
            self.lower.mul_(features**-0.5)

    def triangle(self) -> Tensor:
        return self.lower * self.below

    def forward(self, x: Tensor) -> Tensor:
        triangle = self.triangle()
        u, v = x @ triangle, self.centres @ triangle
        apart = u.square().sum(dim=-1, keepdim=True) + v.square().sum(dim=-1) - 2 * (u @ v.T)
        return torch.exp(-0.5 * apart.clamp(min=0))


class RBF(nn.Module):
    def __init__(self, features: int, centres: int, outputs: int, rows: int, task: str) -> None:
        super().__init__()
        self.features, self.outputs, self.rows, self.task = features, outputs, rows, task
        self.gaussians = Gaussians(features, centres)
        self.mix = nn.Linear(centres, outputs)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, rows, features) → (batch, rows, outputs), and the penalties."""
        penalty = WEIGHTS * self.mix.weight.square().sum() + PRECISION * self.gaussians.triangle().square().sum()
        return self.mix(self.gaussians(x)), penalty

    @torch.no_grad()
    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues of the precision matrix, largest first, and its eigenvectors as columns."""
        triangle = self.gaussians.triangle()
        values, vectors = torch.linalg.eigh(triangle @ triangle.T)
        return values.flip(0), vectors.flip(1)

    def importance(self) -> Tensor:
        """Share of every feature in the spectrum."""
        values, vectors = self.spectrum()
        weight = vectors.abs() @ values
        return weight / weight.sum()


def build(
    *, features: int = 64, centres: int = 1024, outputs: int = 1, rows: int = 4096, task: str = "regression"
) -> RBF:
    if task not in TASKS:
        raise ValueError(f"task is one of {', '.join(TASKS)}, not {task}")
    return RBF(features, centres, outputs, rows, task)


def batch(model: RBF, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """Tables of `seq` random rows, with a value or a class for each row."""
    shape = (micro_batch, seq or model.rows)
    targets = torch.randint(model.outputs, shape) if model.task == "classes" else torch.randn(*shape, model.outputs)
    return {"x": torch.randn(*shape, model.features), "targets": targets}


def loss(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Mean square error, or cross entropy for classes, and the penalties."""
    found, penalty = output
    targets = batch["targets"]
    if targets.is_floating_point():
        return F.mse_loss(found.float(), targets) + penalty
    return F.cross_entropy(found.float().flatten(0, 1), targets.flatten()) + penalty
