"""Particle-in-cell steps as in TRIMEG (Lu et al., 2019, "Development and testing of an unstructured mesh method for whole
plasma gyrokinetic simulations in realistic tokamak geometry"; TRIMEG-C1 on GPUs: Daneri et al., 2026).

Markers move through a torus whose poloidal plane is a mesh of triangles, repeated on `planes` toroidal planes. One step:

    field     the potential of the charge on the mesh, by sweeps over the mesh's edges
    gather    each marker finds its triangle and reads the potential at its six nodes (three on each neighbouring plane)
    push      it drifts across the field lines and is driven along them
    scatter   its charge is added to the six nodes, by weights that sum to one: charge is conserved

Kept: connectivity as index tensors (nothing downstream knows that the mesh is regular), gather and scatter by index with
many markers to a node, steps unrolled in time. Left out: the equilibrium, gyro-averaging, electromagnetic fields, C1
elements (linear ones here), Runge-Kutta stages, the sparse solver (Jacobi sweeps here). TRIMEG trains nothing; so that
there is a step to train, each time step has an antenna's potential on the mesh, fitted so that the density comes out as
asked. No claim about plasmas.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mesh(nn.Module):
    """A square of `cells` x `cells`, each cut into two triangles, on every toroidal plane.

    Nodes are numbered along rows; `corners` are a triangle's nodes, `slopes` the gradients of its three linear
    functions, `edges` all pairs of neighbours, both ways.
    """

    corners: Tensor
    slopes: Tensor
    edges: Tensor
    degree: Tensor

    def __init__(self, cells: int, planes: int) -> None:
        super().__init__()
        self.cells, self.planes, self.nodes = cells, planes, (cells + 1) ** 2
        grid = torch.arange(self.nodes).view(cells + 1, cells + 1)
        here, right, above, across = (corner.flatten() for corner in (grid[:-1, :-1], grid[:-1, 1:], grid[1:, :-1], grid[1:, 1:]))
        lower, upper = torch.stack([here, right, above], dim=1), torch.stack([across, above, right], dim=1)
        slopes = torch.tensor([[-1.0, -1.0], [1.0, 0.0], [0.0, 1.0]]) * cells
        pairs = ((grid[:, :-1], grid[:, 1:]), (grid[:-1], grid[1:]), (grid[:-1, 1:], grid[1:, :-1]))
        once = torch.cat([torch.stack([one.flatten(), other.flatten()]) for one, other in pairs], dim=1)
        edges = torch.cat([once, once.flip(0)], dim=1)
        self.register_buffer("corners", torch.stack([lower, upper], dim=1).flatten(0, 1))
        self.register_buffer("slopes", torch.stack([slopes, -slopes]).repeat(cells * cells, 1, 1))
        self.register_buffer("edges", edges)
        self.register_buffer("degree", torch.zeros(self.nodes).index_add_(0, edges[1], torch.ones(edges.shape[1])))

    def locate(self, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of markers at (..., 3): triangles, weights of their corners and the toroidal place in planes."""
        inside = position[..., :2] * self.cells
        cell = inside.detach().floor().clamp(0, self.cells - 1)
        u, v = (inside - cell).unbind(-1)
        upper = (u + v).detach() > 1
        first = torch.where(upper, u + v - 1, 1 - u - v)
        weights = torch.stack([first, torch.where(upper, 1 - u, u), torch.where(upper, 1 - v, v)], dim=-1)
        triangle = 2 * (cell[..., 1] * self.cells + cell[..., 0]).long() + upper.long()
        return triangle, weights, position[..., 2] * self.planes

    def nodes_of(self, triangle: Tensor, toroidal: Tensor) -> tuple[Tensor, Tensor]:
        """The six nodes around a marker, (..., 2, 3), and how far it is between its two planes."""
        plane = toroidal.detach().floor().clamp(0, self.planes - 1)
        both = torch.stack([plane, torch.remainder(plane + 1, self.planes)], dim=-1).long()
        return both[..., None] * self.nodes + self.corners[triangle][..., None, :], toroidal - plane

    def deposit(self, position: Tensor, charge: Tensor) -> Tensor:
        """Charge on the nodes, (batch, planes x nodes), of markers (batch, markers)."""
        triangle, weights, toroidal = self.locate(position)
        nodes, between = self.nodes_of(triangle, toroidal)
        sides = torch.stack([1 - between, between], dim=-1)
        shares = charge[..., None, None] * sides[..., None] * weights[..., None, :]
        count = self.planes * self.nodes
        first = torch.arange(position.shape[0], device=position.device)[:, None] * count
        flat = shares.new_zeros(position.shape[0] * count)
        return flat.index_add_(0, (nodes.flatten(1) + first).flatten(), shares.flatten()).view(-1, count)


class Field(nn.Module):
    """(1 + L) potential = charge, less its mean, with L the Laplacian of the edges, by Jacobi sweeps; plus the antenna's."""

    def __init__(self, places: int, sweeps: int) -> None:
        super().__init__()
        self.antenna = nn.Parameter(0.01 * torch.randn(places))
        self.sweeps = sweeps

    def forward(self, mesh: Mesh, density: Tensor) -> Tensor:
        source, target = mesh.edges
        right = (density - density.mean(dim=1, keepdim=True)).view(-1, mesh.nodes)
        potential = right
        for _ in range(self.sweeps):
            around = torch.zeros_like(potential).index_add_(1, target, potential.index_select(1, source))
            potential = (right + around) / (1 + mesh.degree)
        return potential.view(density.shape) + self.antenna


class Step(nn.Module):
    """Field, gather, push; the scatter of the next step, or of the end, follows."""

    def __init__(self, places: int, sweeps: int, seconds: float) -> None:
        super().__init__()
        self.field, self.seconds = Field(places, sweeps), seconds

    def forward(self, mesh: Mesh, position: Tensor, speed: Tensor, charge: Tensor) -> tuple[Tensor, Tensor]:
        potential = self.field(mesh, mesh.deposit(position, charge))
        triangle, weights, toroidal = mesh.locate(position)
        nodes, between = mesh.nodes_of(triangle, toroidal)
        seen = potential.gather(1, nodes.flatten(1)).view(nodes.shape)
        here = torch.lerp(seen[..., 0, :], seen[..., 1, :], between[..., None])
        across = -(here[..., None] * mesh.slopes[triangle]).sum(dim=-2)
        along = -((seen[..., 1, :] - seen[..., 0, :]) * weights).sum(dim=-1) * mesh.planes
        speed = speed + self.seconds * along
        drift = torch.stack([across[..., 1], -across[..., 0], speed], dim=-1)
        moved = position + self.seconds * drift
        return torch.cat([moved[..., :2].clamp(0, 1), torch.remainder(moved[..., 2:], 1)], dim=-1), speed


class Plasma(nn.Module):
    def __init__(self, particles: int, cells: int, planes: int, steps: int, sweeps: int, seconds: float) -> None:
        super().__init__()
        self.particles = particles
        self.mesh = Mesh(cells, planes)
        self.steps = nn.ModuleList(Step(planes * self.mesh.nodes, sweeps, seconds) for _ in range(steps))

    def forward(self, position: Tensor, speed: Tensor, charge: Tensor) -> Tensor:
        """(batch, markers, 3) in the unit cube, speeds and charges to the charge on the nodes after all steps."""
        for step in self.steps:
            position, speed = step(self.mesh, position, speed, charge)
        return self.mesh.deposit(position, charge)


def build(
    *, particles: int = 1_000_000, cells: int = 64, planes: int = 8, steps: int = 4, sweeps: int = 8, seconds: float = 0.01
) -> nn.Module:
    return Plasma(particles, cells, planes, steps, sweeps, seconds)


def batch(model: nn.Module, micro_batch: int, seq: int | None, image: int | None) -> dict[str, Tensor]:
    """So many plasmas, each with all markers and a mesh of its own."""
    markers = model.particles
    return {
        "position": torch.rand(micro_batch, markers, 3),
        "speed": torch.randn(micro_batch, markers),
        "charge": torch.full((micro_batch, markers), model.mesh.planes * model.mesh.nodes / markers),
        "targets": torch.rand(micro_batch, model.mesh.planes * model.mesh.nodes),
    }


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean square error of the density."""
    return F.mse_loss(output.float(), batch["targets"].float())
