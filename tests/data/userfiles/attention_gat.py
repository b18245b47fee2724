"""Graph attention with a scatter softmax whose size is read from the index."""
import torch
from torch import nn


def scatter_softmax(x, index):
    n = index.max().item() + 1
    top = torch.full((n,) + x.shape[1:], -1e9).scatter_reduce(0, index[:, None].expand_as(x), x, "amax")
    e = (x - top[index]).exp()
    total = torch.zeros((n,) + x.shape[1:]).index_add_(0, index, e)
    return e / (total[index] + 1e-9)


class GAT(nn.Module):
    def __init__(self, i=32, d=16, heads=4, classes=5):
        super().__init__()
        self.lin, self.heads = nn.Linear(i, d * heads), heads
        self.att = nn.Parameter(torch.empty(1, heads, 2 * d))
        nn.init.xavier_uniform_(self.att)
        self.out = nn.Linear(d * heads, classes)

    def forward(self, x, edge_index, train_mask, y):
        row, col = edge_index
        keep = row != col
        row, col = row[keep], col[keep]
        h = self.lin(x).view(x.size(0), self.heads, -1)
        score = nn.functional.leaky_relu((torch.cat([h[row], h[col]], -1) * self.att).sum(-1), 0.2)
        alpha = nn.functional.dropout(scatter_softmax(score, row), 0.6, self.training)
        out = torch.zeros_like(h).index_add(0, row, h[col] * alpha.unsqueeze(-1))
        logits = self.out(nn.functional.elu(out.flatten(1)))
        return nn.functional.cross_entropy(logits[train_mask], y[train_mask])


def build():
    return GAT()


def batch(micro_batch):
    g = torch.Generator().manual_seed(0)
    n = 200 * micro_batch
    row = torch.randint(0, n, (8 * n,), generator=g)
    row[0] = n - 1
    edges = torch.stack([row, torch.randint(0, n, (8 * n,), generator=g)])
    mask = torch.zeros(n, dtype=torch.bool)
    mask[: n // 4] = True
    return {"x": torch.randn(n, 32), "edge_index": edges, "train_mask": mask, "y": torch.randint(0, 5, (n,))}
