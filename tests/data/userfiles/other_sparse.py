"""Sparse adjacency products and embeddings with sparse gradients."""
import torch
from torch import nn


class LightGCN(nn.Module):
    def __init__(self, nodes=2000, d=64, layers=2):
        super().__init__()
        self.table, self.layers = nn.Embedding(nodes, d), layers
        self.words = nn.EmbeddingBag(3000, d, mode="sum", sparse=False)
        edges = torch.randint(0, nodes, (2, 8000))
        self.register_buffer("adjacency", torch.sparse_coo_tensor(edges, torch.ones(8000), (nodes, nodes)).coalesce())

    def forward(self, users, items, words):
        x = every = self.table.weight
        for _ in range(self.layers):
            x = torch.sparse.mm(self.adjacency, x)
            every = every + x
        return (every[users] * every[items]).sum(-1) + self.words(words).sum(-1)


def build():
    return LightGCN()


def batch(micro_batch):
    return tuple([torch.randint(0, 2000, (micro_batch,)), torch.randint(0, 2000, (micro_batch,)), torch.randint(0, 3000, (micro_batch, 6))])


def loss(output, batch):
    return nn.functional.softplus(-output).mean()
