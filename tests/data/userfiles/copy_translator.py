"""Sequence to sequence with PyTorch's own nn.Transformer."""
import math

import torch
from torch import nn


class PositionalEncoding(nn.Module):
    def __init__(self, width, longest=512):
        super().__init__()
        position = torch.arange(longest).unsqueeze(1)
        rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        table = torch.zeros(longest, width)
        table[:, 0::2] = torch.sin(position * rate)
        table[:, 1::2] = torch.cos(position * rate)
        self.register_buffer("table", table)

    def forward(self, x):
        return x + self.table[: x.size(1)]


class Translator(nn.Module):
    def __init__(self, source=2000, target=1800, width=128):
        super().__init__()
        self.source, self.target = nn.Embedding(source, width), nn.Embedding(target, width)
        self.positions = PositionalEncoding(width)
        self.transformer = nn.Transformer(width, 4, 3, 3, 256, dropout=0.1, batch_first=True)
        self.generator = nn.Linear(width, target)

    def forward(self, src, tgt):
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.size(1), device=tgt.device)
        src_pad, tgt_pad = src == 0, tgt == 0
        hidden = self.transformer(
            self.positions(self.source(src)), self.positions(self.target(tgt)), tgt_mask=mask,
            src_key_padding_mask=src_pad, tgt_key_padding_mask=tgt_pad, memory_key_padding_mask=src_pad,
        )
        return self.generator(hidden)


def build():
    return Translator()


def batch(micro_batch, seq):
    return {"src": torch.randint(1, 2000, (micro_batch, seq or 64)), "tgt": torch.randint(1, 1800, (micro_batch, seq or 64))}


def loss(output, batch):
    return nn.functional.cross_entropy(output.flatten(0, 1), batch["tgt"].flatten(), ignore_index=0)
