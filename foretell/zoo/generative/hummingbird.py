"""AMD-Hummingbird (Isobe, Cui, Zhou, Ge, Li, Barsoum 2025, "AMD-Hummingbird: Towards an Efficient Text-to-Video Model").

Kept: a latent video U-Net in the shape of VideoCrafter2: every block convolves and attends within each frame, reads the text,
then convolves and attends along time at each place. Its sibling has half of the blocks of each level, taken over from
it with their weights, since a level begins with a block that changes the width and the others may go. Phases in turn:
`teacher` trains the full network, `prune` lets the sibling follow the frozen teacher, `reward` trains the sibling with
the feedback of two frozen reward networks, one on frames and one on the video, through a frozen decoder.

Stand-ins: the decoder of the autoencoder and the reward networks are small convolutional ones with random weights, the
text embeddings are the batch. Left out: consistency distillation of the steps (a sample is one step here), the pipeline
that picks and recaptions videos. A phase holds only the networks that it needs. `seq` is the number of frames, `image`
the side of the latents.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PHASES = ("teacher", "prune", "reward")
REWARD_WEIGHT = 0.1


class Attention(nn.Module):
    def __init__(self, dim: int, of: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.norm = nn.LayerNorm(dim)
        self.query = nn.Linear(dim, dim, bias=False)
        self.both = nn.Linear(of, 2 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        normed = self.norm(x)
        key, value = self.both(normed if other is None else other).chunk(2, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.query(normed), key, value))
        return x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Within frames: convolutions, attention, text, feed-forward; then along time: convolution, attention."""

    def __init__(self, before: int, after: int, time_dim: int, text_dim: int, head: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = nn.GroupNorm(8, before), nn.GroupNorm(8, after), nn.GroupNorm(8, after)
        self.conv1 = nn.Conv2d(before, after, 3, padding=1)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()
        self.time = nn.Linear(time_dim, after)
        self.space, self.text = Attention(after, after, head), Attention(after, text_dim, head)
        self.ffn = nn.Sequential(nn.LayerNorm(after), nn.Linear(after, 4 * after), nn.GELU(), nn.Linear(4 * after, after))
        self.along = nn.Conv1d(after, after, 3, padding=1)
        self.frames = Attention(after, after, head)

    def forward(self, x: Tensor, time: Tensor, text: Tensor, frames: int) -> Tensor:
        """x is (batch * frames, channels, height, width)."""
        h = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        x = self.skip(x) + self.conv2(F.silu(self.norm2(h)))
        n, c, high, wide = x.shape
        places = x.flatten(2).transpose(1, 2)
        places = self.text(self.space(places), text)
        places = places + self.ffn(places)
        x = places.transpose(1, 2).reshape(n, c, high, wide)
        lines = self.norm3(x).view(-1, frames, c, high * wide).permute(0, 3, 2, 1).reshape(-1, c, frames)
        lines = self.frames(self.along(F.silu(lines)).transpose(1, 2))
        return x + lines.view(-1, high * wide, frames, c).permute(0, 2, 3, 1).reshape(n, c, high, wide)


class Level(nn.Module):
    """The first block changes the width; any of those after it may be pruned."""

    def __init__(self, before: int, after: int, blocks: int, time_dim: int, text_dim: int, head: int) -> None:
        super().__init__()
        sizes = [(before, after), *[(after, after)] * (blocks - 1)]
        self.blocks = nn.ModuleList(Block(*size, time_dim, text_dim, head) for size in sizes)

    def forward(self, x: Tensor, time: Tensor, text: Tensor, frames: int) -> Tensor:
        for block in self.blocks:
            x = block(x, time, text, frames)
        return x


class VideoUNet(nn.Module):
    """Noise in latents (batch, channels, frames, height, width)."""

    def __init__(self, channels: int, width: int, levels: int, blocks: int, text_dim: int, head: int) -> None:
        super().__init__()
        widths = [width * min(1 << level, 4) for level in range(levels)]
        rest = (blocks, 4 * width, text_dim, head)
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width), nn.SiLU())
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.down = nn.ModuleList(Level(widths[max(0, i - 1)], widths[i], *rest) for i in range(levels))
        self.up = nn.ModuleList(Level(widths[min(levels - 1, i + 1)] + widths[i], widths[i], *rest) for i in reversed(range(levels)))
        self.norm = nn.GroupNorm(8, width)
        self.last = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, x: Tensor, times: Tensor, text: Tensor) -> Tensor:
        b, c, frames, high, wide = x.shape
        rates = torch.exp(torch.arange(self.width // 2, device=x.device) * (-2 * math.log(1e4) / self.width))
        angles = times[:, None] * rates
        time = self.time(torch.cat([angles.cos(), angles.sin()], dim=1).to(x.dtype)).repeat_interleave(frames, 0)
        text = text.repeat_interleave(frames, 0)
        h = self.first(x.transpose(1, 2).reshape(b * frames, c, high, wide))
        skips = []
        for number, level in enumerate(self.down):
            h = level(h if number == 0 else F.avg_pool2d(h, 2), time, text, frames)
            skips.append(h)
        for number, level in enumerate(self.up):
            h = level(torch.cat([h if number == 0 else F.interpolate(h, scale_factor=2.0), skips.pop()], 1), time, text, frames)
        return self.last(F.silu(self.norm(h))).view(b, frames, c, high, wide).transpose(1, 2)


def pruned(full: VideoUNet, half: VideoUNet) -> VideoUNet:
    """The sibling with weights of the full network: of each level the first block, the third and so on."""
    for name, module in half.named_children():
        if name not in ("down", "up"):
            module.load_state_dict(getattr(full, name).state_dict())
    for of_half, of_full in ((half.down, full.down), (half.up, full.up)):
        for small, large in zip(of_half, of_full, strict=True):
            for number, block in enumerate(small.blocks):
                block.load_state_dict(large.blocks[kept(number)].state_dict())
    return half


def kept(number: int) -> int:
    """Which block of the full level the sibling's block of that number is."""
    return 2 * number


class Reward(nn.Module):
    """A score of each sample from pictures (batch, frames, 3, side, side) and text; stands for a pretrained one."""

    def __init__(self, width: int, text_dim: int, over_time: bool) -> None:
        super().__init__()
        self.over_time = over_time
        conv = nn.Conv3d if over_time else nn.Conv2d
        self.convs = nn.ModuleList(conv(before, width, 3, stride=2, padding=1) for before in (3, width, width))
        self.text = nn.Linear(text_dim, width)

    def forward(self, pictures: Tensor, text: Tensor) -> Tensor:
        b, frames = pictures.shape[:2]
        x = pictures.transpose(1, 2) if self.over_time else pictures.flatten(0, 1)
        for conv in self.convs:
            x = F.silu(conv(x))
        seen = x.flatten(2).mean(2)
        seen = seen if self.over_time else seen.view(b, frames, -1).mean(1)
        return F.cosine_similarity(seen, self.text(text.mean(1)), dim=-1)


class Hummingbird(nn.Module):
    def __init__(
        self, channels: int, width: int, levels: int, blocks: int, text_dim: int, tokens: int, head: int, frames: int, image: int,
        reward_width: int, phase: str,
    ) -> None:  # fmt: skip
        super().__init__()
        if phase not in PHASES:
            raise ValueError(f"no phase {phase}: there are {', '.join(PHASES)}")
        self.channels, self.text_dim, self.tokens, self.frames = channels, text_dim, tokens, frames
        self.image, self.phase, self.multiple = image, phase, 1 << (levels - 1)
        if phase != "reward":
            self.teacher = VideoUNet(channels, width, levels, blocks, text_dim, head).requires_grad_(phase == "teacher")
        if phase != "teacher":
            self.student = VideoUNet(channels, width, levels, blocks // 2, text_dim, head)
        if phase == "prune":
            pruned(self.teacher, self.student)
        if phase == "reward":
            self.decoder = nn.Sequential(nn.Conv2d(channels, 12, 3, padding=1), nn.PixelShuffle(2)).requires_grad_(False)
            self.of_frames = Reward(reward_width, text_dim, over_time=False).requires_grad_(False)
            self.of_video = Reward(reward_width, text_dim, over_time=True).requires_grad_(False)

    def forward(self, latents: Tensor, times: Tensor, text: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """What is predicted, what it should be, and the reward of every sample where there is one."""
        if self.phase == "teacher":
            return self.teacher(latents, times, text), noise, None
        if self.phase == "prune":
            with torch.no_grad():
                wanted = self.teacher(latents, times, text)
            return self.student(latents, times, text), wanted, None
        found = self.student(latents, times, text)
        angle = (times / 1000.0 * (math.pi / 2)).view(-1, 1, 1, 1, 1)
        clean = angle.cos() * latents - angle.sin() * found
        pictures = self.decoder(clean.transpose(1, 2).flatten(0, 1)).unflatten(0, (len(latents), -1))
        return found, noise, self.of_frames(pictures, text) + self.of_video(pictures, text)


def build(
    *, channels: int = 4, width: int = 320, levels: int = 4, blocks: int = 4, text_dim: int = 1024, tokens: int = 77,
    head: int = 64, frames: int = 26, image: int = 40, reward_width: int = 256, phase: str = "teacher",
) -> Hummingbird:  # fmt: skip
    return Hummingbird(channels, width, levels, blocks, text_dim, tokens, head, frames, image, reward_width, phase)


def batch(model: Hummingbird, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """Latents of `seq` frames with noise mixed in at a time of each, and the embeddings of a text."""
    side = image or model.image
    if side % model.multiple:
        raise ValueError(f"image side {side} is not divisible by {model.multiple}")
    clean, noise = torch.randn(2, micro_batch, model.channels, seq or model.frames, side, side)
    times = 1000.0 * torch.rand(micro_batch)
    angle = (times / 1000.0 * (math.pi / 2)).view(-1, 1, 1, 1, 1)
    return {
        "latents": angle.cos() * clean + angle.sin() * noise,
        "times": times,
        "text": torch.randn(micro_batch, model.tokens, model.text_dim),
        "noise": noise,
    }


def loss(output: tuple[Tensor, Tensor, Tensor | None], batch: dict[str, Tensor]) -> Tensor:
    """Mean square error against the noise or the teacher, less the rewards where there are any."""
    found, wanted, reward = output
    error = F.mse_loss(found, wanted)
    return error if reward is None else error - REWARD_WEIGHT * reward.mean()
