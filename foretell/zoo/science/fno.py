"""Fourier Neural Operator in two dimensions (Li et al., 2020, "Fourier Neural Operator for Parametric PDEs").

Kept: a pointwise lifting, blocks that add a spectral convolution to a 1x1 convolution, and a pointwise projection.
The spectral convolution multiplies the lowest `modes` frequencies of each axis by learned complex matrices: with the
real transform these are the two corner blocks of positive and negative row frequencies. Its transforms always run in
fp32. Left out: the coordinates as further channels (they may be among `in_channels`), and roll-outs in time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SpectralConv2d(nn.Module):
    """Learned complex multipliers on the lowest frequencies.

    Each weight is stored as a real tensor whose last axis is (real, imaginary): fused optimizers and casts of the
    whole model would reject or truncate a complex parameter.
    """

    def __init__(self, in_channels: int, out_channels: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.out_channels = out_channels
        self.positive = nn.Parameter(torch.empty(in_channels, out_channels, modes, modes, 2))
        self.negative = nn.Parameter(torch.empty(in_channels, out_channels, modes, modes, 2))
        for weight in (self.positive, self.negative):
            nn.init.uniform_(weight, 0.0, 1 / (in_channels * out_channels))

    @staticmethod
    def multiply(spectrum: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum("bixy,ioxy->boxy", spectrum, torch.view_as_complex(weight.float()))

    def forward(self, x: Tensor) -> Tensor:
        b, _, height, width = x.shape
        m = self.modes
        spectrum = torch.fft.rfft2(x.float())
        low = self.multiply(spectrum[:, :, :m, :m], self.positive)
        high = self.multiply(spectrum[:, :, -m:, :m], self.negative)
        between = low.new_zeros(b, self.out_channels, height - 2 * m, m)
        columns = torch.cat([low, between, high], dim=2)
        rest = low.new_zeros(b, self.out_channels, height, width // 2 + 1 - m)
        return torch.fft.irfft2(torch.cat([columns, rest], dim=3), s=(height, width))


class Block(nn.Module):
    def __init__(self, width: int, modes: int, activate: bool) -> None:
        super().__init__()
        self.spectral = SpectralConv2d(width, width, modes)
        self.skip = nn.Conv2d(width, width, 1)
        self.act = nn.GELU() if activate else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.spectral(x).to(x.dtype) + self.skip(x))


class FourierNeuralOperator(nn.Module):
    def __init__(self, modes: int, width: int, depth: int, in_channels: int, out_channels: int, image: int) -> None:
        super().__init__()
        if 2 * modes > image:
            raise ValueError(f"{modes} modes need an image side of at least {2 * modes}, not {image}")
        self.image = image
        self.modes = modes
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.lift = nn.Sequential(nn.Conv2d(in_channels, 2 * width, 1), nn.GELU(), nn.Conv2d(2 * width, width, 1))
        self.blocks = nn.ModuleList(Block(width, modes, activate=index < depth - 1) for index in range(depth))
        self.project = nn.Sequential(nn.Conv2d(width, 2 * width, 1), nn.GELU(), nn.Conv2d(2 * width, out_channels, 1))

    def forward(self, field: Tensor) -> Tensor:
        x = self.lift(field)
        for block in self.blocks:
            x = block(x)
        return self.project(x)


def build(
    *, modes: int = 16, width: int = 64, depth: int = 4, in_channels: int = 3, out_channels: int = 1, image: int = 128
) -> nn.Module:
    return FourierNeuralOperator(modes, width, depth, in_channels, out_channels, image)


def batch(model: nn.Module, micro_batch: int, seq: int | None, image: int | None) -> dict[str, Tensor]:
    """Random fields, and others of the same side to map them to."""
    side = model.image if image is None else image
    if 2 * model.modes > side:
        raise ValueError(f"{model.modes} modes need an image side of at least {2 * model.modes}, not {side}")
    return {
        "field": torch.randn(micro_batch, model.in_channels, side, side),
        "targets": torch.randn(micro_batch, model.out_channels, side, side),
    }


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean over samples of the error's norm, relative to the target's."""
    targets = batch["targets"].float().flatten(1)
    error = torch.linalg.vector_norm(output.float().flatten(1) - targets, dim=1)
    return (error / torch.linalg.vector_norm(targets, dim=1)).mean()
