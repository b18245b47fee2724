"""Transformer in Transformer (Han et al., 2021, "Transformer in Transformer").

Kept: every patch is both one outer token and a "sentence" of 4x4 inner pixel tokens. Each block runs an inner Transformer
over the pixel tokens of each patch, adds their projection to the patch token, and runs an outer Transformer over the
class token and the patches. Left out: drop path. The defaults are TNT-S.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.zoo.vision.vit import Block

INNER_SIDE = 4
INNER_TOKENS = INNER_SIDE**2


class PixelEmbedding(nn.Module):
    """A 7x7 convolution whose output grid is cut into 4x4 windows: (b, 3, h, w) to (b * patches, 16, inner_dim)."""

    def __init__(self, inner_dim: int, patch: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, inner_dim, 7, stride=patch // INNER_SIDE, padding=3)
        self.positions = nn.Parameter(torch.empty(1, INNER_TOKENS, inner_dim))
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv(images)
        b, dim, side, _ = x.shape
        grid = side // INNER_SIDE
        x = x.view(b, dim, grid, INNER_SIDE, grid, INNER_SIDE).permute(0, 2, 4, 3, 5, 1)
        return x.reshape(b * grid * grid, INNER_TOKENS, dim) + self.positions


class InnerOuterBlock(nn.Module):
    def __init__(self, inner_dim: int, inner_heads: int, outer_dim: int, outer_heads: int) -> None:
        super().__init__()
        self.inner = Block(inner_dim, inner_heads, qkv_bias=False)
        self.norm = nn.LayerNorm(inner_dim)
        self.proj = nn.Linear(INNER_TOKENS * inner_dim, outer_dim)
        self.outer = Block(outer_dim, outer_heads, qkv_bias=False)

    def forward(self, pixels: Tensor, patches: Tensor) -> tuple[Tensor, Tensor]:
        b, tokens, _ = patches.shape
        pixels = self.inner(pixels)
        update = self.proj(self.norm(pixels).reshape(b, tokens - 1, -1))
        patches = torch.cat([patches[:, :1], patches[:, 1:] + update], dim=1)
        return pixels, self.outer(patches)


class TransformerInTransformer(nn.Module):
    def __init__(
        self,
        depth: int,
        inner_dim: int,
        inner_heads: int,
        outer_dim: int,
        outer_heads: int,
        patch: int,
        classes: int,
        image: int,
    ) -> None:
        super().__init__()
        if patch % INNER_SIDE:
            raise ValueError(f"patch side {patch} is not divisible by {INNER_SIDE}")
        if image % patch:
            raise ValueError(f"image side {image} is not divisible by the patch side {patch}")
        self.image = image
        self.classes = classes
        self.patches = (image // patch) ** 2
        self.pixel_embedding = PixelEmbedding(inner_dim, patch)
        self.patch_embedding = nn.Sequential(
            nn.LayerNorm(INNER_TOKENS * inner_dim),
            nn.Linear(INNER_TOKENS * inner_dim, outer_dim),
            nn.LayerNorm(outer_dim),
        )
        self.cls_token = nn.Parameter(torch.zeros(1, 1, outer_dim))
        self.positions = nn.Parameter(torch.empty(1, self.patches + 1, outer_dim))
        nn.init.normal_(self.positions, std=0.02)
        self.blocks = nn.ModuleList(
            InnerOuterBlock(inner_dim, inner_heads, outer_dim, outer_heads) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(outer_dim)
        self.head = nn.Linear(outer_dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        b = images.shape[0]
        pixels = self.pixel_embedding(images)
        patches = self.patch_embedding(pixels.reshape(b, self.patches, -1))
        patches = torch.cat([self.cls_token.expand(b, -1, -1), patches], dim=1) + self.positions
        for block in self.blocks:
            pixels, patches = block(pixels, patches)
        return self.head(self.norm(patches)[:, 0])


def build(
    *,
    depth: int = 12,
    inner_dim: int = 24,
    inner_heads: int = 4,
    outer_dim: int = 384,
    outer_heads: int = 6,
    patch: int = 16,
    classes: int = 1000,
    image: int = 224,
) -> nn.Module:
    return TransformerInTransformer(depth, inner_dim, inner_heads, outer_dim, outer_heads, patch, classes, image)


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
