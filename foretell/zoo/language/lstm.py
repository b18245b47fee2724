"""AWD-LSTM language model (Merity et al. 2017, "Regularizing and Optimizing LSTM Language Models").

Kept: stacked LSTMs under a softmax that shares the token embedding. The first layer widens the embedding to the
hidden size and the last one narrows it back. Left out: the paper's dropped recurrent weights and variational masks,
for which plain dropout between layers stands.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LSTMLanguageModel(nn.Module):
    def __init__(self, vocab_size: int, context: int, layers: int, embed: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.context = context
        self.tokens = nn.Embedding(vocab_size, embed)
        self.dropout = nn.Dropout(dropout)
        widths = [embed] + [hidden] * (layers - 1) + [embed]
        self.blocks = nn.ModuleList(
            nn.LSTM(width_in, width_out, batch_first=True) for width_in, width_out in pairwise(widths)
        )
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.dropout(self.tokens(input_ids))
        for lstm in self.blocks:
            x, _ = lstm(x)
            x = self.dropout(x)
        return F.linear(x, self.tokens.weight, self.bias)


def build(
    *,
    vocab_size: int = 33278,
    context: int = 70,
    layers: int = 3,
    embed: int = 400,
    hidden: int = 1150,
    dropout: float = 0.2,
) -> LSTMLanguageModel:
    return LSTMLanguageModel(vocab_size, context, layers, embed, hidden, dropout)


def batch(
    model: LSTMLanguageModel, micro_batch: int, seq: int | None = None, image: int | None = None
) -> dict[str, Tensor]:
    """Random tokens, each with the one after it as its target."""
    tokens = torch.randint(0, model.vocab_size, (micro_batch, (seq or model.context) + 1))
    return {"input_ids": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the next token."""
    return F.cross_entropy(output.float().flatten(0, 1), batch["targets"].flatten())
