"""A tagger with packed sequences."""
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Tagger(nn.Module):
    def __init__(self, vocab=2000, d=96, tags=17):
        super().__init__()
        self.embed = nn.Embedding(vocab, d, padding_idx=0)
        self.lstm = nn.LSTM(d, 64, num_layers=2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(128, tags)

    def forward(self, ids, lengths, tags):
        packed = pack_padded_sequence(self.embed(ids), lengths.cpu(), batch_first=True, enforce_sorted=False)
        packed, _ = self.lstm(packed)
        h, _ = pad_packed_sequence(packed, batch_first=True)
        return nn.functional.cross_entropy(self.out(h).flatten(0, 1), tags[:, : h.size(1)].flatten(), ignore_index=-1)


def build():
    return Tagger()


def batch(micro_batch):
    lengths = torch.tensor([20 - 2 * i for i in range(micro_batch)]).clamp(min=5)
    return {"ids": torch.randint(1, 2000, (micro_batch, 24)), "lengths": lengths, "tags": torch.randint(0, 17, (micro_batch, 24))}
