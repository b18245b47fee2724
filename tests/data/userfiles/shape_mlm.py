"""Masked language modelling: only the masked places go through the head."""
import torch
from torch import nn


class MaskedLM(nn.Module):
    def __init__(self, vocab=4000, d=128):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.mix = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d), nn.LayerNorm(d))
        self.head = nn.Linear(d, vocab)

    def forward(self, ids, labels):
        h = self.mix(self.embed(ids))
        picked = labels != -100
        logits = self.head(h[picked])
        return nn.functional.cross_entropy(logits, labels[picked])


def build():
    return MaskedLM()


def batch(micro_batch, seq):
    torch.manual_seed(0)
    ids = torch.randint(5, 4000, (micro_batch, seq or 128))
    labels = ids.clone()
    chosen = torch.bernoulli(torch.full(labels.shape, 0.15)).bool()
    labels[~chosen] = -100
    ids[chosen] = 3
    return {"ids": ids, "labels": labels}
