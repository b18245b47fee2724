"""PIIP (Zhu et al., 2024, "Parameter-Inverted Image Pyramid Networks") and PIIP-LLaVA (Wang et al., 2025, "Parameter-
Inverted Image Pyramid Networks for Visual Perception and Multimodal Understanding").

One image at several resolutions, each seen by a network of its own: the larger the image, the smaller the network.
Every branch is cut into as many parts as there are interactions; after each part, neighbouring branches read each other
by deformable attention (a few learned places of the other map for every position) and a narrow MLP, both behind gates
that start at zero. In the end the maps are projected to one width, brought to one grid and added with learned weights.

Kept: ViT branches with windows of 14 and four layers of global attention, as detectors have them; CNN branches
(ConvNeXt: two levels before the interactions, the third shared out among them, the fourth after). Without a decoder a
linear layer says a class for every position of the finest map; with one (PIIP-LLaVA), every branch has a projector of two
layers, the sum on the coarsest grid goes before the text of a Llama decoder, and the text is learned. Left out: detection
and segmentation heads, pretrained weights, drop path, and the class token.

`branches` says kind, width, depth, heads and image side of each, finest first: "vit-192-12-3-1120 ...". A CNN's width and
depth are those of its third level, and for heads stand the blocks of each other level.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.zoo.language import llama
from foretell.zoo.vision import convnext, vit

PATCH = 16
GLOBALS = 4
"""Layers of a ViT branch that look beyond their window."""


class WindowBlock(nn.Module):
    """Pre-norm Transformer block over a (b, h, w, dim) map; with a window, attention stays inside squares of that side."""

    def __init__(self, dim: int, heads: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = vit.Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = vit.Mlp(dim, 4 * dim)

    def attend(self, x: Tensor) -> Tensor:
        b, h, w, dim = x.shape
        if not self.window or self.window >= max(h, w):
            return self.attn(x.flatten(1, 2)).view(b, h, w, dim)
        side = self.window
        x = F.pad(x, (0, 0, 0, -w % side, 0, -h % side))
        rows, columns = x.shape[1] // side, x.shape[2] // side
        x = x.view(b, rows, side, columns, side, dim).transpose(2, 3).reshape(-1, side * side, dim)
        x = self.attn(x).view(b, rows, columns, side, side, dim).transpose(2, 3).reshape(b, rows * side, columns * side, dim)
        return x[:, :h, :w]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ConvBlock(convnext.Block):
    """The same over channels-last maps, as the other branches have them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class VitStart(nn.Module):
    """Patches and positions of a ViT branch; `blocks` are made for the stages, which own them."""

    def __init__(self, dim: int, depth: int, heads: int, side: int, window: int) -> None:
        super().__init__()
        if side % PATCH:
            raise ValueError(f"image side {side} is not divisible by the patch side {PATCH}")
        self.side, self.dim, self.depth, self.heads, self.window = side, dim, depth, heads, window
        self.patchify = nn.Conv2d(3, dim, PATCH, stride=PATCH)
        self.positions = nn.Parameter(torch.empty(1, side // PATCH, side // PATCH, dim))
        nn.init.normal_(self.positions, std=0.02)

    def blocks(self) -> list[nn.Module]:
        every = max(1, self.depth // GLOBALS)
        windows = [0 if (layer + 1) % every == 0 else self.window for layer in range(self.depth)]
        return [WindowBlock(self.dim, self.heads, window) for window in windows]

    def end(self, width: int, deep: bool) -> End:
        return End(None, self.dim, width, deep)

    def forward(self, image: Tensor) -> Tensor:
        return self.patchify(image).permute(0, 2, 3, 1) + self.positions


class CnnStart(nn.Module):
    """The first two levels of a CNN branch."""

    def __init__(self, dim: int, depth: int, around: int, side: int) -> None:
        super().__init__()
        if side % 32:
            raise ValueError(f"image side {side} is not divisible by 32")
        self.side, self.dim, self.depth, self.around = side, dim, depth, around
        self.stem = nn.Sequential(nn.Conv2d(3, dim // 4, 4, stride=4), convnext.LayerNorm2d(dim // 4, eps=1e-6))
        self.level1 = nn.ModuleList(convnext.Block(dim // 4) for _ in range(around))
        self.down1 = convnext.Downsample(dim // 4, dim // 2)
        self.level2 = nn.ModuleList(convnext.Block(dim // 2) for _ in range(around))
        self.down2 = convnext.Downsample(dim // 2, dim)

    def blocks(self) -> list[nn.Module]:
        return [ConvBlock(self.dim) for _ in range(self.depth)]

    def end(self, width: int, deep: bool) -> End:
        level = nn.Sequential(
            convnext.Downsample(self.dim, 2 * self.dim), *(convnext.Block(2 * self.dim) for _ in range(self.around))
        )
        return End(level, 2 * self.dim, width, deep)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        for block in self.level1:
            x = block(x)
        x = self.down1(x)
        for block in self.level2:
            x = block(x)
        return self.down2(x).permute(0, 2, 3, 1)


class End(nn.Module):
    """What follows the last stage in one branch: the last level of a CNN, a norm, the projector."""

    def __init__(self, level: nn.Module | None, dim: int, width: int, deep: bool) -> None:
        super().__init__()
        self.level = level
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        more = [nn.GELU(), nn.Linear(width, width)] if deep else []
        self.project = nn.Sequential(nn.Linear(dim, width), *more)

    def forward(self, x: Tensor) -> Tensor:
        if self.level is not None:
            x = self.level(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return self.project(self.norm(x))


class Reading(nn.Module):
    """One branch reads another: deformable attention, then an MLP a quarter as wide, each behind a gate."""

    def __init__(self, dim: int, other_dim: int, heads: int, points: int) -> None:
        super().__init__()
        self.heads, self.points = heads, points
        inner = max(heads, dim // 2 // heads * heads)
        self.norm_own = nn.LayerNorm(dim, eps=1e-6)
        self.norm_other = nn.LayerNorm(other_dim, eps=1e-6)
        self.value = nn.Linear(other_dim, inner)
        self.offsets = nn.Linear(dim, heads * points * 2)
        self.weights = nn.Linear(dim, heads * points)
        self.out = nn.Linear(inner, dim)
        self.gate_read = nn.Parameter(torch.zeros(dim))
        self.norm_mlp = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = vit.Mlp(dim, dim // 4)
        self.gate_mlp = nn.Parameter(torch.zeros(dim))

    def read(self, own: Tensor, other: Tensor) -> Tensor:
        b, h, w, _ = own.shape
        high, wide = other.shape[1:3]
        value = self.value(other).view(b, high, wide, self.heads, -1).permute(0, 3, 4, 1, 2).flatten(0, 1)
        rows = (torch.arange(h, device=own.device) * 2 + 1) / h - 1
        columns = (torch.arange(w, device=own.device) * 2 + 1) / w - 1
        here = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), dim=-1)[:, :, None, None]
        offsets = self.offsets(own).view(b, h, w, self.heads, self.points, 2)
        scale = torch.tensor([2 / wide, 2 / high], device=own.device)
        places = (here + offsets * scale).permute(0, 3, 1, 2, 4, 5).reshape(b * self.heads, h * w, self.points, 2)
        weights = self.weights(own).view(b, h * w, self.heads, self.points).softmax(dim=-1).transpose(1, 2).flatten(0, 1)
        found = F.grid_sample(value, places.to(value.dtype), align_corners=False)
        return self.out((found * weights[:, None]).sum(dim=-1).view(b, -1, h, w).permute(0, 2, 3, 1))

    def forward(self, own: Tensor, other: Tensor) -> Tensor:
        own = own + self.gate_read * self.read(self.norm_own(own), self.norm_other(other))
        return own + self.gate_mlp * self.mlp(self.norm_mlp(own))


class Stage(nn.Module):
    """A part of every branch, then each pair of neighbours reads each other."""

    def __init__(self, parts: list[list[nn.Module]], dims: list[int], heads: int, points: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.ModuleList(part) for part in parts)
        pairs = list(pairwise(dims))
        self.down = nn.ModuleList(Reading(fine, coarse, heads, points) for fine, coarse in pairs)
        self.up = nn.ModuleList(Reading(coarse, fine, heads, points) for fine, coarse in pairs)

    def forward(self, *maps: Tensor) -> tuple[Tensor, ...]:
        found = list(maps)
        for index, part in enumerate(self.parts):
            for block in part:
                found[index] = block(found[index])
        for index, (down, up) in enumerate(zip(self.down, self.up, strict=True)):
            found[index] = down(found[index], found[index + 1])
            found[index + 1] = up(found[index + 1], found[index])
        return tuple(found)


class Decoder(llama.Llama):
    """Llama over embeddings instead of tokens; logits of the last `text` positions."""

    def forward(self, x: Tensor, text: int) -> Tensor:  # type: ignore[override]
        cos, sin = self.rotary(x)
        for block in self.blocks:
            x = block(x, cos, sin)
        x = self.norm(x[:, -text:])
        return F.linear(x, self.tokens.weight) if self.head is None else self.head(x)


class PIIP(nn.Module):
    def __init__(
        self, starts: list[VitStart | CnnStart], stages: int, heads: int, points: int, classes: int,
        decoder: Decoder | None, width: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.image, self.classes = max(start.side for start in starts), classes
        self.grids = [start.side // PATCH for start in starts]
        self.starts = nn.ModuleDict({str(index): start for index, start in enumerate(starts)})
        shares = [_shares(start.blocks(), stages) for start in starts]
        self.stages = nn.ModuleList(
            Stage([share[stage] for share in shares], [start.dim for start in starts], heads, points)
            for stage in range(stages)
        )
        self.ends = nn.ModuleDict({str(index): start.end(width, decoder is not None) for index, start in enumerate(starts)})
        self.mix = nn.Parameter(torch.ones(len(starts)))
        self.decoder = decoder
        self.head = None if decoder else nn.Linear(width, classes)

    def see(self, images: Tensor) -> Tensor:
        """The branches' maps, projected, on one grid, added: (b, h, w, width)."""
        maps = []
        for start in self.starts.values():
            side = start.side
            maps.append(start(images if side == self.image else F.interpolate(images, (side, side), mode="bilinear")))
        for stage in self.stages:
            maps = stage(*maps)
        maps = [end(x) for end, x in zip(self.ends.values(), maps, strict=True)]
        grid = (min if self.decoder else max)(x.shape[1] for x in maps)
        for index, x in enumerate(maps):
            if x.shape[1] != grid:
                maps[index] = F.interpolate(x.permute(0, 3, 1, 2), (grid, grid), mode="bilinear").permute(0, 2, 3, 1)
        return (torch.stack(maps, dim=-1) * self.mix).sum(dim=-1)

    def forward(self, images: Tensor, input_ids: Tensor | None = None) -> Tensor:
        seen = self.see(images)
        if self.decoder is None or input_ids is None:
            assert self.head is not None
            return self.head(seen)
        words = self.decoder.tokens(input_ids)
        return self.decoder(torch.cat([seen.flatten(1, 2).to(words.dtype), words], dim=1), input_ids.shape[1])


def _shares(blocks: list[nn.Module], stages: int) -> list[list[nn.Module]]:
    """Blocks in order, as evenly as it goes."""
    cuts = [len(blocks) * stage // stages for stage in range(stages + 1)]
    return [blocks[start:end] for start, end in pairwise(cuts)]


def _starts(branches: str, image: int, window: int) -> list[VitStart | CnnStart]:
    """Sides in the proportions that `branches` has them, the finest being `image`, in whole patches of the CNN's last level."""
    specs = [(kind, [int(size) for size in sizes]) for kind, *sizes in (text.split("-") for text in branches.split())]
    finest = specs[0][1][-1]
    found: list[VitStart | CnnStart] = []
    for kind, (dim, depth, more, side) in specs:
        side = side if image in (0, finest) else side * image // finest // 32 * 32
        found.append(VitStart(dim, depth, more, side, window) if kind == "vit" else CnnStart(dim, depth, more, side))
    return found


def build(
    *,
    branches: str = "vit-192-12-3-1120 vit-384-12-6-896 vit-768-12-12-448",
    image: int = 0,
    stages: int = 12,
    window: int = 14,
    reading_heads: int = 16,
    points: int = 4,
    width: int = 768,
    classes: int = 150,
    layers: int = 0,
    heads: int = 32,
    ffn: int = 11008,
    vocab_size: int = 32000,
    context: int = 512,
) -> nn.Module:
    """`image` is the side of the finest branch, 0 as `branches` has it; `layers` of a decoder of this `width`, if any."""
    decoder = Decoder(vocab_size, context, layers, width, heads, heads, ffn, 1e4, False, 0.0) if layers else None
    return PIIP(_starts(branches, image, window), stages, reading_heads, points, classes, decoder, width)


def batch(model: nn.Module, micro_batch: int, seq: int | None, image: int | None) -> dict[str, Tensor]:
    """Random images, with a class for every position of the finest map or, before a decoder, a text."""
    if image is not None and image != model.image:
        raise ValueError(f"image side {image} was asked for, but the model was built with image={model.image}")
    images = torch.randn(micro_batch, 3, model.image, model.image)
    if model.decoder is None:
        grid = max(model.grids)
        return {"images": images, "targets": torch.randint(model.classes, (micro_batch, grid, grid))}
    tokens = torch.randint(0, model.decoder.vocab_size, (micro_batch, (seq or model.decoder.context) + 1))
    return {"images": images, "input_ids": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Of every position of the finest map, or of every token of the text."""
    return F.cross_entropy(output.float().flatten(0, -2), batch["targets"].flatten())
