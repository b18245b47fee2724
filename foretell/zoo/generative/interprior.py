"""Interaction prior of two hands (Zuo, Zhao, Sun, Xie, Xue, Wang 2023, "Reconstructing Interacting Hands with Interaction
Prior from Monocular Images").

Kept: phase `prior` trains a variational autoencoder on the joint state of a pair of hands (rotations of 16 joints and a shape
for each, the offset between them), so that a code says how two hands interact. Phase `link` trains a convolutional
backbone that gives one interaction adjacency heatmap per joint (bright at the joint and at the joints of the other hand
next to it), features gathered under each heatmap as tokens, and a vision transformer that links them to a distribution
of codes; a code is drawn and the frozen prior makes hands of it. Noise is drawn in both phases: of codes, and by dropout
in every block.

Stand-ins: the hand model is a kinematic chain of 21 joints whose bone lengths depend on the shape, without a mesh; images
and states are synthetic. Left out: physical plausibility losses, the large image backbone's pretraining. Sizes of the
large entry are assumed where the paper's were not at hand.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PHASES = ("prior", "link")
JOINTS, FINGERS, ROTATIONS, SHAPE = 21, 5, 16, 10
HAND = 6 * ROTATIONS + SHAPE
STATE = 2 * HAND + 3
NEIGHBOURS = 3
"""Joints of the other hand that a heatmap shows besides its own joint."""


def rotations(six: Tensor) -> Tensor:
    """Rotation matrices (..., 3, 3) from two vectors each (..., 6), made orthonormal one after the other."""
    first = F.normalize(six[..., :3], dim=-1)
    second = six[..., 3:] - (first * six[..., 3:]).sum(-1, keepdim=True) * first
    second = F.normalize(second, dim=-1)
    return torch.stack([first, second, torch.linalg.cross(first, second)], dim=-1)


def bones(shape: Tensor) -> Tensor:
    """Lengths (..., fingers, 4) of the bones from wrist to tip: a hand of usual size, up to a tenth longer or shorter."""
    usual = torch.tensor([0.9, 0.4, 0.25, 0.2], device=shape.device, dtype=shape.dtype)
    return usual * (1 + 0.1 * torch.tanh(shape.unflatten(-1, (FINGERS, 2)).mean(-1)))[..., None]


def hand(state: Tensor) -> Tensor:
    """Joints (..., 21, 3) of one hand around its wrist: fingers spread like a fan, each turned joint by joint."""
    turns = rotations(state[..., : 6 * ROTATIONS].unflatten(-1, (ROTATIONS, 6)))
    lengths = bones(state[..., 6 * ROTATIONS :])
    fan = torch.linspace(-0.6, 0.6, FINGERS, device=state.device, dtype=state.dtype)
    along = torch.stack([fan.sin(), fan.cos(), torch.zeros_like(fan)], dim=-1)[..., None]
    total = turns[..., :1, :, :]
    place = (total @ along)[..., 0] * lengths[..., :1]
    places = [place.new_zeros(*place.shape[:-2], 1, 3), place]
    for bone in range(3):
        total = total @ turns[..., 1 + FINGERS * bone : 1 + FINGERS * (bone + 1), :, :]
        place = place + (total @ along)[..., 0] * lengths[..., bone + 1 : bone + 2]
        places.append(place)
    return torch.cat(places, dim=-2)


def pair(state: Tensor) -> Tensor:
    """Joints (batch, 42, 3) of both hands in the frame of the first."""
    both = hand(state[:, : 2 * HAND].unflatten(-1, (2, HAND)))
    return torch.cat([both[:, 0], both[:, 1] + state[:, None, 2 * HAND :]], dim=1)


def adjacency_heatmaps(places: Tensor, side: int, width: float = 0.06) -> Tensor:
    """(batch, 42, side, side) from places (batch, 42, 2) between 0 and 1: a joint and its nearest of the other hand."""
    centre = (torch.arange(side, device=places.device, dtype=places.dtype) + 0.5) / side
    apart = (places[..., None] - centre).square()
    spots = torch.exp(-(apart[:, :, 1, :, None] + apart[:, :, 0, None, :]) / (2 * width * width))
    left, right = places.split(JOINTS, dim=1)
    gaps = (left[:, :, None] - right[:, None]).square().sum(-1)
    of_left = gaps.topk(NEIGHBOURS, dim=2, largest=False).indices + JOINTS
    of_right = gaps.transpose(1, 2).topk(NEIGHBOURS, dim=2, largest=False).indices
    chosen = torch.cat([of_left, of_right], dim=1).flatten(1)[:, :, None, None].expand(-1, -1, side, side)
    return torch.maximum(spots, spots.gather(1, chosen).unflatten(1, (2 * JOINTS, NEIGHBOURS)).amax(2))


class Code(nn.Module):
    """A normal distribution of codes, and a draw from it."""

    def __init__(self, dim: int, code: int) -> None:
        super().__init__()
        self.both = nn.Linear(dim, 2 * code)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.both(x).chunk(2, dim=-1)
        return mean + torch.exp(0.5 * spread) * torch.randn_like(mean), mean, spread


class Residual(nn.Module):
    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(F.gelu(self.up(self.norm(x)))))


class Prior(nn.Module):
    def __init__(self, dim: int, depth: int, code: int, dropout: float) -> None:
        super().__init__()
        self.into, self.unfold = nn.Linear(STATE, dim), nn.Linear(code, dim)
        self.encoder = nn.ModuleList(Residual(dim, dropout) for _ in range(depth))
        self.code = Code(dim, code)
        self.decoder = nn.ModuleList(Residual(dim, dropout) for _ in range(depth))
        self.out = nn.Linear(dim, STATE)

    def encode(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.into(state)
        for block in self.encoder:
            x = block(x)
        return self.code(x)

    def decode(self, code: Tensor) -> Tensor:
        x = self.unfold(code)
        for block in self.decoder:
            x = block(x)
        return self.out(x)


class Stage(nn.Module):
    """Halves the resolution."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.shrink = nn.Conv2d(before, after, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(8, after)
        self.conv = nn.Conv2d(after, after, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.shrink(x)))
        return x + F.relu(self.conv(x))


class Block(nn.Module):
    """Pre-norm transformer block with dropout on attention and feed-forward."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.proj(y))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Link(nn.Module):
    """From an image to a distribution of codes, by way of heatmaps."""

    def __init__(self, width: int, stages: int, dim: int, depth: int, heads: int, code: int, dropout: float) -> None:
        super().__init__()
        widths = [3, *(min(width << stage, 8 * width) for stage in range(stages))]
        self.stages = nn.ModuleList(Stage(*widths[stage : stage + 2]) for stage in range(stages))
        self.heatmaps = nn.Conv2d(widths[-1], 2 * JOINTS, 1)
        self.tokens = nn.Linear(widths[-1], dim)
        self.names = nn.Parameter(0.02 * torch.randn(1, 1 + 2 * JOINTS, dim))
        self.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.code = Code(dim, code)

    def forward(self, images: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        x = images
        for stage in self.stages:
            x = stage(x)
        heat = self.heatmaps(x)
        gathered = torch.softmax(heat.flatten(2), dim=-1) @ x.flatten(2).transpose(1, 2)
        tokens = F.pad(self.tokens(gathered), (0, 0, 1, 0)) + self.names
        for block in self.blocks:
            tokens = block(tokens)
        return heat, self.code(self.norm(tokens[:, 0]))


class InterPrior(nn.Module):
    def __init__(self, prior: Prior, link: Link | None, image: int, poses: int) -> None:
        super().__init__()
        self.prior, self.link, self.image, self.poses = prior, link, image, poses
        if link is not None:
            prior.requires_grad_(False)

    def train(self, mode: bool = True) -> InterPrior:
        """A frozen prior drops nothing."""
        super().train(mode)
        if self.link is not None:
            self.prior.eval()
        return self

    def forward(self, state: Tensor, images: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Joints of both hands, mean and spread of their code, and the heatmaps where images are looked at."""
        if self.link is None:
            heat, (code, mean, spread) = None, self.prior.encode(state)
        else:
            heat, (code, mean, spread) = self.link(images)
        return pair(self.prior.decode(code)), mean, spread, heat


def build(
    *, prior_dim: int = 512, prior_depth: int = 4, code: int = 128, width: int = 64, stages: int = 5, dim: int = 768,
    depth: int = 12, heads: int = 12, dropout: float = 0.1, image: int = 256, poses: int = 128, phase: str = "prior",
) -> InterPrior:  # fmt: skip
    if phase not in PHASES:
        raise ValueError(f"no phase {phase}: there are {', '.join(PHASES)}")
    link = Link(width, stages, dim, depth, heads, code, dropout) if phase == "link" else None
    return InterPrior(Prior(prior_dim, prior_depth, code, dropout), link, image, poses)


def batch(model: InterPrior, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """Images show nothing; joints follow from states, and their places in the image from the first two coordinates. The
    prior, which sees no images, is given `poses` times as many states."""
    side = image or model.image
    count = micro_batch if model.link is not None else micro_batch * model.poses
    straight = torch.tensor([1.0, 0, 0, 0, 1, 0]).repeat(ROTATIONS)
    offset = torch.tensor([0.5, 0.5, 0.2])
    usual = torch.cat([straight, torch.zeros(SHAPE), straight, torch.zeros(SHAPE), offset])
    state = usual + 0.2 * torch.randn(count, STATE)
    joints = pair(state)
    return {
        "state": state,
        **({"images": torch.randn(micro_batch, 3, side, side)} if model.link is not None else {}),
        "joints": joints,
        "places": (0.5 + 0.2 * joints[..., :2]).clamp(0, 1),
    }


def loss(output: tuple[Tensor, Tensor, Tensor, Tensor | None], batch: dict[str, Tensor]) -> Tensor:
    """Mean square error of the joints, divergence of the codes and, with images, mean square error of the heatmaps."""
    joints, mean, spread, heat = output
    mean, spread = mean.float(), spread.float()
    divergence = 0.5 * (mean.square() + spread.exp() - 1 - spread).sum(-1).mean()
    total = F.mse_loss(joints.float(), batch["joints"]) + 1e-3 * divergence
    if heat is None:
        return total
    return total + F.mse_loss(heat.float(), adjacency_heatmaps(batch["places"], heat.shape[-1]))
