"""A language model that returns (logits, loss), and a number to print beside them."""
import torch
from torch import nn
import torch.nn.functional as F


class Bigrams(nn.Module):
    def __init__(self, vocab=80, d=32):
        super().__init__()
        self.wte, self.head = nn.Embedding(vocab, d), nn.Linear(d, vocab, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, idx, targets=None):
        logits = self.head(torch.tanh(self.wte(idx)))
        if targets is None:
            return logits[:, [-1]], None, 0.0
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss, loss.detach().exp()


def build():
    return Bigrams()


def batch(micro_batch):
    data = torch.randint(0, 80, (1000,))
    starts = torch.randint(900, (micro_batch,))
    return torch.stack([data[i : i + 32] for i in starts]), torch.stack([data[i + 1 : i + 33] for i in starts])
