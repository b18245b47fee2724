"""RaftMLP (Tatsunami and Taki, 2021, "RaftMLP: How Much Can Be Done Without Attention and with Less Spatial Locality?").

Kept: four levels of decreasing resolution. Raft-token mixing splits the channels into `raft` groups and mixes the
tokens of all groups along one column, then along one row; a channel-mixing MLP follows. Left out: the paper's
multi-scale patch embedding, for which one overlapping strided convolution per level stands, and the bicubic resizing
of the weights to another side. The defaults are close to RaftMLP-S.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.zoo.vision.vit import Mlp


class RaftMixing(nn.Module):
    """Mixes (raft, position) pairs along the second axis of a (b, length, lines, dim) tensor, with a residual."""

    def __init__(self, dim: int, side: int, raft: int) -> None:
        super().__init__()
        self.raft = raft
        self.norm = nn.LayerNorm(dim)
        self.mlp = Mlp(raft * side, 2 * raft * side)

    def forward(self, x: Tensor) -> Tensor:
        b, length, lines, dim = x.shape
        y = self.norm(x).view(b, length, lines, self.raft, dim // self.raft)
        y = y.permute(0, 2, 4, 3, 1).reshape(b, lines, dim // self.raft, self.raft * length)
        y = self.mlp(y).view(b, lines, dim // self.raft, self.raft, length)
        return x + y.permute(0, 4, 1, 3, 2).reshape(b, length, lines, dim)


class Block(nn.Module):
    """Vertical mixing, horizontal mixing, channel mixing over a channels-last (b, h, w, dim) map."""

    def __init__(self, dim: int, side: int, raft: int) -> None:
        super().__init__()
        self.vertical = RaftMixing(dim, side, raft)
        self.horizontal = RaftMixing(dim, side, raft)
        self.norm = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, 4 * dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.vertical(x)
        x = self.horizontal(x.transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(self.norm(x))


class RaftMLP(nn.Module):
    def __init__(
        self,
        dims: tuple[int, int, int, int],
        depths: tuple[int, int, int, int],
        raft: int,
        classes: int,
        image: int,
    ) -> None:
        super().__init__()
        if image % 32:
            raise ValueError(f"image side {image} is not divisible by 32")
        for dim in dims:
            if dim % raft:
                raise ValueError(f"dim {dim} is not divisible by the raft size {raft}")
        self.image = image
        self.classes = classes
        self.embed1 = nn.Conv2d(3, dims[0], 7, stride=4, padding=3)
        self.embed2 = nn.Conv2d(dims[0], dims[1], 3, stride=2, padding=1)
        self.embed3 = nn.Conv2d(dims[1], dims[2], 3, stride=2, padding=1)
        self.embed4 = nn.Conv2d(dims[2], dims[3], 3, stride=2, padding=1)
        self.level1, self.level2, self.level3, self.level4 = (
            nn.ModuleList(Block(dim, side, raft) for _ in range(depth))
            for dim, depth, side in zip(dims, depths, (image // 4, image // 8, image // 16, image // 32), strict=True)
        )
        self.norm = nn.LayerNorm(dims[3])
        self.head = nn.Linear(dims[3], classes)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for embed, level in (
            (self.embed1, self.level1),
            (self.embed2, self.level2),
            (self.embed3, self.level3),
            (self.embed4, self.level4),
        ):
            x = embed(x).permute(0, 2, 3, 1)
            for block in level:
                x = block(x)
            x = x.permute(0, 3, 1, 2)
        return self.head(self.norm(x.mean(dim=(2, 3))))


def build(
    *,
    dim1: int = 64,
    dim2: int = 128,
    dim3: int = 256,
    dim4: int = 512,
    n1: int = 2,
    n2: int = 2,
    n3: int = 6,
    n4: int = 2,
    raft: int = 2,
    classes: int = 1000,
    image: int = 224,
) -> nn.Module:
    return RaftMLP((dim1, dim2, dim3, dim4), (n1, n2, n3, n4), raft, classes, image)


def batch(model: nn.Module, micro_batch: int, seq: int | None, image: int | None) -> dict[str, Tensor]:
    """Random images, each with a class."""
    if image is not None and image != model.image:
        raise ValueError(f"image side {image} was asked for, but the model was built with image={model.image}")
    return {
        "images": torch.randn(micro_batch, 3, model.image, model.image),
        "targets": torch.randint(model.classes, (micro_batch,)),
    }


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the class."""
    return F.cross_entropy(output, batch["targets"])
