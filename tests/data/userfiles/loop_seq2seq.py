"""An attention decoder with teacher forcing by a coin, and an early stop at the end token."""
import random

import torch
import torch.nn.functional as F
from torch import nn

EOS = 1


class Seq2Seq(nn.Module):
    def __init__(self, vocab=800, d=96):
        super().__init__()
        self.embed, self.encoder = nn.Embedding(vocab, d), nn.GRU(d, d, batch_first=True)
        self.cell, self.attend, self.out = nn.GRU(2 * d, d, batch_first=True), nn.Linear(2 * d, 1), nn.Linear(d, vocab)

    def step(self, token, hidden, memory):
        e = self.embed(token)
        score = self.attend(torch.cat([hidden[-1][:, None].expand(-1, memory.size(1), -1), memory], -1))
        context = (F.softmax(score, 1) * memory).sum(1, keepdim=True)
        out, hidden = self.cell(torch.cat([e, context], -1), hidden)
        return self.out(out), hidden

    def forward(self, source, target):
        memory, hidden = self.encoder(self.embed(source))
        token = torch.zeros(source.size(0), 1, dtype=torch.long, device=source.device)
        loss, forced = 0, random.random() < 0.5
        for t in range(target.size(1)):
            logits, hidden = self.step(token, hidden, memory)
            loss = loss + F.cross_entropy(logits.squeeze(1), target[:, t])
            if forced:
                token = target[:, t : t + 1]
            else:
                token = logits.topk(1)[1].squeeze(1).detach()
                if token[0].item() == EOS:
                    break
        return loss / target.size(1)


def build():
    return Seq2Seq()


def batch(micro_batch):
    torch.manual_seed(0)
    return {"source": torch.randint(2, 800, (micro_batch, 20)), "target": torch.randint(2, 800, (micro_batch, 12))}
