"""RealPDEBench (Hu et al., 2026, "RealPDEBench: A Benchmark for Complex Physical Systems with Real-World Data").

The benchmark trains ten baselines to forecast windows of flow fields, simulated or measured: `frames` past frames to
as many future ones. Three baselines are kept, chosen by `model`:

    fno       Fourier Neural Operator over time and space: 3-D transforms, learned complex multipliers on the lowest modes
    unet      U-Net, with the frames as channels (the benchmark's convolves over time as well)
    deeponet  DeepONet: a convolutional branch reads the past, a trunk reads coordinates, their product is the answer

Kept too: what is not measured (pressure, in an experiment) is zero in the input and counts nothing in the loss. With
`phase` simulated, all channels are there and, as the benchmark trains, half of the samples lose the unmeasured one from
their input; with measured, all do, and the target has none either. The first is pretraining, the second finetuning.

Left out: the other seven baselines, the nine metrics, files of paired trajectories (the batch draws both fields).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from foretell.zoo.science import fno
from foretell.zoo.vision import unet

PHASES = ("simulated", "measured")
MODELS = ("fno", "unet", "deeponet")


class SpectralConv3d(nn.Module):
    """Learned complex multipliers on the lowest frequencies of time, height and width.

    The real transform leaves four corners of low frequencies, positive and negative in time and in height. Weights
    are real, with (real, imaginary) as the last axis, as in `fno`.
    """

    def __init__(self, channels: int, modes_time: int, modes: int) -> None:
        super().__init__()
        self.modes_time, self.modes = modes_time, modes
        self.weights = nn.Parameter(torch.empty(4, channels, channels, modes_time, modes, modes, 2))
        nn.init.uniform_(self.weights, 0.0, 1 / (channels * channels))

    def forward(self, x: Tensor) -> Tensor:
        b, channels, frames, height, width = x.shape
        t, m = self.modes_time, self.modes
        spectrum = torch.fft.rfftn(x.float(), dim=(2, 3, 4))
        result = spectrum.new_zeros(b, channels, frames, height, width // 2 + 1)
        corners = ((slice(0, t), slice(0, m)), (slice(0, t), slice(-m, None)),
                   (slice(-t, None), slice(0, m)), (slice(-t, None), slice(-m, None)))  # fmt: skip
        for weight, (in_time, in_height) in zip(self.weights.unbind(0), corners, strict=True):
            low = spectrum[:, :, in_time, in_height, :m]
            matrix = torch.view_as_complex(weight.float().contiguous())
            result[:, :, in_time, in_height, :m] = torch.einsum("bitxy,iotxy->botxy", low, matrix)
        return torch.fft.irfftn(result, s=(frames, height, width), dim=(2, 3, 4))


class Block3d(nn.Module):
    def __init__(self, width: int, modes_time: int, modes: int, activate: bool) -> None:
        super().__init__()
        self.spectral = SpectralConv3d(width, modes_time, modes)
        self.skip = nn.Conv3d(width, width, 1)
        self.act = nn.GELU() if activate else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.spectral(x).to(x.dtype) + self.skip(x))


class Fourier3d(nn.Module):
    """(batch, channels, frames, height, width) to the same."""

    def __init__(self, channels: int, width: int, depth: int, modes_time: int, modes: int) -> None:
        super().__init__()
        self.lift = nn.Conv3d(channels + 3, width, 1)
        self.blocks = nn.ModuleList(Block3d(width, modes_time, modes, index < depth - 1) for index in range(depth))
        self.project = nn.Sequential(nn.Conv3d(width, width, 1), nn.GELU(), nn.Conv3d(width, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        axes = [torch.linspace(0, 1, size, device=x.device, dtype=x.dtype) for size in x.shape[2:]]
        grid = torch.stack(torch.meshgrid(*axes, indexing="ij")).expand(x.shape[0], -1, -1, -1, -1)
        x = self.lift(torch.cat([x, grid], dim=1))
        for block in self.blocks:
            x = block(x)
        return self.project(x)


class FramesUNet(nn.Module):
    """The U-Net of `unet`, with all frames of all channels side by side."""

    def __init__(self, channels: int, frames: int, width: int, depth: int) -> None:
        super().__init__()
        self.net = unet.UNet(width, depth, channels * frames, channels * frames)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.flatten(1, 2)).view_as(x)


class Halve(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.conv(x))


class DeepONet(nn.Module):
    """The branch gives `terms` coefficients for each channel, the trunk as many functions of time and place."""

    def __init__(self, channels: int, frames: int, width: int, depth: int, terms: int) -> None:
        super().__init__()
        self.channels, self.terms = channels, terms
        widths = [channels * frames, *(width << min(index, 3) for index in range(depth))]
        self.branch = nn.ModuleList(Halve(before, after) for before, after in pairwise(widths))
        self.coefficients = nn.Linear(widths[-1], channels * terms)
        self.trunk = nn.Sequential(nn.Linear(3, terms), nn.GELU(), nn.Linear(terms, terms), nn.GELU(), nn.Linear(terms, terms))
        self.bias = nn.Parameter(torch.zeros(channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        past = x.flatten(1, 2)
        for layer in self.branch:
            past = layer(past)
        coefficients = self.coefficients(past.mean(dim=(2, 3))).view(-1, self.channels, self.terms)
        axes = [torch.linspace(0, 1, size, device=x.device, dtype=x.dtype) for size in x.shape[2:]]
        functions = self.trunk(torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).view(-1, 3))
        return (coefficients @ functions.t() + self.bias).view_as(x)


class Forecast(nn.Module):
    """A baseline behind the mask of what is measured."""

    def __init__(self, net: nn.Module, channels: int, frames: int, image: int, phase: str) -> None:
        super().__init__()
        self.channels, self.frames, self.image, self.phase = channels, frames, image, phase
        self.net = net

    def forward(self, field: Tensor, seen: Tensor) -> Tensor:
        return self.net(field * seen[:, :, None, None, None])


def build(
    *, model: str = "fno", phase: str = "simulated", channels: int = 3, frames: int = 20, image: int = 128,
    width: int = 128, depth: int = 4, modes: int = 16, modes_time: int = 4, terms: int = 128,
) -> nn.Module:  # fmt: skip
    if model not in MODELS or phase not in PHASES:
        raise ValueError(f"model is one of {MODELS}, not {model!r}, and phase one of {PHASES}, not {phase!r}")
    if model == "fno" and (2 * modes > image or 2 * modes_time > frames):
        raise ValueError(f"{modes_time} and {modes} modes need twice as many frames and pixels, not {frames} and {image}")
    net = {
        "fno": lambda: Fourier3d(channels, width, depth, modes_time, modes),
        "unet": lambda: FramesUNet(channels, frames, width, depth),
        "deeponet": lambda: DeepONet(channels, frames, width, depth, terms),
    }[model]()
    return Forecast(net, channels, frames, image, phase)


def batch(model: nn.Module, micro_batch: int, seq: int | None, image: int | None) -> dict[str, Tensor]:
    """`seen` says which channels the input shows, `known` which the target has; the last is the one not measured."""
    side = model.image if image is None else image
    shape = (micro_batch, model.channels, model.frames, side, side)
    last = torch.arange(model.channels) == model.channels - 1
    hidden = torch.ones(micro_batch, dtype=torch.bool) if model.phase == "measured" else torch.arange(micro_batch) % 2 == 0
    return {
        "field": torch.randn(shape),
        "targets": torch.randn(shape),
        "seen": (~(hidden[:, None] & last)).float(),
        "known": (~last if model.phase == "measured" else torch.ones_like(last)).float(),
    }


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The relative error of what is known."""
    known = batch["known"][:, None, None, None]
    return fno.loss(output * known, {"targets": batch["targets"] * known})
