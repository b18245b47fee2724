"""RECOMBINER (He, Flamich, Guo, Hernández-Lobato 2024, "RECOMBINER: Robust and Enhanced Compression with Bayesian Implicit
Neural Representations"): a signal is cut into patches, and each patch is a tiny Bayesian network of its own.

Kept: the weights of a patch's network (sine activations, coordinates in, colour out) are a linear reparameterisation
w = A h of latent Gaussians, layer by layer, with A shared by all; so are positional encodings, upsampled from latents by a
shared convolution.  Latents of a patch are the sum of three levels, of the signal, of a group of patches and of the patch,
each with a learned Gaussian prior: the hierarchy.  The loss is a mean square error plus beta times the divergence of all
posteriors from their priors.  Posteriors of every signal are parameters, picked by the signal's number.  All networks of a
step are evaluated together: `how` is "vmap" (torch.func), "bmm" (the same as batched products) or "loop" (one by one, for
comparison).  `phase` "learn" trains all; "encode" trains posteriors alone, with A, convolution and priors frozen.

Left out: relative entropy coding of the latents, which needs no gradient, and the dropping of beta over time.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PHASES = ("learn", "encode")
HOWS = ("vmap", "bmm", "loop")
FREQUENCY = 30.0
"""Of the sines of the first layer."""
START = -4.0
"""Log of the posteriors' deviations at first."""
BETA = 1e-4


class Level(nn.Module):
    """Posteriors of `count` latents of a signal, and their prior."""

    def __init__(self, signals: int, count: int, size: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.empty(signals, count, size))
        self.log_std = nn.Parameter(torch.empty(signals, count, size))
        self.prior_mean = nn.Parameter(torch.empty(size))
        self.prior_log_std = nn.Parameter(torch.empty(size))

    def forward(self, signals: Tensor) -> tuple[Tensor, Tensor]:
        """A sample (signals, count, size) and its divergence from the prior."""
        mean, log_std = self.mean[signals], self.log_std[signals]
        sample = mean + log_std.exp() * torch.randn_like(mean)
        off = (mean - self.prior_mean).square() + (2 * log_std).exp()
        return sample, (0.5 * (off * (-2 * self.prior_log_std).exp() - 1) + self.prior_log_std - log_std).sum()


class Layer(nn.Module):
    """The shared matrix that makes weights and biases of one layer from its latents."""

    def __init__(self, inner: int, outer: int, latents: int) -> None:
        super().__init__()
        self.inner, self.outer, self.latents = inner, outer, latents
        self.reparameterise = nn.Linear(latents, (inner + 1) * outer)

    def forward(self, latents: Tensor) -> Tensor:
        """(networks, latents) → (networks, inner + 1, outer); the last row is the bias."""
        return self.reparameterise(latents).unflatten(-1, (self.inner + 1, self.outer))


def network(weights: list[Tensor], places: Tensor) -> Tensor:
    """One tiny network at all places of its patch: (inner + 1, outer) each, and (places, inner) → (places, colours)."""
    x = places
    for depth, weight in enumerate(weights):
        x = x @ weight[:-1] + weight[-1]
        if depth + 1 < len(weights):
            x = torch.sin(FREQUENCY * x if depth == 0 else x)
    return x


def networks(weights: list[Tensor], places: Tensor) -> Tensor:
    """All of them as batched products: one more dimension in front of everything."""
    x = places
    for depth, weight in enumerate(weights):
        x = torch.baddbmm(weight[:, -1:], x, weight[:, :-1])
        if depth + 1 < len(weights):
            x = torch.sin(FREQUENCY * x if depth == 0 else x)
    return x


class Recombiner(nn.Module):
    grid: Tensor

    def __init__(
        self, signals: int, image: int, patch: int, group: int, depth: int, hidden: int, latents: int, encoding: int, how: str
    ) -> None:
        super().__init__()
        self.signals, self.image, self.patch, self.how = signals, image, patch, how
        self.side, self.group, self.coarse = image // patch, group, max(1, patch // 8)
        sizes = [2 + encoding, *[hidden] * depth, 3]
        self.layers = nn.ModuleList(Layer(a, b, latents) for a, b in pairwise(sizes))
        self.per_patch, self.encoding = latents * len(self.layers), encoding
        whole = self.per_patch + encoding * self.coarse**2
        counts = (1, (self.side // group) ** 2, self.side**2)
        self.levels = nn.ModuleList(Level(signals, count, whole) for count in counts)
        self.upsample = nn.Sequential(
            nn.Upsample(size=(patch, patch), mode="bilinear"), nn.Conv2d(encoding, 4 * encoding, 3, padding=1), nn.SiLU(),
            nn.Conv2d(4 * encoding, encoding, 3, padding=1),
        )  # fmt: skip
        line = (torch.arange(patch, dtype=torch.float32) + 0.5) * (2 / patch) - 1
        self.register_buffer("grid", torch.cartesian_prod(line, line), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for level in self.levels:
            nn.init.normal_(level.mean, std=0.1)
            nn.init.constant_(level.log_std, START)
            nn.init.normal_(level.prior_mean, std=0.1)
            nn.init.constant_(level.prior_log_std, START / 2)
        for depth, layer in enumerate(self.layers):
            reach = 1 / layer.inner if depth == 0 else (6 / layer.inner) ** 0.5
            nn.init.uniform_(layer.reparameterise.bias, -reach, reach)
            nn.init.normal_(layer.reparameterise.weight, std=0.1 * reach)

    def latents(self, signals: Tensor) -> tuple[Tensor, Tensor]:
        """(signals × patches, latents), the sum of the levels, and the divergence of all."""
        patches = torch.arange(self.side**2, device=signals.device)
        row, column = patches // self.side // self.group, patches % self.side // self.group
        places = (torch.zeros_like(patches), row * (self.side // self.group) + column, patches)
        found = [level(signals) for level in self.levels]
        whole = sum(sample[:, place] for (sample, _), place in zip(found, places, strict=True))
        assert isinstance(whole, Tensor)
        return whole.flatten(0, 1), torch.stack([divergence for _, divergence in found]).sum()

    def evaluate(self, weights: list[Tensor], places: Tensor) -> Tensor:
        if self.how == "bmm":
            return networks(weights, places)
        if self.how == "vmap":
            return torch.func.vmap(network)(weights, places)  # type: ignore[no-any-return]
        return torch.stack([network([w[n] for w in weights], places[n]) for n in range(places.shape[0])])

    def forward(self, signals: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of signals → images (signals, 3, side, side) and the divergence from the priors."""
        latents, divergence = self.latents(signals)
        own, maps = latents.split((self.per_patch, latents.shape[-1] - self.per_patch), dim=-1)
        weights = [layer(h) for layer, h in zip(self.layers, own.chunk(len(self.layers), dim=-1), strict=True)]
        encodings = self.upsample(maps.unflatten(-1, (self.encoding, self.coarse, self.coarse)))
        places = torch.cat((self.grid.expand(latents.shape[0], -1, -1), encodings.flatten(2).transpose(1, 2)), dim=-1)
        colours = self.evaluate(weights, places).view(-1, self.side, self.side, self.patch, self.patch, 3)
        return colours.permute(0, 5, 1, 3, 2, 4).reshape(-1, 3, self.image, self.image), divergence


def build(
    *, signals: int = 16, image: int = 512, patch: int = 64, group: int = 4, depth: int = 3, hidden: int = 32,
    latents: int = 64, encoding: int = 16, how: str = "vmap", phase: str = "learn",
) -> Recombiner:  # fmt: skip
    if image % (patch * group):
        raise ValueError(f"an image of side {image} has no whole groups of {group} patches of side {patch}")
    if phase not in PHASES or how not in HOWS:
        raise ValueError(f"phase is one of {', '.join(PHASES)}, how one of {', '.join(HOWS)}")
    model = Recombiner(signals, image, patch, group, depth, hidden, latents, encoding, how)
    if phase == "encode":
        for path, parameter in model.named_parameters():
            parameter.requires_grad_(path.endswith((".mean", ".log_std")) and path.startswith("levels"))
    return model


def batch(model: Recombiner, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """Random images, and the numbers of the signals whose posteriors they train."""
    return {"signals": torch.arange(micro_batch) % model.signals, "images": torch.rand(micro_batch, 3, model.image, model.image)}


def loss(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Mean square error of the images and beta times the divergence from the priors, per number."""
    images, divergence = output
    return F.mse_loss(images.float(), batch["images"]) + BETA * divergence.float() / batch["images"].numel()
