"""Any-Size-Diffusion (Zheng, Guo, Deng, Han, Li, Xu, Xu 2023, "Any-Size-Diffusion: Toward Efficient Text-Driven Synthesis
for Any-Size HD Images").

Kept: a latent U-Net in the shape of Stable Diffusion 2.1: residual blocks with time, and attention within the picture and to
the text on all levels but the lowest resolution. Stage one trains it on buckets of several ratios and nearly the same
area; `bucket` says which of `RATIOS` a batch is of, so that one trace is of one bucket. Stage two, phase `enlarge` (for
inference only), starts from enlarged latents and denoises tile after tile: tiles do not overlap within a step, and the
grid of tiles is shifted from step to step, so that no border stays where it is. Every tile is worked on in place: what
is held besides the picture is one tile's. Phase `whole` does the same steps without tiles, for comparison.

Left out: text encoder and autoencoder (their outputs are the batch), the super-resolution prior of stage two, guidance.
Shifts come from a fixed sequence instead of a random draw. `image` is the side of square latents, `scale` how many
times larger the enlarged ones are; the grid has one row and one column of tiles more than fit, whatever the shift.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PHASES = ("ratio",)
SAMPLERS = ("enlarge", "whole")
RATIOS = ((1, 1), (4, 3), (3, 4), (3, 2), (2, 3), (16, 9), (9, 16), (2, 1), (1, 2))
"""Width to height."""


class Residual(nn.Module):
    def __init__(self, before: int, after: int, time_dim: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(8, before)
        self.conv1 = nn.Conv2d(before, after, 3, padding=1)
        self.time = nn.Linear(time_dim, after)
        self.norm2 = nn.GroupNorm(8, after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class Attention(nn.Module):
    def __init__(self, dim: int, of: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(of, dim, bias=False)
        self.value = nn.Linear(of, dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        parts = (self.query(x), self.key(other), self.value(other))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Reader(nn.Module):
    """Attention of all places to each other, then to the text, then a gated feed-forward."""

    def __init__(self, dim: int, text_dim: int, head: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3))
        self.own = Attention(dim, dim, dim // head)
        self.text = Attention(dim, text_dim, dim // head)
        self.up = nn.Linear(dim, 8 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        h = self.norm(x).flatten(2).transpose(1, 2)
        own = self.norms[0](h)
        h = h + self.own(own, own)
        h = h + self.text(self.norms[1](h), text)
        value, gate = self.up(self.norms[2](h)).chunk(2, dim=-1)
        h = h + self.down(value * F.gelu(gate))
        return x + h.transpose(1, 2).reshape(x.shape)


class Block(nn.Module):
    def __init__(self, before: int, after: int, time_dim: int, text_dim: int, head: int) -> None:
        super().__init__()
        self.residual = Residual(before, after, time_dim)
        self.reader = Reader(after, text_dim, head) if head else None

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        x = self.residual(x, time)
        return x if self.reader is None else self.reader(x, text)


class LatentUNet(nn.Module):
    """Noise in latents (batch, channels, height, width) whose sides are multiples of 2 to the `levels` - 1."""

    def __init__(self, channels: int, width: int, levels: int, blocks: int, text_dim: int, head: int) -> None:
        super().__init__()
        widths = [width * min(1 << level, 4) for level in range(levels)]
        heads = [*[head] * (levels - 1), 0]
        time_dim = 4 * width
        self.width, self.blocks = width, blocks
        self.time = nn.Sequential(nn.Linear(width, time_dim), nn.SiLU(), nn.Linear(time_dim, time_dim))
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        skips, before = [width], width
        self.down, self.shrink = nn.ModuleList(), nn.ModuleList()
        for level, after in enumerate(widths):
            for _ in range(blocks):
                self.down.append(Block(before, after, time_dim, text_dim, heads[level]))
                before = after
                skips.append(after)
            if level < levels - 1:
                self.shrink.append(nn.Conv2d(after, after, 3, stride=2, padding=1))
                skips.append(after)
        self.middle = nn.ModuleList(Block(before, before, time_dim, text_dim, [head, 0][i]) for i in range(2))
        self.up, self.grow = nn.ModuleList(), nn.ModuleList()
        for level in reversed(range(levels)):
            for _ in range(blocks + 1):
                self.up.append(Block(before + skips.pop(), widths[level], time_dim, text_dim, heads[level]))
                before = widths[level]
            if level:
                self.grow.append(nn.Conv2d(before, before, 3, padding=1))
        self.norm = nn.GroupNorm(8, width)
        self.last = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, x: Tensor, times: Tensor, text: Tensor) -> Tensor:
        rates = torch.exp(torch.arange(self.width // 2, device=x.device) * (-2 * math.log(1e4) / self.width))
        angles = times[:, None] * rates
        time = self.time(torch.cat([angles.cos(), angles.sin()], dim=1).to(x.dtype))
        x = self.first(x)
        skips = [x]
        for number, block in enumerate(self.down, start=1):
            x = block(x, time, text)
            skips.append(x)
            if number % self.blocks == 0 and number // self.blocks <= len(self.shrink):
                x = self.shrink[number // self.blocks - 1](x)
                skips.append(x)
        for block in self.middle:
            x = block(x, time, text)
        for number, block in enumerate(self.up, start=1):
            x = block(torch.cat([x, skips.pop()], dim=1), time, text)
            if number % (self.blocks + 1) == 0 and number // (self.blocks + 1) <= len(self.grow):
                x = self.grow[number // (self.blocks + 1) - 1](F.interpolate(x, scale_factor=2.0))
        return self.last(F.silu(self.norm(x)))


class AnySize(nn.Module):
    def __init__(
        self, channels: int, width: int, levels: int, blocks: int, text_dim: int, tokens: int, head: int, image: int, bucket: int,
        phase: str, scale: int, tile: int, steps: int, strength: float, shift: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        if phase not in (*PHASES, *SAMPLERS):
            raise ValueError(f"no phase {phase}: there are {', '.join((*PHASES, *SAMPLERS))}")
        if (scale * image) % tile:
            raise ValueError(f"side {scale * image} of the enlarged latents is not divisible by the tile's side {tile}")
        self.channels, self.text_dim, self.tokens, self.image, self.phase = channels, text_dim, tokens, image, phase
        self.scale, self.tile, self.steps, self.strength, self.shift = scale, tile, steps, strength, shift
        self.multiple = 1 << (levels - 1)
        self.bucket = RATIOS[bucket]
        self.unet = LatentUNet(channels, width, levels, blocks, text_dim, head)

    def shape(self, side: int) -> tuple[int, int]:
        """Height and width of the bucket: its ratio, the square's area as nearly as multiples allow."""
        wide, high = self.bucket
        root = math.sqrt(wide / high)
        return tuple(max(1, round(side * factor / self.multiple)) * self.multiple for factor in (1 / root, root))  # type: ignore[return-value]

    def forward(self, latents: Tensor, text: Tensor, times: Tensor) -> Tensor:
        if self.phase == "ratio":
            return self.unet(latents, times, text)
        side = self.scale * latents.shape[-1]
        canvas = F.interpolate(latents, (side, side), mode="bilinear")
        canvas.lerp_(torch.randn_like(canvas), self.strength)
        rim = self.tile if self.phase == "enlarge" else 0
        if rim:
            canvas = F.pad(canvas, (rim, rim, rim, rim), mode="replicate")
        for step in range(self.steps):
            now = torch.full_like(times, 1000.0 * self.strength * (1 - step / self.steps))
            if self.phase == "whole":
                canvas.sub_(self.unet(canvas, now, text) / self.steps)
            else:
                self.denoise_tiles(canvas, now, text, step)
        return canvas[..., rim : rim + side, rim : rim + side]

    def denoise_tiles(self, canvas: Tensor, now: Tensor, text: Tensor, step: int) -> None:
        """One step on every tile of a grid that begins at the step's shift, inside the rim around the picture."""
        down, right = self.offsets(step)
        last = canvas.shape[-1] - 2 * self.tile
        for top in range(down, down + last + 1, self.tile):
            for left in range(right, right + last + 1, self.tile):
                part = canvas[..., top : top + self.tile, left : left + self.tile]
                part.sub_(self.unet(part, now, text) / self.steps)

    def offsets(self, step: int) -> tuple[int, int]:
        """Golden steps: far from all offsets before, never repeated soon."""
        if not self.shift:
            return 0, 0
        return tuple(int(step * rate % 1.0 * self.tile) for rate in (0.618034, 0.754878))  # type: ignore[return-value]


def build(
    *, channels: int = 4, width: int = 320, levels: int = 4, blocks: int = 2, text_dim: int = 1024, tokens: int = 77,
    head: int = 64, image: int = 64, bucket: int = 0, phase: str = "ratio", scale: int = 2, tile: int = 64, steps: int = 4,
    strength: float = 0.4, shift: bool = True,
) -> AnySize:  # fmt: skip
    return AnySize(
        channels, width, levels, blocks, text_dim, tokens, head, image, bucket, phase, scale, tile, steps, strength, shift
    )


def batch(model: AnySize, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """Latents of one bucket's shape with noise mixed in at a time of each, and the embeddings of a text."""
    side = image or model.image
    high, wide = model.shape(side) if model.phase == "ratio" else (side, side)
    latents, noise = torch.randn(2, micro_batch, model.channels, high, wide)
    times = 1000.0 * torch.rand(micro_batch)
    angle = (times / 1000.0 * (math.pi / 2)).view(-1, 1, 1, 1)
    return {
        "latents": angle.cos() * latents + angle.sin() * noise,
        "text": torch.randn(micro_batch, model.tokens, model.text_dim),
        "times": times,
        "noise": noise,
    }


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean square error of the noise."""
    return F.mse_loss(output, batch["noise"])
