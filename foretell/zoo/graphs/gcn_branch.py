"""Branching policy for mixed-integer programs, as Distributional MIPLIB trains it (Huang et al., 2024, "Distributional
MIPLIB: a Multi-Domain Library for Advancing ML-Guided MILP Methods"), with the network of Gasse et al. (2019, "Exact
Combinatorial Optimization with Graph Convolutional Neural Networks").

A node of branch and bound is a bipartite graph: constraints and variables, an edge for every coefficient that is not
zero. One half-convolution carries messages from variables to constraints, the next back; an MLP scores variables; the
loss is the cross entropy of the expert's choice (strong branching) among the candidates.

Kept: 5, 1 and 19 features of constraints, edges and variables, width 64, two half-convolutions, choice among candidates
alone. Batches are ragged as in the paper: graphs of unlike sizes lie packed one after another, `graph_of` says which
graph a variable is of, and the softmax is one of segments. Left out: the solver and its features (drawn at random, already
normalised, so that the prenormalisation of the inputs is not needed; inside, LayerNorm stands for it).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

CONSTRAINT, EDGE, VARIABLE = 5, 1, 19
"""Features of Gasse et al."""
SPREAD = (0.5, 0.75, 1.0, 1.25, 1.5)
"""Sizes of the graphs of a batch, in turn, in terms of the usual size."""


class HalfConvolution(nn.Module):
    """From one side of the graph to the other: the sum over edges of a function of both ends and the coefficient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.source, self.target = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.edge = nn.Linear(EDGE, width, bias=False)
        self.message = nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, width))
        self.norm = nn.LayerNorm(width)
        self.update = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())

    def forward(self, source: Tensor, target: Tensor, edge: Tensor, at_source: Tensor, at_target: Tensor) -> Tensor:
        joined = self.source(source).index_select(0, at_source) + self.target(target).index_select(0, at_target)
        messages = self.message(joined + self.edge(edge))
        total = torch.zeros_like(target, dtype=messages.dtype).index_add_(0, at_target, messages)
        return self.update(torch.cat([self.norm(total), target.to(messages.dtype)], dim=-1))


class BranchingPolicy(nn.Module):
    def __init__(self, constraints: int, variables: int, entries: int, width: int, rounds: int) -> None:
        super().__init__()
        self.constraints, self.variables, self.entries = constraints, variables, entries
        self.embed_constraint, self.embed_variable = (
            nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
            for features in (CONSTRAINT, VARIABLE)
        )
        self.blocks = nn.ModuleList(HalfConvolution(width) for _ in range(2 * rounds))
        self.score = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1, bias=False))

    def forward(self, constraint: Tensor, variable: Tensor, edge: Tensor, edge_index: Tensor) -> Tensor:
        """Packed features, (all constraints, 5), (all variables, 19), (all edges, 1), to a score of each variable."""
        of_constraint, of_variable = edge_index
        left, right = self.embed_constraint(constraint), self.embed_variable(variable)
        for index, block in enumerate(self.blocks):
            if index % 2 == 0:
                left = block(right, left, edge, of_variable, of_constraint)
            else:
                right = block(left, right, edge, of_constraint, of_variable)
        return self.score(right).squeeze(-1)


def build(
    *, constraints: int = 500, variables: int = 1000, entries: int = 25_000, width: int = 64, rounds: int = 1
) -> nn.Module:
    """Sizes of the usual graph; defaults are those of set covering with 500 rows, 1,000 columns, density 0.05."""
    return BranchingPolicy(constraints, variables, entries, width, rounds)


def sizes(model: nn.Module, micro_batch: int) -> list[tuple[int, int, int]]:
    """Constraints, variables and edges of each graph of a batch: unlike, but the same each time."""
    factors = [SPREAD[number % len(SPREAD)] for number in range(micro_batch)]
    return [(round(f * model.constraints), round(f * model.variables), round(f * model.entries)) for f in factors]


def batch(model: nn.Module, micro_batch: int, seq: int | None, image: int | None) -> dict[str, Tensor]:
    """Every second variable of a graph is a candidate; the expert chose one of them."""
    rows = columns = 0
    edges, owners, places, choices = [], [], [], []
    for number, (own_rows, own_columns, entries) in enumerate(sizes(model, micro_batch)):
        edges.append(torch.stack([torch.randint(own_rows, (entries,)) + rows, torch.randint(own_columns, (entries,)) + columns]))
        owners.append(torch.full((own_columns,), number))
        places.append(torch.arange(own_columns))
        choices.append(2 * torch.randint((own_columns + 1) // 2, (1,)) + columns)
        rows, columns = rows + own_rows, columns + own_columns
    edge_index = torch.cat(edges, dim=1)
    return {
        "constraint": torch.randn(rows, CONSTRAINT),
        "variable": torch.randn(columns, VARIABLE),
        "edge": torch.randn(edge_index.shape[1], EDGE),
        "edge_index": edge_index,
        "graph_of": torch.cat(owners),
        "candidate": torch.cat(places) % 2 == 0,
        "targets": torch.cat(choices),
    }


def log_shares(scores: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Log of the softmax over the candidates of each graph; -inf for the others."""
    owner, graphs = batch["graph_of"], len(batch["targets"])
    masked = scores.float().masked_fill(~batch["candidate"], float("-inf"))
    highest = torch.full((graphs,), float("-inf"), device=scores.device).scatter_reduce_(0, owner, masked.detach(), "amax")
    shifted = masked - highest.index_select(0, owner)
    total = torch.zeros(graphs, device=scores.device).index_add_(0, owner, shifted.exp())
    return shifted - total.log().index_select(0, owner)


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the expert's choice among the candidates of each graph."""
    return -log_shares(output, batch).index_select(0, batch["targets"]).mean()
