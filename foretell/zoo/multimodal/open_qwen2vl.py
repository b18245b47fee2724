"""Open-Qwen2VL (Wang et al., 2025, "Open-Qwen2VL: Compute-Efficient Pre-Training of Fully-Open Multimodal LLMs on Academic
Resources").

Kept: a frozen SigLIP ViT sees each image; its map is pooled to 12 x 12 (the paper's saving in pretraining) and goes through a
projector of two layers; the tokens take their places in the text of a Qwen2.5 decoder. Samples of an image and a text, all
of different lengths, are packed first-fit-decreasing into sequences of the whole context. A packed sequence is masked so
that no sample sees another, positions start anew with each, and no sample's last token is asked for the next one's first.

`phase` is "pretrain" with pooled images or "tune" with every patch a token; the ViT is frozen in both. The number of images
in a batch follows from the packing of synthetic lengths, which are drawn from a fixed seed. Left out: data, special tokens,
several images in one sample. The defaults are SigLIP-so400m at 384 pixels (its MLP four times its width) and Qwen2.5-1.5B.
"""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.zoo.language.llama import Rotary, SwiGLU
from foretell.zoo.vision import vit

PHASES = ("pretrain", "tune")
IGNORED = -100


def pack(lengths: list[int], context: int) -> list[list[int]]:
    """Numbers of the samples in each sequence: the longest first, each into the first sequence with room for it."""
    bins: list[list[int]] = []
    room: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        place = next((place for place, left in enumerate(room) if left >= lengths[number]), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(context)
        bins[place].append(number)
        room[place] -= lengths[number]
    return bins


class Attention(nn.Module):
    """Grouped-query attention with biases, over packed samples."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim, self.groups = dim // heads, heads // kv_heads
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, kv_heads * self.head_dim)
        self.v = nn.Linear(dim, kv_heads * self.head_dim)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        b, t, dim = x.shape
        q, k, v = (project(x).view(b, t, -1, self.head_dim).transpose(1, 2) for project in (self.q, self.k, self.v))
        k, v = (y.repeat_interleave(self.groups, dim=1) for y in (Rotary.rotate(k, cos, sin), v))
        y = F.scaled_dot_product_attention(Rotary.rotate(q, cos, sin), k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(b, t, dim))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, ffn: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(dim, eps=1e-6)
        self.attention = Attention(dim, heads, kv_heads)
        self.norm2 = nn.RMSNorm(dim, eps=1e-6)
        self.mlp = SwiGLU(dim, ffn)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin, mask)
        return x + self.mlp(self.norm2(x))


class Eye(nn.Module):
    """ViT without a class token; its map, pooled or not, as rows of patches."""

    def __init__(self, image: int, patch: int, dim: int, depth: int, heads: int) -> None:
        super().__init__()
        self.grid = image // patch
        self.patchify = nn.Conv2d(3, dim, patch, stride=patch)
        self.positions = nn.Parameter(torch.zeros(1, self.grid**2, dim))
        self.blocks = nn.ModuleList(vit.Block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, eps=1e-6)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patchify(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class OpenQwen2VL(nn.Module):
    def __init__(
        self, eye: Eye, image: int, pooled: int, vocab_size: int, context: int, layers: int, dim: int, heads: int, kv_heads: int,
        ffn: int, texts: tuple[int, int], phase: str,
    ) -> None:  # fmt: skip
        super().__init__()
        if phase not in PHASES:
            raise ValueError(f"phase {phase!r} is not one of {', '.join(PHASES)}")
        self.image, self.vocab_size, self.context, self.texts = image, vocab_size, context, texts
        self.side = pooled if phase == "pretrain" else eye.grid
        self.head_dim = dim // heads
        self.eye = eye.requires_grad_(False)
        self.projector = nn.Sequential(nn.Linear(eye.norm.normalized_shape[0], dim), nn.GELU(), nn.Linear(dim, dim))
        self.tokens = nn.Embedding(vocab_size, dim)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(dim, heads, kv_heads, ffn) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-6)

    def see(self, images: Tensor) -> Tensor:
        x = self.eye(images)
        if self.side != self.eye.grid:
            square = x.transpose(1, 2).unflatten(2, (self.eye.grid, self.eye.grid))
            x = F.adaptive_avg_pool2d(square, self.side).flatten(2).transpose(1, 2)
        return self.projector(x)

    def forward(self, images: Tensor, places: Tensor, input_ids: Tensor, segments: Tensor, positions: Tensor) -> Tensor:
        """`segments` numbers the samples of a packed sequence; `positions` counts within each."""
        words = self.tokens(input_ids)
        seen = self.see(images).flatten(0, 1).to(words.dtype)
        x = words.flatten(0, 1).index_copy(0, places.flatten(), seen).view_as(words)
        rate = 1e6 ** -(torch.arange(0, self.head_dim, 2, device=x.device, dtype=torch.float32) / self.head_dim)
        angle = positions[:, None, :, None].float() * rate
        cos, sin = angle.cos(), angle.sin()
        same = segments[:, :, None] == segments[:, None, :]
        mask = same.tril()[:, None]
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        return F.linear(self.norm(x), self.tokens.weight)


def build(
    *,
    image: int = 384,
    patch: int = 14,
    pooled: int = 12,
    vision_dim: int = 1152,
    vision_depth: int = 27,
    vision_heads: int = 16,
    layers: int = 28,
    dim: int = 1536,
    heads: int = 12,
    kv_heads: int = 2,
    ffn: int = 8960,
    vocab_size: int = 151936,
    context: int = 4096,
    shortest: int = 16,
    longest: int = 256,
    phase: str = "pretrain",
) -> nn.Module:
    """`pooled` is the side of the pooled map; texts are of `shortest` to `longest` tokens."""
    eye = Eye(image, patch, vision_dim, vision_depth, vision_heads)
    return OpenQwen2VL(eye, image, pooled, vocab_size, context, layers, dim, heads, kv_heads, ffn, (shortest, longest), phase)


def packed(model: nn.Module, micro_batch: int, context: int) -> list[list[int]]:
    """Text lengths of the samples of each sequence: the fullest of a pool of twice as many."""
    dice, tokens = random.Random(0), model.side**2
    usual = tokens + sum(model.texts) // 2
    if tokens + model.texts[1] > context:
        raise ValueError(f"an image of {tokens} tokens and a text of {model.texts[1]} do not fit {context} tokens")
    lengths = [tokens + dice.randint(*model.texts) for _ in range(64 + 2 * micro_batch * context // usual)]
    bins = sorted(pack(lengths, context), key=lambda members: -sum(lengths[number] for number in members))
    return [[lengths[number] - tokens for number in members] for members in bins[:micro_batch]]


def batch(model: nn.Module, micro_batch: int, seq: int | None, image: int | None) -> dict[str, Tensor]:
    """Images and texts packed into rows: whose each token is, its position, where images go, what is learned."""
    context, tokens = seq or model.context, model.side**2
    starts: list[int] = []
    segments: list[int] = []
    positions: list[int] = []
    learned: list[bool] = []
    for row, texts in enumerate(packed(model, micro_batch, context)):
        at = len(segments)
        for number, text in enumerate(texts):
            starts.append(row * context + len(segments) - at)
            segments += [number + 1] * (tokens + text)
            positions += range(tokens + text)
            learned += [False] * (tokens - 1) + [True] * text + [False]
        left = context - (len(segments) - at)
        segments, positions, learned = segments + [0] * left, positions + [0] * left, learned + [False] * left
    ids = torch.randint(0, model.vocab_size, (micro_batch, context))
    return {
        "images": torch.randn(len(starts), 3, model.image, model.image),
        "places": torch.tensor(starts)[:, None] + torch.arange(tokens),
        "input_ids": ids,
        "segments": torch.tensor(segments).view(micro_batch, context),
        "positions": torch.tensor(positions).view(micro_batch, context),
        "targets": torch.where(torch.tensor(learned).view(micro_batch, context), ids.roll(-1, dims=1), IGNORED),
    }


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the next token within each sample's text."""
    return F.cross_entropy(output.float().flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED)
