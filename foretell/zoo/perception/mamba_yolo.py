"""Mamba YOLO (Wang, Li, Xu, Zhu 2024, "Mamba YOLO: A Simple Baseline for Object Detection with State Space Model").

Kept: a stem to a quarter of the image, stages of ODSS blocks (LSBlock, a local convolutional bottleneck; SS2D, the 2-D
selective scan; RGBlock, a gated MLP with a depthwise convolution) that merges of 2x2 pixels halve, pooling of several
windows, a neck that goes up and down the pyramid with the same blocks, and an anchor-free head on strides 8, 16 and 32 that
says classes and a distribution over the distance to each side.  SS2D reads the map along rows and columns, forwards and
backwards, each way with projections of its own, and adds the four up.

The recurrence h[t] = a[t] h[t-1] + b[t] runs in plain PyTorch, chunk by chunk: all chunks step by step side by side, then
what each hands on to the next; chunk + time / chunk steps in a row, 2 sqrt(time) at best.  With a chunk as long as the
sequence it is the plain sequential scan.  The paper's fused CUDA kernel keeps no states, this one keeps coefficients and
states for backward: it needs more memory.  Boxes, loss and non-maximum suppression, outside of the network, are in `boxes`.
Left out: augmentation, and the aspect term of the paper's overlap loss.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.zoo.perception.boxes import BINS, Output, detection_loss, places

STRIDES = (8, 16, 32)


class ChunkedScan(torch.autograd.Function):
    """States h of h[t] = a[t] h[t-1] + b[t] with h[-1] = 0, where time is dimension 1; its gradient is the same, backwards."""

    @staticmethod
    def scan(a: Tensor, b: Tensor, chunk: int) -> Tensor:
        time = a.shape[1]
        rest = -time % chunk
        if rest:
            a, b = (F.pad(x, (0, 0) * (x.dim() - 2) + (0, rest)) for x in (a, b))
        a, h = a.unflatten(1, (-1, chunk)), b.unflatten(1, (-1, chunk)).clone()
        factors, states = a.unbind(2), h.unbind(2)
        for step in range(1, chunk):
            states[step].addcmul_(factors[step], states[step - 1])
        reach, chunks, last = a.cumprod(dim=2).unbind(1), h.unbind(1), h[:, :, -1:].unbind(1)
        for number in range(1, len(chunks)):
            chunks[number].addcmul_(reach[number], last[number - 1])
        return h.flatten(1, 2)[:, :time]

    @staticmethod
    def forward(a: Tensor, b: Tensor, chunk: int) -> Tensor:
        return ChunkedScan.scan(a, b, chunk)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.chunk = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        a, h = ctx.saved_tensors
        grad_b = ChunkedScan.scan(a.flip(1).roll(1, dims=1), grad.flip(1), ctx.chunk).flip(1)
        grad_a = torch.zeros_like(a)
        torch.mul(grad_b[:, 1:], h[:, :-1], out=grad_a[:, 1:])
        return grad_a, grad_b, None


def conv(inner: int, outer: int, size: int = 1, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inner, outer, size, stride, size // 2, bias=False), nn.BatchNorm2d(outer), nn.SiLU())


class ChannelNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class SS2D(nn.Module):
    def __init__(self, dim: int, state: int, chunk: int) -> None:
        super().__init__()
        self.inner, self.state, self.chunk, self.rank = 2 * dim, state, chunk, math.ceil(dim / 16)
        self.enter = nn.Conv2d(dim, self.inner, 1)
        self.mix = nn.Conv2d(self.inner, self.inner, 3, padding=1, groups=self.inner)
        self.project = nn.Parameter(torch.empty(4, self.inner, self.rank + 2 * state))
        self.to_step = nn.Parameter(torch.empty(4, self.rank, self.inner))
        self.step_bias = nn.Parameter(torch.empty(4, 1, self.inner))
        self.a_log = nn.Parameter(torch.empty(4, 1, self.inner, state))
        self.skip = nn.Parameter(torch.ones(4, 1, self.inner))
        self.norm = nn.LayerNorm(self.inner)
        self.leave = nn.Conv2d(self.inner, dim, 1)
        nn.init.normal_(self.project, std=self.inner**-0.5)
        nn.init.normal_(self.to_step, std=self.rank**-0.5)
        nn.init.constant_(self.step_bias, math.log(math.expm1(0.01)))
        nn.init.normal_(self.a_log, std=0.5)

    def recur(self, x: Tensor) -> Tensor:
        """(batch, 4, time, inner), each of the four with coefficients of its own."""
        step, b, c = (x @ self.project).split((self.rank, self.state, self.state), dim=-1)
        step = F.softplus(step @ self.to_step + self.step_bias).float()
        decay = torch.exp(step.unsqueeze(-1) * -self.a_log.float().exp())
        drive = (step * x.float()).unsqueeze(-1) * b.float().unsqueeze(-2)
        chunk = self.chunk or math.isqrt(x.shape[2])
        states = ChunkedScan.apply(decay.flatten(0, 1), drive.flatten(0, 1), chunk).unflatten(0, x.shape[:2])
        return ((states @ c.float().unsqueeze(-1)).squeeze(-1) + self.skip.float() * x.float()).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.mix(self.enter(x)))
        rows, columns = x.flatten(2), x.transpose(2, 3).flatten(2)
        ways = torch.stack((rows, columns, rows.flip(2), columns.flip(2)), dim=1).transpose(2, 3)
        y = self.recur(ways)
        forth = y[:, :2] + y[:, 2:].flip(2)
        across = forth[:, 1].unflatten(1, (x.shape[3], x.shape[2])).transpose(1, 2)
        return self.leave(self.norm(forth[:, 0].unflatten(1, x.shape[2:]) + across).movedim(-1, 1))


class LSBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.Conv2d(dim, dim, 3, padding=1, groups=dim), nn.BatchNorm2d(dim))
        self.up, self.down = nn.Conv2d(dim, 2 * dim, 1), nn.Conv2d(2 * dim, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.mix(x))))


class RGBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(dim, 4 * dim, 1), nn.Conv2d(2 * dim, dim, 1)
        self.mix = nn.Conv2d(2 * dim, 2 * dim, 3, padding=1, groups=2 * dim)

    def forward(self, x: Tensor) -> Tensor:
        plain, gate = self.up(x).chunk(2, dim=1)
        return self.down(plain * F.gelu(gate + self.mix(gate)))


class Block(nn.Module):
    """ODSSBlock."""

    def __init__(self, inner: int, dim: int, state: int, chunk: int) -> None:
        super().__init__()
        self.enter = conv(inner, dim)
        self.local = LSBlock(dim)
        self.norm1, self.norm2 = ChannelNorm(dim), ChannelNorm(dim)
        self.scan = SS2D(dim, state, chunk)
        self.mlp = RGBlock(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        x = x + self.scan(self.norm1(self.local(x)))
        return x + self.mlp(self.norm2(x))


class Merge(nn.Module):
    """2x2 pixels become channels, without a norm or a stride."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.reduce = conv(4 * inner, outer)

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(F.pixel_unshuffle(x, 2))


class Pool(nn.Module):
    """A window of five, once, twice and three times."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.enter, self.leave = conv(dim, dim // 2), conv(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        found = [self.enter(x)]
        for _ in range(3):
            found.append(F.max_pool2d(found[-1], 5, 1, 2))
        return self.leave(torch.cat(found, dim=1))


class Head(nn.Module):
    """Classes and distances at one stride, by branches of their own."""

    def __init__(self, inner: int, dim: int, classes: int) -> None:
        super().__init__()
        self.classes, wide = nn.Sequential(conv(inner, dim, 3), conv(dim, dim, 3), nn.Conv2d(dim, classes, 1)), max(dim, BINS)
        self.sides = nn.Sequential(conv(inner, wide, 3), conv(wide, wide, 3), nn.Conv2d(wide, 4 * BINS, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.classes(x), self.sides(x)), dim=1).flatten(2).transpose(1, 2)


class MambaYOLO(nn.Module):
    image = 640

    def __init__(self, dim: int, depths: tuple[int, int, int, int], state: int, chunk: int, classes: int, objects: int) -> None:
        super().__init__()
        self.classes, self.objects, self.depths = classes, objects, depths
        dims = [dim << level for level in range(4)]
        self.stem = nn.Sequential(conv(3, dim // 2, 3, 2), conv(dim // 2, dim, 3, 2))
        self.blocks = nn.ModuleList(Block(d, d, state, chunk) for d, n in zip(dims, depths, strict=True) for _ in range(n))
        self.merges = nn.ModuleList(Merge(d, 2 * d) for d in dims[:3])
        self.pool = Pool(dims[3])
        _, p3, p4, p5 = dims
        self.up = nn.ModuleList((Block(p5 + p4, p4, state, chunk), Block(p4 + p3, p3, state, chunk)))
        self.halve = nn.ModuleList((conv(p3, p3, 3, 2), conv(p4, p4, 3, 2)))
        self.down = nn.ModuleList((Block(p3 + p4, p4, state, chunk), Block(p4 + p5, p5, state, chunk)))
        self.heads = nn.ModuleList(Head(d, p3, classes) for d in (p3, p4, p5))

    def pyramid(self, x: Tensor) -> list[Tensor]:
        x, found, number = self.stem(x), list[Tensor](), 0
        for level, depth in enumerate(self.depths):
            x = self.merges[level - 1](x) if level else x
            for _ in range(depth):
                x, number = self.blocks[number](x), number + 1
            found.append(x)
        return [found[1], found[2], self.pool(x)]

    def forward(self, images: Tensor) -> Output:
        p3, p4, p5 = self.pyramid(images)
        p4 = self.up[0](torch.cat((F.interpolate(p5, scale_factor=2.0), p4), dim=1))
        p3 = self.up[1](torch.cat((F.interpolate(p4, scale_factor=2.0), p3), dim=1))
        p4 = self.down[0](torch.cat((self.halve[0](p3), p4), dim=1))
        p5 = self.down[1](torch.cat((self.halve[1](p4), p5), dim=1))
        levels = p3, p4, p5
        out = torch.cat([head(x) for head, x in zip(self.heads, levels, strict=True)], dim=1)
        centres, strides = zip(*(places(x, stride) for x, stride in zip(levels, STRIDES, strict=True)), strict=True)
        sides = out[..., self.classes :].unflatten(-1, (4, BINS))
        return out[..., : self.classes], sides, torch.cat(centres), torch.cat(strides)


def build(
    *, dim: int = 32, n1: int = 1, n2: int = 1, n3: int = 3, n4: int = 1, state: int = 16, chunk: int = 0, classes: int = 80,
    objects: int = 64,
) -> MambaYOLO:  # fmt: skip
    """A chunk of 0 is the root of each sequence's length."""
    return MambaYOLO(dim, (n1, n2, n3, n4), state, chunk, classes, objects)


def batch(model: MambaYOLO, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """Random images with boxes and their classes; `there` says which of `objects` boxes count, half of them."""
    side = image or model.image
    if side % STRIDES[-1]:
        raise ValueError(f"image side {side} is not divisible by {STRIDES[-1]}")
    shape = (micro_batch, model.objects, 2)
    low = torch.rand(shape) * side / 2
    return {
        "images": torch.rand(micro_batch, 3, side, side),
        "boxes": torch.cat((low, low + side / 8 + torch.rand(shape) * side / 4), dim=-1),
        "classes": torch.randint(model.classes, shape[:2]),
        "there": torch.arange(model.objects).expand(shape[:2]) < (model.objects + 1) // 2,
    }


def loss(output: Output, batch: dict[str, Tensor]) -> Tensor:
    """Classes, overlap and distances of the assigned places, as `boxes` has them."""
    return detection_loss(output, batch)
