"""A graph network that drops edges, pools by nodes' graph and counts degrees with bincount."""
import torch
from torch import nn


class GCN(nn.Module):
    def __init__(self, inside=32, d=64, out=7):
        super().__init__()
        self.one, self.two, self.out = nn.Linear(inside, d), nn.Linear(d, d), nn.Linear(d, out)

    def spread(self, x, edges):
        source, target = edges
        degree = torch.bincount(target, minlength=x.size(0)).clamp(min=1)
        gathered = torch.zeros_like(x).index_add(0, target, x[source])
        return gathered / degree[:, None]

    def forward(self, x, edges, graph):
        keep = torch.rand(edges.size(1)) > 0.2
        edges = edges[:, keep]
        loops = edges[0] == edges[1]
        edges = edges[:, ~loops]
        x = torch.relu(self.one(self.spread(x, edges)))
        x = torch.relu(self.two(self.spread(x, edges)))
        graphs = int(graph.max()) + 1
        pooled = x.new_zeros(graphs, x.size(1)).scatter_add_(0, graph[:, None].expand_as(x), x)
        sizes = torch.unique(graph, return_counts=True)[1]
        return self.out(pooled / sizes[:, None])


def build():
    return GCN()


def batch(micro_batch):
    nodes, edges = 100 * micro_batch, 600 * micro_batch
    return {
        "x": torch.randn(nodes, 32), "edges": torch.randint(0, nodes, (2, edges)),
        "graph": torch.arange(micro_batch).repeat_interleave(100),
    }


def loss(output, batch):
    return nn.functional.cross_entropy(output, torch.zeros(output.size(0), dtype=torch.long))
