"""Pointer-generator decoder: packed encoder, scatter_add copy distribution, coverage, scheduled sampling by random."""
import random
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence, PackedSequence


class PG(nn.Module):
    def __init__(self, vocab=200, d=64):
        super().__init__()
        self.vocab, self.emb = vocab, nn.Embedding(vocab, d)
        self.enc = nn.GRU(d, d, bidirectional=True)
        self.cell, self.att, self.out, self.gate = nn.LSTMCell(d, d), nn.Linear(2 * d, d), nn.Linear(3 * d, vocab), nn.Linear(4 * d, 1)

    def forward(self, sources, target):
        packed = pack_sequence(sources, enforce_sorted=False)
        emb = PackedSequence(self.emb(packed.data), packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
        enc, lens = pad_packed_sequence(self.enc(emb)[0], batch_first=True)
        src, _ = pad_packed_sequence(packed, batch_first=True)
        mask = torch.arange(enc.size(1))[None].to(enc.device) >= lens[:, None].to(enc.device)
        h = c = enc.new_zeros(enc.size(0), 64)
        cov, y, nll, covloss = torch.zeros_like(mask, dtype=enc.dtype), target[:, 0], [], []
        for t in range(1, target.size(1)):
            e = self.emb(y)
            h, c = self.cell(e, (h, c))
            s = torch.bmm(self.att(enc), h.unsqueeze(2)).squeeze(2) + cov
            a = s.masked_fill(mask, -1e4).softmax(-1)
            ctx = torch.bmm(a.unsqueeze(1), enc).squeeze(1)
            covloss.append(torch.minimum(a, cov).sum(1).mean())
            cov = cov + a
            p = torch.sigmoid(self.gate(torch.cat([ctx, h, e], -1)))
            dist = p * F.softmax(self.out(torch.cat([ctx, h], -1)), -1)
            dist = dist.scatter_add(1, src, ((1 - p) * a).to(dist.dtype))
            nll.append(-torch.log(dist.gather(1, target[:, t:t + 1]) + 1e-9).mean())
            y = dist.argmax(-1) if random.random() > 0.7 else target[:, t]
        return sum(nll) / len(nll) + sum(covloss)


def build():
    return PG()


def batch(micro_batch):
    return [torch.randint(200, (6 + 4 * (i % 3),)) for i in range(micro_batch)], torch.randint(200, (micro_batch, 9))
