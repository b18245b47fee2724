"""A language model that samples from itself in forward until an end token, with a cache."""
import torch
import torch.nn.functional as F
from torch import nn


class SelfPlay(nn.Module):
    def __init__(self, vocab=500, d=96):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(vocab, d), nn.LSTM(d, d, batch_first=True), nn.Linear(d, vocab)

    @torch.no_grad()
    def generate(self, ids, longest=12):
        state, finished = None, torch.zeros(ids.size(0), dtype=torch.bool)
        token = ids
        while ids.size(1) < longest:
            h, state = self.rnn(self.embed(token), state)
            logits = self.head(h[:, -1]) / 0.8
            top = torch.topk(logits, 50)[0][..., -1, None]
            logits = logits.masked_fill(logits < top, -float("inf"))
            token = torch.multinomial(F.softmax(logits, -1), 1)
            ids = torch.cat([ids, token], 1)
            finished |= token.squeeze(1) == 0
            if finished.all():
                break
        return ids

    def forward(self, prompt):
        ids = self.generate(prompt)
        h, _ = self.rnn(self.embed(ids))
        logits = self.head(h[:, :-1])
        mask = (ids[:, 1:] != 0).float()
        loss = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        return (loss * mask).sum() / mask.sum()


def build():
    return SelfPlay()


def batch(micro_batch):
    return torch.randint(1, 500, (micro_batch, 4))
