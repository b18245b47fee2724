"""Token dropping by scores, nonzero, masked_scatter and variable segments."""
import torch
from torch import nn


class Segments(nn.Module):
    def __init__(self, d=128):
        super().__init__()
        self.score, self.up, self.down = nn.Linear(d, 1), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x, mask):
        flat = x[mask]
        where = mask.view(-1).nonzero(as_tuple=True)[0]
        important = self.score(flat).squeeze(-1) > 0
        refined = self.down(torch.relu(self.up(flat[important])))
        flat = flat.masked_scatter(important.unsqueeze(-1), refined.to(flat.dtype))
        out = torch.zeros_like(x).view(-1, x.size(-1)).index_copy(0, where, flat)
        lengths = mask.sum(1)
        pieces = torch.split(flat, lengths.tolist())
        pooled = torch.stack([p.mean(0) for p in pieces])
        padded = nn.utils.rnn.pad_sequence(pieces, batch_first=True)
        repeated = torch.repeat_interleave(pooled, lengths, dim=0)
        return out.sum() + padded.mean() + (flat - repeated).pow(2).mean()


def build():
    return Segments()


def batch(micro_batch):
    lengths = torch.randint(20, 64, (micro_batch,))
    return {"x": torch.randn(micro_batch, 64, 128), "mask": torch.arange(64)[None] < lengths[:, None]}
