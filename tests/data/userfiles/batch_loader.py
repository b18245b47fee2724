"""A DataLoader with a custom collate_fn and workers, batch taken by next(iter(loader))."""
from dataclasses import dataclass
from typing import List
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.nn.utils.rnn import pad_sequence


@dataclass
class Example:
    text: List[int]
    label: int


class Toy(Dataset):
    def __init__(self, n=256):
        g = torch.Generator().manual_seed(0)
        self.items = [Example(torch.randint(1, 99, (int(torch.randint(3, 30, (1,), generator=g)),), generator=g).tolist(), i % 3) for i in range(n)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(examples):
    ids = pad_sequence([torch.tensor(e.text) for e in examples], batch_first=True, padding_value=0)
    offsets = torch.tensor([0] + [len(e.text) for e in examples[:-1]]).cumsum(0)
    flat = torch.cat([torch.tensor(e.text) for e in examples])
    return {"ids": ids, "flat": flat, "offsets": offsets, "labels": torch.tensor([e.label for e in examples])}


class Clf(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.emb = nn.EmbeddingBag(100, 64, mode="mean"), nn.Embedding(100, 64, padding_idx=0)
        self.conv, self.fc = nn.ModuleList(nn.Conv1d(64, 32, k, padding=k) for k in (2, 3, 4)), nn.Linear(160, 3)

    def forward(self, ids, flat, offsets, labels):
        e = self.emb(ids).transpose(1, 2)
        pooled = [torch.relu(c(e)).max(-1).values for c in self.conv]
        logits = self.fc(torch.cat(pooled + [self.bag(flat, offsets)], 1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def build():
    return Clf()


def batch(micro_batch):
    data = Toy()
    loader = DataLoader(data, batch_size=micro_batch, collate_fn=collate, num_workers=2, pin_memory=True, drop_last=True)
    return next(iter(loader))


def loss(output):
    return output["loss"]
