"""Diffusion Transformer (Peebles and Xie, 2022, "Scalable Diffusion Models with Transformers").

Kept: latent patches pass through Transformer blocks whose LayerNorms are shifted, scaled and gated by the embedded
timestep and class label (adaLN-Zero: every gate starts at zero, so every block starts as the identity). The output
holds the predicted noise and sigma. The loss trains the noise half only. Left out: the autoencoder, labels dropped
for guidance, weight averaging. The defaults are DiT-XL/2 on 32x32 latents.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.zoo.vision.vit import Attention, Mlp


class TimestepEmbedding(nn.Module):
    """Sinusoidal features of the timestep, then a two-layer MLP."""

    def __init__(self, dim: int, features: int = 256) -> None:
        super().__init__()
        self.features = features
        self.up = nn.Linear(features, dim)
        self.act = nn.SiLU()
        self.down = nn.Linear(dim, dim)

    def forward(self, t: Tensor) -> Tensor:
        half = self.features // 2
        frequencies = torch.exp(torch.arange(half, dtype=torch.float32, device=t.device) * (-math.log(1e4) / half))
        angles = t.float().unsqueeze(1) * frequencies
        x = torch.cat([angles.cos(), angles.sin()], dim=1).to(self.up.weight.dtype)
        return self.down(self.act(self.up(x)))


class ModulatedNorm(nn.LayerNorm):
    """LayerNorm without parameters of its own, shifted and scaled per sample."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, eps=1e-6, elementwise_affine=False)

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return super().forward(x) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class Block(nn.Module):
    """Transformer block under adaLN-Zero conditioning."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = ModulatedNorm(dim)
        self.attn = Attention(dim, heads)
        self.norm2 = ModulatedNorm(dim)
        self.mlp = Mlp(dim, 4 * dim, approximate="tanh")
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        nn.init.zeros_(self.modulation[1].weight)
        nn.init.zeros_(self.modulation[1].bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=1)
        x = x + gate1.unsqueeze(1) * self.attn(self.norm1(x, shift1, scale1))
        return x + gate2.unsqueeze(1) * self.mlp(self.norm2(x, shift2, scale2))


class FinalLayer(nn.Module):
    def __init__(self, dim: int, out_features: int) -> None:
        super().__init__()
        self.norm = ModulatedNorm(dim)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))
        self.linear = nn.Linear(dim, out_features)
        for layer in (self.modulation[1], self.linear):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.modulation(condition).chunk(2, dim=1)
        return self.linear(self.norm(x, shift, scale))


class DiffusionTransformer(nn.Module):
    timesteps = 1000

    def __init__(
        self, depth: int, dim: int, heads: int, patch: int, in_channels: int, classes: int, image: int
    ) -> None:
        super().__init__()
        if image % patch:
            raise ValueError(f"image side {image} is not divisible by the patch side {patch}")
        if dim % 4:
            raise ValueError(f"dim {dim} is not divisible by 4, as two-dimensional sinusoidal positions need")
        self.image = image
        self.patch = patch
        self.grid = image // patch
        self.in_channels = in_channels
        self.classes = classes
        self.patchify = nn.Conv2d(in_channels, dim, patch, stride=patch)
        self.register_buffer("positions", self.sinusoidal_positions(self.grid, dim))
        self.time_embedding = TimestepEmbedding(dim)
        self.label_embedding = nn.Embedding(classes + 1, dim)  # the last row is the label of unconditional samples
        nn.init.normal_(self.label_embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.final = FinalLayer(dim, patch * patch * 2 * in_channels)

    @staticmethod
    def sinusoidal_positions(grid: int, dim: int) -> Tensor:
        """Fixed positions of shape (1, grid * grid, dim): one half encodes the row, the other the column."""
        frequencies = torch.exp(torch.arange(dim // 4, dtype=torch.float32) * (-math.log(1e4) / (dim // 4)))
        angles = torch.arange(grid, dtype=torch.float32).unsqueeze(1) * frequencies
        line = torch.cat([angles.sin(), angles.cos()], dim=1)
        rows = line.unsqueeze(1).expand(grid, grid, -1)
        columns = line.unsqueeze(0).expand(grid, grid, -1)
        return torch.cat([rows, columns], dim=2).reshape(1, grid * grid, dim)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        b = x.shape[0]
        x = self.patchify(x).flatten(2).transpose(1, 2) + self.positions
        condition = self.time_embedding(t) + self.label_embedding(y)
        for block in self.blocks:
            x = block(x, condition)
        x = self.final(x, condition)
        x = x.view(b, self.grid, self.grid, self.patch, self.patch, 2 * self.in_channels)
        return x.permute(0, 5, 1, 3, 2, 4).reshape(b, 2 * self.in_channels, self.image, self.image)


def build(
    *,
    depth: int = 28,
    dim: int = 1152,
    heads: int = 16,
    patch: int = 2,
    in_channels: int = 4,
    classes: int = 1000,
    image: int = 32,
) -> nn.Module:
    return DiffusionTransformer(depth, dim, heads, patch, in_channels, classes, image)


def batch(model: nn.Module, micro_batch: int, seq: int | None, image: int | None) -> dict[str, Tensor]:
    """Latents with noise mixed in at a time of each, and a class."""
    if image is not None and image != model.image:
        raise ValueError(f"image side {image} was asked for, but the model was built with image={model.image}")
    latents, noise = torch.randn(2, micro_batch, model.in_channels, model.image, model.image)
    t = torch.randint(model.timesteps, (micro_batch,))
    angle = (t / model.timesteps * (math.pi / 2)).view(-1, 1, 1, 1)
    return {
        "x": angle.cos() * latents + angle.sin() * noise,
        "t": t,
        "y": torch.randint(model.classes, (micro_batch,)),
        "noise": noise,
    }


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean square error of the noise; the half that says sigma is not trained."""
    noise, _sigma = output.chunk(2, dim=1)
    return F.mse_loss(noise, batch["noise"])
