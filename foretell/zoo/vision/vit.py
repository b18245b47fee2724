"""Vision Transformer (Dosovitskiy et al., 2020, "An Image is Worth 16x16 Words").

Kept: a strided convolution cuts the image into patches, a class token and learned positions are added, pre-norm
Transformer blocks follow, and the class token is read out. The defaults are ViT-B/16; ViT-L/16 is
`build(dim=1024, depth=24, heads=16)`. Left out: the hidden layer that the head has in pretraining.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head self-attention with one fused projection for queries, keys and values."""

    def __init__(self, dim: int, heads: int, dropout: float = 0.0, qkv_bias: bool = True) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim {dim} is not divisible by {heads} heads")
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, dim = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        return self.proj(x.transpose(1, 2).reshape(b, n, dim))


class Mlp(nn.Module):
    """Two linear layers around a GELU."""

    def __init__(self, dim: int, hidden: int, dropout: float = 0.0, approximate: str = "none") -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.act = nn.GELU(approximate=approximate)
        self.down = nn.Linear(hidden, dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(self.drop(self.act(self.up(x)))))


class Block(nn.Module):
    """Pre-norm Transformer encoder block."""

    def __init__(self, dim: int, heads: int, dropout: float = 0.0, qkv_bias: bool = True) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads, dropout, qkv_bias)
        self.drop = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, 4 * dim, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self, patch: int, dim: int, depth: int, heads: int, classes: int, image: int, dropout: float) -> None:
        super().__init__()
        if image % patch:
            raise ValueError(f"image side {image} is not divisible by the patch side {patch}")
        self.image = image
        self.classes = classes
        self.patchify = nn.Conv2d(3, dim, patch, stride=patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(torch.empty(1, (image // patch) ** 2 + 1, dim))
        nn.init.normal_(self.positions, std=0.02)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patchify(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = self.drop(x + self.positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def build(
    *,
    patch: int = 16,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    classes: int = 1000,
    image: int = 224,
    dropout: float = 0.0,
) -> nn.Module:
    return VisionTransformer(patch, dim, depth, heads, classes, image, dropout)


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
