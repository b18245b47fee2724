"""Annotated-transformer style: a block, cloned N times, and averaged weights from torch.optim.swa_utils."""
import copy

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel


def clones(module, n):
    return nn.ModuleList([copy.deepcopy(module) for _ in range(n)])


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.projections = clones(nn.Linear(d, d), 4)
        self.norm, self.heads = nn.LayerNorm(d), heads
        self.ff = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x, mask):
        b, t, d = x.shape
        q, k, v = [p(self.norm(x)).view(b, t, self.heads, -1).transpose(1, 2) for p in self.projections[:3]]
        scores = q @ k.transpose(-2, -1) / (d // self.heads) ** 0.5
        att = scores.masked_fill(mask == 0, -1e9).softmax(-1)
        x = x + self.projections[3]((att @ v).transpose(1, 2).reshape(b, t, d))
        return x + self.ff(x)


class LM(nn.Module):
    def __init__(self, vocab=1000, d=96, n=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.blocks = clones(Block(d, 4), n)
        self.out = nn.Linear(d, vocab)

    def forward(self, ids):
        mask = torch.tril(torch.ones(1, 1, ids.size(1), ids.size(1)))
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.out(x)


def build():
    net = LM()
    averaged = AveragedModel(net)
    net.averaged = [averaged]
    return net


def batch(micro_batch, seq):
    return torch.randint(0, 1000, (micro_batch, seq or 64))


def loss(output, batch):
    return nn.functional.cross_entropy(output[:, :-1].reshape(-1, 1000), batch[:, 1:].reshape(-1))
