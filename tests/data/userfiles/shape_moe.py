"""Mixture of experts with a loop over experts and index_add, as Mixtral's reference has it."""
import torch
import torch.nn.functional as F
from torch import nn


class Expert(nn.Module):
    def __init__(self, d, hidden):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(d, hidden, bias=False), nn.Linear(hidden, d, bias=False), nn.Linear(d, hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MoE(nn.Module):
    def __init__(self, d=128, hidden=256, experts=8, k=2):
        super().__init__()
        self.gate, self.k = nn.Linear(d, experts, bias=False), k
        self.experts = nn.ModuleList([Expert(d, hidden) for _ in range(experts)])

    def forward(self, x):
        shape = x.shape
        x = x.view(-1, shape[-1])
        weights = F.softmax(self.gate(x), dim=-1, dtype=torch.float)
        weights, chosen = torch.topk(weights, self.k, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == i)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out.view(shape)


class LM(nn.Module):
    def __init__(self, vocab=2000, d=128):
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(vocab, d), nn.ModuleList([MoE(d) for _ in range(2)]), nn.Linear(d, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def build():
    return LM()


def batch(micro_batch, seq):
    return torch.randint(0, 2000, (micro_batch, seq or 256))


def loss(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch.flatten())
