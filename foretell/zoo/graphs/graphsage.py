"""GraphSAGE (Hamilton et al. 2017, "Inductive Representation Learning on Large Graphs") with mean aggregation.

Kept: each layer adds a linear map of the node to a linear map of the mean of its neighbours. The default widths are
those of the OGB reference for ogbn-products; the graph is random with fixed numbers of nodes and edges. Left out: the
sampling of neighbours; the whole graph is trained on at once.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SAGELayer(nn.Module):
    def __init__(self, dim_in: int, dim_out: int) -> None:
        super().__init__()
        self.neighbours = nn.Linear(dim_in, dim_out)
        self.own = nn.Linear(dim_in, dim_out, bias=False)

    def forward(self, x: Tensor, edge_index: Tensor, degree: Tensor) -> Tensor:
        source, target = edge_index
        total = torch.zeros_like(x).index_add_(0, target, x.index_select(0, source))
        return self.neighbours(total / degree.to(x.dtype)) + self.own(x)


class GraphSAGE(nn.Module):
    def __init__(
        self, nodes: int, edges: int, layers: int, features: int, hidden: int, classes: int, dropout: float
    ) -> None:
        super().__init__()
        self.nodes = nodes
        self.edges = edges
        self.features = features
        self.classes = classes
        widths = [features] + [hidden] * (layers - 1) + [classes]
        self.blocks = nn.ModuleList(SAGELayer(d_in, d_out) for d_in, d_out in pairwise(widths))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        ones = torch.ones(edge_index.shape[1], 1, device=x.device)
        degree = torch.zeros(x.shape[0], 1, device=x.device).index_add_(0, edge_index[1], ones).clamp_(min=1)
        for i, layer in enumerate(self.blocks):
            if i > 0:
                x = self.dropout(F.relu(x))
            x = layer(x, edge_index, degree)
        return x


def build(
    *,
    nodes: int = 200_000,
    edges: int = 2_000_000,
    layers: int = 3,
    features: int = 100,
    hidden: int = 256,
    classes: int = 47,
    dropout: float = 0.0,
) -> GraphSAGE:
    return GraphSAGE(nodes, edges, layers, features, hidden, classes, dropout)


def batch(model: GraphSAGE, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """micro_batch graphs side by side, joined into one: edges stay inside their own graph."""
    nodes, edges = micro_batch * model.nodes, micro_batch * model.edges
    first = torch.arange(edges) // model.edges * model.nodes
    return {
        "x": torch.randn(nodes, model.features),
        "edge_index": torch.randint(0, model.nodes, (2, edges)) + first,
        "targets": torch.randint(0, model.classes, (nodes,)),
    }


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of every node's class."""
    return F.cross_entropy(output.float(), batch["targets"])
