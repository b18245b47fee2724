"""Blocks as networks have them, with sizes drawn at random: what surrounds the products in real models.

Each is run forward and backward under bf16 autocast with fp32 weights (or all bf16), so that casts, layouts, masks,
broadcasts and copies appear as they do in training. None of them is a model of the zoo.
"""

# mypy: allow-subclassing-any, no-warn-unused-ignores

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.hardware.probe.cases.families import Call, Draw


def _run(d: Draw, module: nn.Module, *inputs: Tensor) -> Call:
    """Forward and backward; some all in bf16, most under autocast."""
    module = module.to(d.device)
    pure = d.device == "cuda" and d.rng.random() < 0.25
    if pure:
        module = module.to(torch.bfloat16)
        inputs = tuple(t.to(torch.bfloat16) if t.is_floating_point() else t for t in inputs)
    inputs = tuple(t.requires_grad_() if t.is_floating_point() else t for t in inputs)

    def run() -> None:
        with torch.autocast(d.device, torch.bfloat16, enabled=not pure and d.device == "cuda"):
            output = module(*inputs)
        output.float().square().mean().backward()

    return run


def _tokens(d: Draw, width: int, most: float = 3e7) -> tuple[int, int]:
    batch, length = d.size(1, 64, 1), d.one((64, 128, 197, 256, 512, 577, 1024, 2048, 4096))
    while batch > 1 and batch * length * width > most * d.scale:
        batch //= 2
    while d.scale < 1 and length > 64 and batch * length * width > most * d.scale:
        length //= 2
    return batch, length


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, causal: bool, rotary: bool, joint: bool) -> None:
        super().__init__()
        self.heads, self.groups, self.causal, self.rotary, self.joint = heads, groups, causal, rotary, joint
        size = width // heads
        self.into = nn.Linear(width, 3 * width) if joint else nn.ModuleList(
            nn.Linear(width, size * n, bias=False) for n in (heads, heads // groups, heads // groups)
        )  # fmt: skip
        self.out = nn.Linear(width, width, bias=joint)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        parts: Any = self.into(x).chunk(3, -1) if self.joint else [f(x) for f in self.into]  # type: ignore[union-attr]
        q, k, v = (part.view(b, t, -1, c // self.heads).transpose(1, 2) for part in parts)
        if self.rotary:
            q, k = _rotate(q), _rotate(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=k.shape[1] != q.shape[1])
        return self.out(y.transpose(1, 2).reshape(b, t, c))


def _rotate(x: Tensor) -> Tensor:
    angle = torch.outer(torch.arange(x.shape[-2], device=x.device).float(), torch.ones(x.shape[-1] // 2, device=x.device))
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., ::2].float(), x[..., 1::2].float()
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).type_as(x)


def transformer(d: Draw) -> Call:
    size = d.one((32, 64, 64, 128))
    heads = d.size(2, 32, 1)
    width = size * heads
    groups = d.one([g for g in (1, 1, 4) if heads % g == 0])
    modern = groups > 1 or d.rng.random() < 0.4

    class ProbedBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kind: Any = nn.RMSNorm if modern else nn.LayerNorm
            self.norm1, self.norm2 = kind(width), kind(width)
            self.attention = _Attention(width, heads, groups, d.rng.random() < 0.6, modern, not modern)
            inner = d.one((2, 4, 4)) * width
            self.up = nn.Linear(width, inner, bias=not modern)
            self.gate = nn.Linear(width, inner, bias=False) if modern else None
            self.down = nn.Linear(inner, width, bias=not modern)
            self.dropout = nn.Dropout(d.one((0.0, 0.0, 0.1)))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.dropout(self.attention(self.norm1(x)))
            y = self.norm2(x)
            y = F.silu(self.gate(y)) * self.up(y) if self.gate is not None else F.gelu(self.up(y))
            return x + self.dropout(self.down(y))

    batch, length = _tokens(d, width)
    return _run(d, ProbedBlock(), d.tensor(batch, length, width, grad=False))


def scores(d: Draw) -> Call:
    """Attention written out: products, a bias, a softmax."""
    heads, size = d.one((4, 8, 12, 16)), d.one((32, 64))
    width = heads * size
    batch, length = d.size(1, 32, 1), d.one((49, 64, 128, 256, 512))
    while batch > 1 and batch * heads * length * length > 5e7 * d.scale:
        batch //= 2

    class ProbedBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
            self.bias = nn.Embedding(32, heads)

        def forward(self, x: Tensor) -> Tensor:
            b, t, c = x.shape
            q, k, v = (f(x).view(b, t, heads, size).transpose(1, 2) for f in (self.q, self.k, self.v))
            near = (torch.arange(t, device=x.device)[:, None] - torch.arange(t, device=x.device)[None]).abs().clamp(max=31)
            s = q @ k.transpose(-2, -1) + self.bias(near).permute(2, 0, 1)[None]
            return (torch.softmax(s.float(), -1).type_as(v) @ v).transpose(1, 2).reshape(b, t, c)

    return _run(d, ProbedBlock(), d.tensor(batch, length, width, grad=False))


def _picture(d: Draw, most: float = 4e7) -> tuple[int, int, int]:
    side = d.one((7, 14, 28, 32, 56, 64))
    channels = max(16, int(d.one((1792, 3584, 7168)) / side) // 16 * 16)
    batch = d.size(1, 256, d.one((1, 8)))
    while batch > 1 and batch * channels * side * side > most * d.scale:
        batch //= 2
    while d.scale < 1 and channels > 16 and channels * side * side > most * d.scale:
        channels = max(16, channels // 32 * 16)
    return batch, channels, side


def residual(d: Draw) -> Call:
    batch, channels, side = _picture(d)
    norm: Any = d.one((nn.BatchNorm2d, nn.BatchNorm2d, lambda c: nn.GroupNorm(8, c)))
    inner = max(16, channels // d.one((1, 2, 4)) // 16 * 16)
    act: Any = d.one((nn.ReLU, nn.ReLU, nn.SiLU))
    squeeze = d.rng.random() < 0.3

    class ProbedBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(channels, inner, 1, bias=False), norm(inner), act(inplace=True),
                nn.Conv2d(inner, inner, d.one((3, 3, 5)), padding="same", bias=False, groups=d.one((1, 1, inner))),
                norm(inner), act(inplace=True), nn.Conv2d(inner, channels, 1, bias=False), norm(channels),
            )  # fmt: skip
            self.gate = nn.Sequential(
                nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, 16, 1), nn.ReLU(), nn.Conv2d(16, channels, 1), nn.Sigmoid()
            ) if squeeze else None  # fmt: skip

        def forward(self, x: Tensor) -> Tensor:
            y = self.body(x)
            if self.gate is not None:
                y = y * self.gate(y)
            return F.relu(x + y)

    return _run(d, ProbedBlock(), d.tensor(batch, channels, side, side, grad=False))


def depthwise(d: Draw) -> Call:
    batch, channels, side = _picture(d)

    class ProbedBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
            self.norm, self.up, self.down = nn.LayerNorm(channels), nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
            self.scale = nn.Parameter(torch.ones(channels))

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.conv(x).permute(0, 2, 3, 1))
            return x + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)

    return _run(d, ProbedBlock(), d.tensor(batch, channels, side, side, grad=False))


def upward(d: Draw) -> Call:
    batch, channels, side = _picture(d, 1e7)

    class ProbedBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.mid = nn.Conv2d(channels, channels, 3, 2, 1), nn.Conv2d(2 * channels, channels, 3, padding=1)
            self.norm = nn.GroupNorm(8, channels)
            self.up = nn.ConvTranspose2d(channels, channels, 2, 2) if d.rng.random() < 0.3 else None

        def forward(self, x: Tensor) -> Tensor:
            y = F.silu(self.norm(self.down(x)))
            y = self.up(y) if self.up is not None else F.interpolate(y, scale_factor=2.0)
            return self.mid(torch.cat((x, y[..., : x.shape[2], : x.shape[3]]), 1)) if y.shape[2] >= x.shape[2] else y

    return _run(d, ProbedBlock(), d.tensor(batch, channels, side, side, grad=False))


def conditioned(d: Draw) -> Call:
    width = d.size(128, 1536, 64)
    batch, length = d.size(1, 64, 1), d.one((64, 256, 256, 1024))
    while batch > 1 and batch * length * width > 2e7 * d.scale:
        batch //= 2

    class ProbedBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.adapt = nn.LayerNorm(width, elementwise_affine=False), nn.Linear(width, 3 * width)
            self.body = nn.Linear(width, width)

        def forward(self, x: Tensor, c: Tensor) -> Tensor:
            shift, scale, gate = self.adapt(F.silu(c)).chunk(3, -1)
            return x + gate[:, None] * self.body(self.norm(x) * (1 + scale[:, None]) + shift[:, None])

    return _run(d, ProbedBlock(), d.tensor(batch, length, width, grad=False), d.tensor(batch, width, grad=False))


def mixing(d: Draw) -> Call:
    """Linear maps along each axis of a picture or a sequence."""
    batch, length, width = d.size(1, 128, 1), d.one((49, 196, 256, 784)), d.size(32, 768, 32)
    while batch > 1 and batch * length * width > 3e7 * d.scale:
        batch //= 2

    class ProbedBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.across, self.along = nn.LayerNorm(width), nn.Linear(length, length), nn.Linear(width, 2 * width)

        def forward(self, x: Tensor) -> Tensor:
            y = F.gelu(self.across(self.norm(x).transpose(1, 2))).transpose(1, 2)
            a, b = self.along(x + y).chunk(2, -1)
            return a * torch.sigmoid(b)

    return _run(d, ProbedBlock(), d.tensor(batch, length, width, grad=False))


def scan(d: Draw) -> Call:
    """A recurrence over a sequence by doubling."""
    batch, length, width, state = d.size(1, 4, 1), d.one((64, 128, 256, 512)), d.size(64, 1536, 64), d.one((4, 8, 16))
    while length > 32 and batch * length * width * state > 1.5e7 * d.scale:
        length //= 2

    class ProbedBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rate = nn.Parameter(torch.rand(width, state))
            self.into = nn.Linear(width, width + 2 * state)
            self.conv = nn.Conv1d(width, width, 4, padding=3, groups=width)

        def forward(self, x: Tensor) -> Tensor:
            x = F.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
            step, b, c = self.into(x).split((width, state, state), -1)
            step = F.softplus(step.float())
            a, y = torch.exp(-step[..., None] * self.rate.exp()), step[..., None] * b[:, :, None] * x[..., None].float()
            jump = 1
            while jump < length:
                y = torch.cat((y[:, :jump], y[:, jump:] + a[:, jump:] * y[:, :-jump]), 1)
                a = torch.cat((a[:, :jump], a[:, jump:] * a[:, :-jump]), 1)
                jump *= 2
            return (y * c[:, :, None]).sum(-1)

    return _run(d, ProbedBlock(), d.tensor(batch, length, width, grad=False))


def routing(d: Draw) -> Call:
    """Tokens to a few of several experts, with room for a fixed number each."""
    tokens, width, experts, top = d.size(256, 16384, 64), d.size(128, 4096, 128), d.one((4, 8, 16)), d.one((1, 2))
    while tokens > 256 and tokens * width > 3e7 * d.scale:
        tokens //= 2
    room = int(1.25 * tokens * top / experts) // 8 * 8 + 8

    class ProbedBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(width, experts, bias=False)
            self.w = nn.Parameter(torch.randn(experts, width, width // 2) * 0.02)

        def forward(self, x: Tensor) -> Tensor:
            weight, chosen = self.gate(x).float().softmax(-1).topk(top, -1)
            hot = F.one_hot(chosen, experts).view(-1, experts)
            place = ((hot.cumsum(0) - 1) * hot).sum(-1)
            kept = place < room
            slot = torch.where(kept, chosen.view(-1) * room + place, experts * room)
            held = x.new_zeros(experts * room + 1, x.shape[-1]).index_copy(0, slot, x.repeat_interleave(top, 0))
            y = torch.bmm(held[:-1].view(experts, room, -1), self.w.to(x.dtype))
            y = torch.cat((y.reshape(experts * room, -1), y.new_zeros(1, y.shape[-1])))
            return (y[slot].view(-1, top, y.shape[-1]) * weight[..., None].to(y.dtype)).sum(1)

    return _run(d, ProbedBlock(), d.tensor(tokens, width, grad=False))


def messages(d: Draw) -> Call:
    """Sums over the neighbours of every node."""
    nodes, width = d.size(1000, 200000, 1), d.size(16, 512, 8)
    edges = d.size(2, 16, 1) * nodes
    while edges > 1000 and edges * width > 3e8 * d.scale:
        edges //= 2
    source, target = d.integers(nodes, edges), d.integers(nodes, edges)

    class ProbedBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.other = nn.Linear(width, width), nn.Linear(width, width, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            held = x.new_zeros(x.shape).index_add_(0, target, x.index_select(0, source))
            count = x.new_zeros(nodes).index_add_(0, target, x.new_ones(edges)).clamp(min=1)
            return F.relu(self.own(x) + self.other(held / count[:, None]))

    return _run(d, ProbedBlock(), d.tensor(nodes, width, grad=False))


def head(d: Draw) -> Call:
    """Words in, words out, and the loss."""
    words, width = d.one((8192, 32000, 50257, d.size(4096, 131072, 64))), d.size(128, 4096, 64)
    tokens = d.size(64, 16384, 64)
    while tokens > 64 and tokens * words > 4e8 * d.scale:
        tokens //= 2
    asked, wanted = d.integers(words, 2, tokens // 2), d.integers(words, tokens)

    class ProbedBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
            self.place = nn.Parameter(torch.randn(tokens // 2, width))

        def forward(self, anchor: Tensor) -> Tensor:
            x = self.out(self.table(asked) + self.place + anchor)
            return F.cross_entropy(x.view(-1, words).float() if d.seed % 2 else x.view(-1, words), wanted)

    return _run(d, ProbedBlock(), d.tensor(width, grad=False))


BLOCKS: dict[str, tuple[Any, int]] = {
    "transformer": (transformer, 60), "scores": (scores, 16), "residual": (residual, 40), "depthwise": (depthwise, 24),
    "upward": (upward, 16), "conditioned": (conditioned, 16), "mixing": (mixing, 20), "scan": (scan, 12),
    "routing": (routing, 14), "messages": (messages, 14), "head": (head, 24),
}  # fmt: skip
"""Block → (how to draw one, cases of a full probe)."""
