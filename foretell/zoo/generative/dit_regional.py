"""3DIS-FLUX (Zhou, Xie, Yang, Yang 2025, "3DIS-FLUX: simple and efficient multi-instance generation with DiT rendering").

Kept: a diffusion transformer in the shape of FLUX.1-Depth: latents of a depth map are joined to the noisy latents, blocks with
two streams (text, image) and joint attention come first, blocks with one stream and parallel feed-forward after them,
all modulated by time and a pooled text vector, with rotary positions. Boxes of a layout become attention masks: in
early, noisy steps the tokens of a region (an instance or the background) see their own text and their own part of the
image; later the whole image sees itself. Which of the two holds follows from the time of each sample inside the graph,
so that one graph serves all steps. Phase `sample` is the Euler sampler, for inference only.

The paper trains nothing and only renders; here the velocity loss of flow matching is trained. Left out: text encoders and
the autoencoder (their outputs are the batch), the layout-to-depth stage, the adapter of its text embeddings. `image` is
the side of the latents; boxes are (left, top, right, bottom) from 0 to 1.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Without cuDNN's, whose backward fails on an H200 with such a mask (cuDNN of torch 2.11.0, CUDA 13.0; what fails next is a product in cuBLAS)."""
PHASES = ("train",)
SAMPLERS = ("sample",)


def rotary(positions: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (tokens, size / 2) of rows and columns, half of the angles each."""
    quarter = size // 4
    rates = torch.exp(torch.arange(quarter, device=positions.device) * (-math.log(1e4) / quarter))
    angles = (positions[:, :, None] * rates).flatten(1)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    cos, sin = (part.to(x.dtype) for part in turn)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


def attend(qkv: Tensor, heads: int, norms: nn.ModuleList, turn: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
    """Masked attention over fused (batch, tokens, 3 * dim), with normalised and rotated queries and keys."""
    b, n, width = qkv.shape
    q, k, v = qkv.view(b, n, 3, heads, width // (3 * heads)).permute(2, 0, 3, 1, 4).unbind(0)
    q, k = rotated(norms[0](q), turn), rotated(norms[1](k), turn)
    with sdpa_kernel(KERNELS):
        y = F.scaled_dot_product_attention(q, k, v.contiguous(), attn_mask=mask)
    return y.transpose(1, 2).reshape(b, n, width // 3)


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


class Stream(nn.Module):
    """The weights of one of the two streams in a double block."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(dim, 6 * dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim))

    def after(self, x: Tensor, y: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
        gate1, shift2, scale2, gate2 = parts
        x = x + gate1 * self.proj(y)
        return x + gate2 * self.mlp(modulated(x, shift2, scale2))


class DoubleBlock(nn.Module):
    """Text and image with weights of their own, and one attention over both."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.text, self.image = Stream(dim), Stream(dim)
        self.norms = nn.ModuleList(nn.RMSNorm(dim // heads, eps=1e-6) for _ in range(2))

    def forward(
        self, text: Tensor, image: Tensor, condition: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        of_text = self.text.modulation(condition)[:, None].chunk(6, dim=-1)
        of_image = self.image.modulation(condition)[:, None].chunk(6, dim=-1)
        qkv = [self.text.qkv(modulated(text, *of_text[:2])), self.image.qkv(modulated(image, *of_image[:2]))]
        y = attend(torch.cat(qkv, dim=1), self.heads, self.norms, turn, mask)
        y_text, y_image = y.split((text.shape[1], image.shape[1]), dim=1)
        return self.text.after(text, y_text, of_text[2:]), self.image.after(image, y_image, of_image[2:])


class SingleBlock(nn.Module):
    """Text and image as one sequence; attention and feed-forward side by side."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.dim = heads, dim
        self.modulation = nn.Linear(dim, 3 * dim)
        self.into = nn.Linear(dim, 7 * dim)
        self.out = nn.Linear(5 * dim, dim)
        self.norms = nn.ModuleList(nn.RMSNorm(dim // heads, eps=1e-6) for _ in range(2))

    def forward(self, x: Tensor, condition: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(condition)[:, None].chunk(3, dim=-1)
        qkv, wide = self.into(modulated(x, shift, scale)).split((3 * self.dim, 4 * self.dim), dim=-1)
        y = attend(qkv, self.heads, self.norms, turn, mask)
        return x + gate * self.out(torch.cat([y, F.gelu(wide, approximate="tanh")], dim=-1))


class RegionalDiT(nn.Module):
    def __init__(
        self, double: int, single: int, dim: int, heads: int, text_dim: int, pooled_dim: int, channels: int, instances: int,
        tokens: int, image: int, patch: int, free_below: float, phase: str, steps: int,
    ) -> None:  # fmt: skip
        super().__init__()
        if phase not in (*PHASES, *SAMPLERS):
            raise ValueError(f"no phase {phase}: there are {', '.join((*PHASES, *SAMPLERS))}")
        if image % patch:
            raise ValueError(f"image side {image} is not divisible by the patch side {patch}")
        self.instances, self.tokens, self.text_dim, self.pooled_dim = instances, tokens, text_dim, pooled_dim
        self.channels, self.image, self.patch, self.heads, self.dim = channels, image, patch, heads, dim
        self.free_below, self.phase, self.steps = free_below, phase, steps
        self.patchify = nn.Conv2d(2 * channels, dim, patch, stride=patch)
        self.read = nn.Linear(text_dim, dim)
        self.time = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.pooled = nn.Linear(pooled_dim, dim)
        self.doubles = nn.ModuleList(DoubleBlock(dim, heads) for _ in range(double))
        self.singles = nn.ModuleList(SingleBlock(dim, heads) for _ in range(single))
        self.last = nn.Linear(dim, 2 * dim)
        self.head = nn.Linear(dim, patch * patch * channels)

    def regions(self, boxes: Tensor) -> Tensor:
        """Which tokens, text before image, belong to which region (batch, tokens, 1 + instances); the background is 0."""
        side = self.image // self.patch
        centre = (torch.arange(side, device=boxes.device) + 0.5) / side
        left, top, right, bottom = boxes[:, None, None].unbind(-1)
        y, x = centre[:, None, None], centre[None, :, None]
        inside = ((x >= left) & (x < right) & (y >= top) & (y < bottom)).flatten(1, 2)
        of_image = torch.cat([~inside.any(-1, keepdim=True), inside], dim=-1)
        of_text = torch.eye(1 + self.instances, dtype=torch.bool, device=boxes.device).repeat_interleave(self.tokens, 0)
        return torch.cat([of_text.expand(len(boxes), -1, -1), of_image], dim=1)

    def mask(self, regions: Tensor, times: Tensor) -> Tensor:
        """Who sees whom (batch, 1, tokens, tokens): the own region, and at late times all of the image."""
        member = regions.float()
        same = (member @ member.transpose(1, 2)) > 0
        image = torch.arange(regions.shape[1], device=regions.device) >= (1 + self.instances) * self.tokens
        free = (times < self.free_below)[:, None, None] & image[:, None] & image[None, :]
        return (same | free)[:, None]

    def positions(self, device: torch.device) -> Tensor:
        side = self.image // self.patch
        place = torch.arange(side, device=device, dtype=torch.float32)
        grid = torch.stack([place.repeat_interleave(side), place.repeat(side)], dim=1)
        return torch.cat([grid.new_zeros((1 + self.instances) * self.tokens, 2), grid])

    def velocity(self, x: Tensor, depth: Tensor, text: Tensor, pooled: Tensor, regions: Tensor, times: Tensor) -> Tensor:
        rates = torch.exp(torch.arange(self.dim // 2, device=x.device) * (-2 * math.log(1e4) / self.dim))
        angles = 1000.0 * times[:, None] * rates
        condition = self.time(torch.cat([angles.cos(), angles.sin()], dim=1).to(x.dtype)) + self.pooled(pooled)
        turn, mask = rotary(self.positions(x.device), self.dim // self.heads), self.mask(regions, times)
        words = self.read(text)
        picture = self.patchify(torch.cat([x, depth], dim=1)).flatten(2).transpose(1, 2)
        for block in self.doubles:
            words, picture = block(words, picture, condition, turn, mask)
        both = torch.cat([words, picture], dim=1)
        for block in self.singles:
            both = block(both, condition, turn, mask)
        shift, scale = self.last(condition)[:, None].chunk(2, dim=-1)
        out = self.head(modulated(both[:, words.shape[1] :], shift, scale))
        side = self.image // self.patch
        out = out.view(len(x), side, side, self.channels, self.patch, self.patch)
        return out.permute(0, 3, 1, 4, 2, 5).reshape(x.shape)

    def forward(self, x: Tensor, depth: Tensor, text: Tensor, pooled: Tensor, boxes: Tensor, times: Tensor) -> Tensor:
        regions = self.regions(boxes)
        if self.phase == "train":
            return self.velocity(x, depth, text, pooled, regions, times)
        for step in range(self.steps):
            now = torch.full_like(times, 1 - step / self.steps)
            x = x - self.velocity(x, depth, text, pooled, regions, now) / self.steps
        return x


def build(
    *, double: int = 19, single: int = 38, dim: int = 3072, heads: int = 24, text_dim: int = 4096, pooled_dim: int = 768,
    channels: int = 16, instances: int = 6, tokens: int = 64, image: int = 128, patch: int = 2, free_below: float = 0.6,
    phase: str = "train", steps: int = 20,
) -> RegionalDiT:  # fmt: skip
    return RegionalDiT(
        double, single, dim, heads, text_dim, pooled_dim, channels, instances, tokens, image, patch, free_below, phase, steps
    )


def batch(model: RegionalDiT, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """Boxes lie side by side with a gap between them; half of the times are early, half late."""
    clean, noise, depth = torch.randn(3, micro_batch, model.channels, model.image, model.image)
    times = torch.linspace(0.1, 0.9, micro_batch) if micro_batch > 1 else torch.full((1,), 0.9)
    left = torch.arange(model.instances) / model.instances
    box = torch.stack([left, torch.full_like(left, 0.2), left + 0.75 / model.instances, torch.full_like(left, 0.8)], dim=1)
    t = times[:, None, None, None]
    return {
        "x": (1 - t) * clean + t * noise,
        "depth": depth,
        "text": torch.randn(micro_batch, (1 + model.instances) * model.tokens, model.text_dim),
        "pooled": torch.randn(micro_batch, model.pooled_dim),
        "boxes": box.repeat(micro_batch, 1, 1),
        "times": times,
        "target": noise - clean,
    }


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean square error of the velocity."""
    return F.mse_loss(output, batch["target"])
