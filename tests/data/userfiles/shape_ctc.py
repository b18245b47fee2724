"""Speech recognition with CTC."""
import torch
from torch import nn


class ASR(nn.Module):
    def __init__(self, mels=80, d=128, chars=29):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(mels, d, 3, stride=2, padding=1), nn.ReLU(), nn.Conv1d(d, d, 3, padding=1), nn.ReLU())
        self.rnn = nn.GRU(d, d, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * d, chars)

    def forward(self, audio):
        h, _ = self.rnn(self.conv(audio).transpose(1, 2))
        return self.out(h).log_softmax(-1).transpose(0, 1)


def build():
    return ASR()


def batch(micro_batch):
    return torch.randn(micro_batch, 80, 64)


def loss(output, batch):
    t, n, _ = output.shape
    targets = torch.randint(1, 29, (n, 20))
    inputs = torch.full((n,), t, dtype=torch.long)
    lengths = torch.randint(10, 20, (n,), dtype=torch.long)
    return nn.CTCLoss(zero_infinity=True)(output, targets, inputs, lengths)
