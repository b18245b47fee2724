"""MiniCPM-V (Yao et al., 2024, "MiniCPM-V: A GPT-4V Level MLLM on Your Phone").

Kept: an image of any size and aspect is cut into a grid of slices whose number follows from its area and whose shape is as near
to a square as the number allows; each slice, and a small view of the whole, is resized to about the area the ViT was
trained at, keeping its aspect. All slices of a batch are packed into one tensor, padded to the same number of patches and
masked; positions are read from a square table stretched to each slice's grid. A perceiver resampler (one cross-attention
from learned queries, with 2D sine positions on the keys) turns every slice into the same few tokens, which take the places
of placeholders in the text of a Llama decoder. The text is learned, from every weight.

The number of slices depends on the data: here every second image is `width` x `height`, the others upright and half as
wide, so that a batch is ragged, and `most` bounds the slices of one. Left out: the resizing itself (patches are random
numbers), the tokens that close a slice, the three-stage training schedule. The defaults are MiniCPM-Llama3-V 2.5.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.zoo.multimodal.piip import Decoder

IGNORED = -100


def partition(width: int, height: int, side: int, most: int) -> tuple[int, int]:
    """Columns and rows of slices; (1, 1) where the image is no larger than one."""
    ideal = min(math.ceil(width * height / side**2), most)
    if ideal <= 1:
        return 1, 1
    counts = [count for count in (ideal - 1, ideal, ideal + 1) if 1 < count <= most]
    grids = [(columns, count // columns) for count in counts for columns in range(1, count + 1) if count % columns == 0]
    return min(grids, key=lambda grid: abs(math.log(width / grid[0] / (height / grid[1]))))


def patch_grid(width: float, height: float, patches: int) -> tuple[int, int]:
    """Rows and columns of patches of a slice with this aspect, at most patches x patches in all."""
    rows = min(patches**2, max(1, round(patches * math.sqrt(height / width))))
    return rows, max(1, min(round(patches * math.sqrt(width / height)), patches**2 // rows))


class Attend(nn.Module):
    """Attention of `x` to `other`, with a mask of which of the others are there."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, there: Tensor) -> Tensor:
        b, n, dim = x.shape
        q, k, v = (
            project(y).view(b, y.shape[1], self.heads, -1).transpose(1, 2)
            for project, y in ((self.q, x), (self.k, keys), (self.v, values))
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=there[:, None, None])
        return self.out(y.transpose(1, 2).reshape(b, n, dim))


class Block(nn.Module):
    """Pre-norm Transformer encoder block over padded slices."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attend = Attend(dim, heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attend(y, y, y, there)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Resampler(nn.Module):
    """Learned queries read the patches of a slice, however many there are."""

    def __init__(self, seen: int, dim: int, heads: int, queries: int) -> None:
        super().__init__()
        self.dim = dim
        self.queries = nn.Parameter(torch.empty(queries, dim))
        nn.init.normal_(self.queries, std=0.02)
        self.project = nn.Linear(seen, dim, bias=False)
        self.norm_query = nn.LayerNorm(dim, eps=1e-6)
        self.norm_seen = nn.LayerNorm(dim, eps=1e-6)
        self.attend = Attend(dim, heads)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.out = nn.Linear(dim, dim, bias=False)

    def sines(self, index: Tensor) -> Tensor:
        """(..., dim / 2) sines and cosines of rows or columns."""
        rate = 1e4 ** -(torch.arange(self.dim // 4, device=index.device) / (self.dim // 4))
        angle = index[..., None].float() * rate
        return torch.cat([angle.sin(), angle.cos()], dim=-1)

    def forward(self, x: Tensor, rows: Tensor, columns: Tensor, there: Tensor) -> Tensor:
        values = self.norm_seen(self.project(x))
        keys = values + torch.cat([self.sines(rows), self.sines(columns)], dim=-1).to(values.dtype)
        queries = self.norm_query(self.queries).expand(x.shape[0], -1, -1)
        return self.out(self.norm(self.attend(queries, keys, values, there)))


class MiniCPMV(nn.Module):
    def __init__(
        self, size: tuple[int, int], side: int, patch: int, most: int, vision: tuple[int, int, int, int], queries: int,
        decoder: Decoder, heads: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.size, self.side, self.patch, self.most, self.queries = size, side, patch, most, queries
        dim, depth, vision_heads, hidden = vision
        self.patches = side // patch
        self.patchify = nn.Linear(3 * patch**2, dim)
        self.positions = nn.Embedding(self.patches**2, dim)
        self.encoder = nn.ModuleList(Block(dim, vision_heads, hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.resampler = Resampler(dim, decoder.tokens.embedding_dim, heads, queries)
        self.decoder = decoder

    def see(self, pixels: Tensor, grid: Tensor) -> Tensor:
        """(slices, patches, pixels) and the rows and columns of each slice → (slices, queries, dim)."""
        index = torch.arange(pixels.shape[1], device=pixels.device)
        high, wide = grid[:, :1], grid[:, 1:]
        rows, columns, there = index // wide, index % wide, index < high * wide
        table = rows * self.patches // high * self.patches + columns * self.patches // wide
        x = self.patchify(pixels) + self.positions(table.clamp(max=self.patches**2 - 1))
        for block in self.encoder:
            x = block(x, there)
        return self.resampler(self.norm(x), rows, columns, there)

    def forward(self, pixels: Tensor, grid: Tensor, places: Tensor, input_ids: Tensor) -> Tensor:
        words = self.decoder.tokens(input_ids)
        seen = self.see(pixels, grid).flatten(0, 1).to(words.dtype)
        words = words.flatten(0, 1).index_copy(0, places.flatten(), seen).view_as(words)
        return self.decoder(words, input_ids.shape[1])


def build(
    *,
    width: int = 1344,
    height: int = 1344,
    side: int = 448,
    patch: int = 14,
    most: int = 9,
    vision_dim: int = 1152,
    vision_depth: int = 27,
    vision_heads: int = 16,
    vision_hidden: int = 4304,
    queries: int = 96,
    layers: int = 32,
    dim: int = 4096,
    heads: int = 32,
    kv_heads: int = 8,
    ffn: int = 14336,
    vocab_size: int = 128256,
    context: int = 512,
) -> nn.Module:
    """`context` is the length of the text after an image."""
    decoder = Decoder(vocab_size, context, layers, dim, heads, kv_heads, ffn, 5e5, False, 0.0)
    vision = vision_dim, vision_depth, vision_heads, vision_hidden
    return MiniCPMV((width, height), side, patch, most, vision, queries, decoder, heads)


def slices_of(width: int, height: int, side: int, patches: int, most: int) -> list[tuple[int, int]]:
    """Rows and columns of patches of the view of the whole image and of each of its slices."""
    columns, rows = partition(width, height, side, most)
    whole = [patch_grid(width, height, patches)]
    return whole if columns * rows == 1 else whole + [patch_grid(width / columns, height / rows, patches)] * (columns * rows)


def batch(model: nn.Module, micro_batch: int, seq: int | None, image: int | None) -> dict[str, Tensor]:
    """Slices of all images in one row; `places` are the rows of the flattened text that each slice's tokens take."""
    width, height = model.size
    sizes = [(width, height) if index % 2 == 0 else (max(1, height // 2), width) for index in range(micro_batch)]
    cut = [slices_of(*size, model.side, model.patches, model.most) for size in sizes]
    text = seq or model.decoder.context
    length = max(map(len, cut)) * (model.queries + 1) + text
    ids = torch.randint(0, model.decoder.vocab_size, (micro_batch, length))
    targets = ids.roll(-1, dims=1)
    starts = []
    for index, slices in enumerate(cut):
        starts += [index * length + number * (model.queries + 1) + 1 for number in range(len(slices))]
        seen = len(slices) * (model.queries + 1)
        targets[index, :seen] = IGNORED
        targets[index, seen + text - 1 :] = IGNORED
    return {
        "pixels": torch.randn(len(starts), model.patches**2, 3 * model.patch**2),
        "grid": torch.tensor([grid for slices in cut for grid in slices]),
        "places": torch.tensor(starts)[:, None] + torch.arange(model.queries),
        "input_ids": ids,
        "targets": targets,
    }


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the next token of the text."""
    return F.cross_entropy(output.float().flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED)
