"""What the models of the corpus have in common."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Built = tuple[nn.Module, dict[str, Any]]


class WithLoss(nn.Module):
    """A network and what its output is compared with: classes, numbers, yes or no."""

    def __init__(self, net: nn.Module, kind: str = "classes") -> None:
        super().__init__()
        self.net, self.kind = net, kind

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = self.net(x).float()
        if self.kind == "classes":
            return F.cross_entropy(found.flatten(0, -2), y.flatten())
        return (
            F.mse_loss(found, y.float())
            if self.kind == "numbers"
            else F.binary_cross_entropy_with_logits(found.flatten(), y.float().flatten())
        )


class Lambda(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Residual(nn.Module):
    """A network beside the identity."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Tokens(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, vocab: int, dim: int, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Embedding(vocab, dim), nn.ModuleList(blocks), nn.Linear(dim, vocab)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mlp(*widths: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    parts: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        parts += [nn.Linear(a, b), act()]
    return nn.Sequential(*parts[:-1])


def feed(dim: int, factor: int = 4) -> Residual:
    return Residual(nn.LayerNorm(dim), nn.Linear(dim, factor * dim), nn.GELU(), nn.Linear(factor * dim, dim))


def tokens(vocab: int, micro_batch: int, seq: int) -> dict[str, Tensor]:
    return {"x": torch.randint(vocab, (micro_batch, seq)), "y": torch.randint(vocab, (micro_batch, seq))}


def labelled(x: Tensor, classes: int) -> dict[str, Tensor]:
    return {"x": x, "y": torch.randint(classes, x.shape[:1])}


def conv(inner: int, outer: int, size: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inner, outer, size, stride, size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outer),
        nn.ReLU(inplace=True),
    )


def pictures(micro_batch: int, image: int, channels: int = 3) -> Tensor:
    return torch.rand(micro_batch, channels, image, image)
