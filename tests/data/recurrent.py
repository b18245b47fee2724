"""Recurrent language models of one file: GRU, and a stacked two-way LSTM with dropout between layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Recurrent(nn.Module):
    def __init__(self, rnn: nn.RNNBase, vocab: int, width: int, features: int) -> None:
        super().__init__()
        self.vocab = vocab
        self.tokens = nn.Embedding(vocab, width)
        self.rnn = rnn
        self.head = nn.Linear(features, vocab)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.tokens(input_ids))[0])


def gru(vocab: int = 10000, width: int = 256, hidden: int = 512) -> Recurrent:
    return Recurrent(nn.GRU(width, hidden, 2, batch_first=True), vocab, width, hidden)


def stacked(vocab: int = 10000, width: int = 256, hidden: int = 512, dropout: float = 0.2) -> Recurrent:
    rnn = nn.LSTM(width, hidden, 2, batch_first=True, bidirectional=True, dropout=dropout)
    return Recurrent(rnn, vocab, width, 2 * hidden)


def batch(model: Recurrent, micro_batch: int, seq: int | None) -> dict[str, Tensor]:
    tokens = torch.randint(0, model.vocab, (micro_batch, (seq or 64) + 1))
    return {"input_ids": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output.float().flatten(0, 1), batch["targets"].flatten())
