"""Lamarr (Barbetti for LHCb 2023, "Lamarr: LHCb ultra-fast simulation based on machine learning models deployed within
Gauss"; Anderlini, Barbetti and others for LHCb 2023, "The LHCb ultra-fast simulation option, Lamarr: design and validation").

Kept: a chain of parametrisations turns generated particles into what the detector would have reconstructed: boosted trees say
whether a particle is in acceptance and as what kind of track it is found, then conditional generators draw the
resolution of the track, its covariance, the likelihoods of the RICH and muon systems (boosted trees flag muons between)
and the combined identification, each given what came before. Each generator has a discriminator and is trained alone, on
reference conditions, so that one may be swapped for another: phase `discriminator` trains all discriminators, phase
`generator` all generators. Phase `simulate`, for inference only, runs the chain.

Trees are tensors, evaluated for all particles at once by one gather a level; boosting does not train by gradient, so
they are buffers, with random splits here. Events are ragged: they are padded to `seq` particles, with a mask. A particle
that is not accepted or not found keeps its place with weight zero, since how many are lost is data. Left out: calorimeters,
quantile transforms of inputs and outputs, the plain C library that the trained chain is compiled to. Widths are assumed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PHASES = ("discriminator", "generator")
SAMPLERS = ("simulate",)
KINEMATICS = 6
"""x, y, z, two slopes, momentum."""
KINDS = 4
"""Muon, pion, kaon, proton: one for each set of reference samples."""
TRACKS = 4
"""Not found, long, upstream, downstream."""
STAGES = (("resolution", 9), ("covariance", 15), ("rich", 4), ("muon", 2), ("combined", 5))
"""Generators in order, and how many numbers each draws."""
BASE = KINEMATICS + KINDS + TRACKS
CONDITIONS = {
    "resolution": BASE, "covariance": BASE + 9, "rich": BASE + 9, "muon": BASE + 9, "combined": BASE + 9 + 4 + 2 + 1,
}  # fmt: skip
"""How many numbers each generator is given."""


class Forest(nn.Module):
    """Boosted trees, all of the same depth: the sum of one leaf of each tree (..., outputs)."""

    def __init__(self, features: int, outputs: int, trees: int, depth: int) -> None:
        super().__init__()
        self.depth = depth
        inner = (1 << depth) - 1
        self.register_buffer("feature", torch.randint(features, (trees, inner)))
        self.register_buffer("threshold", torch.randn(trees, inner))
        self.register_buffer("leaf", torch.randn(trees, 1 << depth, outputs) / trees**0.5)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        tree = torch.arange(self.feature.shape[0], device=x.device)
        node = torch.zeros(len(rows), len(tree), dtype=torch.long, device=x.device)
        for _ in range(self.depth):
            value = rows.gather(1, self.feature[tree, node])
            node = 2 * node + 1 + (value > self.threshold[tree, node]).long()
        leaves = self.leaf[tree, node - self.feature.shape[1]]
        return leaves.sum(1).unflatten(0, x.shape[:-1])


class Layer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.leaky_relu(self.linear(self.norm(x)), 0.1)


class Stack(nn.Module):
    """A generator (condition and noise → numbers) or a discriminator (condition and numbers → score)."""

    def __init__(self, before: int, after: int, width: int, depth: int) -> None:
        super().__init__()
        self.into = nn.Linear(before, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.out = nn.Linear(width, after)

    def forward(self, condition: Tensor, other: Tensor) -> Tensor:
        x = self.into(torch.cat([condition, other], dim=-1))
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class Lamarr(nn.Module):
    def __init__(self, width: int, depth: int, noise: int, trees: int, tree_depth: int, particles: int, phase: str) -> None:
        super().__init__()
        if phase not in (*PHASES, *SAMPLERS):
            raise ValueError(f"no phase {phase}: there are {', '.join((*PHASES, *SAMPLERS))}")
        self.noise, self.particles, self.phase = noise, particles, phase
        self.acceptance = Forest(KINEMATICS + KINDS, 1, trees, tree_depth)
        self.efficiency = Forest(KINEMATICS + KINDS, TRACKS, trees, tree_depth)
        self.is_muon = Forest(BASE + 9, 1, trees, tree_depth)
        self.generators = nn.ModuleList(Stack(CONDITIONS[name] + noise, size, width, depth) for name, size in STAGES)
        self.discriminators = nn.ModuleList(Stack(CONDITIONS[name] + size, 1, width, depth) for name, size in STAGES)
        self.generators.requires_grad_(phase == "generator")
        self.discriminators.requires_grad_(phase == "discriminator")

    def draw(self, stage: int, condition: Tensor) -> Tensor:
        return self.generators[stage](condition, torch.randn(*condition.shape[:-1], self.noise, device=condition.device))

    def conditions(self, base: Tensor, found: dict[str, Tensor], stage: str) -> Tensor:
        """What a generator is given: particle and track, then what the stages before it said."""
        if stage == "resolution":
            return base
        track = torch.cat([base, found["resolution"]], dim=-1)
        if stage != "combined":
            return track
        return torch.cat([track, found["rich"], found["muon"], found["is_muon"]], dim=-1)

    def forward(
        self, kinematics: Tensor, kind: Tensor, track: Tensor, mask: Tensor, resolution: Tensor, covariance: Tensor, rich: Tensor,
        muon: Tensor, is_muon: Tensor, combined: Tensor,
    ) -> dict[str, Tensor] | tuple[Tensor, Tensor | None]:  # fmt: skip
        """Scores (stages, events, particles) of drawn and, where they matter, of reference numbers; or what was simulated."""
        particle = torch.cat([kinematics, F.one_hot(kind, KINDS).to(kinematics.dtype)], dim=-1)
        if self.phase == "simulate":
            return self.simulate(particle, mask)
        base = torch.cat([particle, F.one_hot(track, TRACKS).to(kinematics.dtype)], dim=-1)
        known = {
            "resolution": resolution, "covariance": covariance, "rich": rich, "muon": muon, "is_muon": is_muon, "combined": combined,
        }  # fmt: skip
        drawn, real = [], []
        for number, (name, _) in enumerate(STAGES):
            condition = self.conditions(base, known, name)
            numbers = self.draw(number, condition)
            drawn.append(self.discriminators[number](condition, numbers)[..., 0])
            if self.phase == "discriminator":
                real.append(self.discriminators[number](condition, known[name])[..., 0])
        return torch.stack(drawn), torch.stack(real) if real else None

    def simulate(self, particle: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """The whole chain, every stage on what the stages before it drew."""
        accepted = torch.rand(mask.shape, device=mask.device) < torch.sigmoid(self.acceptance(particle)[..., 0])
        logits = self.efficiency(particle)
        chance = torch.rand_like(logits).clamp_min(1e-9)
        track = (logits - torch.log(-torch.log(chance))).argmax(-1)
        base = torch.cat([particle, F.one_hot(track, TRACKS).to(particle.dtype)], dim=-1)
        found: dict[str, Tensor] = {"weight": (accepted & (track > 0) & mask).to(particle.dtype)}
        for number, (name, _) in enumerate(STAGES):
            if name == "combined":
                seen = torch.cat([base, found["resolution"]], dim=-1)
                found["is_muon"] = (torch.rand_like(seen[..., :1]) < torch.sigmoid(self.is_muon(seen))).to(particle.dtype)
            found[name] = self.draw(number, self.conditions(base, found, name))
        return found


def build(
    *, width: int = 128, depth: int = 5, noise: int = 64, trees: int = 300, tree_depth: int = 6, particles: int = 256,
    phase: str = "discriminator",
) -> Lamarr:  # fmt: skip
    return Lamarr(width, depth, noise, trees, tree_depth, particles, phase)


def batch(model: Lamarr, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """Events of several sizes; reference numbers are drawn from a normal distribution."""
    shape = (micro_batch, seq or model.particles)
    counts = torch.linspace(1.0, 0.5, micro_batch)[:, None] * shape[1]
    return {
        "kinematics": torch.randn(*shape, KINEMATICS),
        "kind": torch.randint(KINDS, shape),
        "track": torch.randint(1, TRACKS, shape),
        "mask": torch.arange(shape[1]) < counts,
        "is_muon": torch.randint(2, (*shape, 1)).float(),
        **{name: torch.randn(*shape, size) for name, size in STAGES},
    }


def loss(output: tuple[Tensor, Tensor | None], batch: dict[str, Tensor]) -> Tensor:
    """Of discriminators where reference numbers were scored too, of generators otherwise."""
    drawn, real = output
    each = F.softplus(-drawn) if real is None else F.softplus(drawn) + F.softplus(-real)
    return (each * batch["mask"]).sum() / batch["mask"].sum()
