"""A Dataset with numpy arrays inside, a vocabulary, and a collate by hand."""
import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

TEXT = "the quick brown fox jumps over the lazy dog " * 40
CHARS = sorted(set(TEXT))
INDEX = {c: i for i, c in enumerate(CHARS)}


class Text(Dataset):
    def __init__(self, block=64):
        self.data, self.block = np.array([INDEX[c] for c in TEXT], dtype=np.int64), block

    def __len__(self):
        return len(self.data) - self.block - 1

    def __getitem__(self, i):
        chunk = self.data[i : i + self.block + 1]
        return torch.from_numpy(chunk[:-1].copy()), torch.tensor(chunk[1:], dtype=torch.long)


class CharRNN(nn.Module):
    def __init__(self, vocab, d=128):
        super().__init__()
        self.embed, self.lstm, self.out, self.d = nn.Embedding(vocab, d), nn.LSTM(d, d, 2, batch_first=True, dropout=0.2), nn.Linear(d, vocab), d

    def init_hidden(self, n):
        weight = next(self.parameters()).data
        return (weight.new(2, n, self.d).zero_(), weight.new(2, n, self.d).zero_())

    def forward(self, x, y):
        hidden = tuple(h.data for h in self.init_hidden(x.size(0)))
        h, _ = self.lstm(self.embed(x), hidden)
        return nn.functional.cross_entropy(self.out(h).reshape(-1, len(CHARS)), y.view(-1))


def model():
    return CharRNN(len(CHARS))


def data():
    return Text()
