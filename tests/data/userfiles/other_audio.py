import torch
from torch import nn
class Spec(nn.Module):
    def __init__(self):
        super().__init__(); self.register_buffer("w", torch.hann_window(256)); self.conv = nn.Conv1d(129, 64, 3); self.out = nn.Linear(64, 2)
        self.rec = nn.Linear(129, 129)
    def forward(self, wav):
        s = torch.stft(wav, 256, 128, window=self.w, return_complex=True)
        m = s.abs()
        y = self.rec(m.transpose(1, 2)).transpose(1, 2)
        back = torch.istft(torch.polar(y, s.angle()), 256, 128, window=self.w)
        return (back - wav[:, :back.size(1)]).abs().mean() + self.out(self.conv(m.log1p()).mean(-1)).mean()
def build(): return Spec()
def batch(micro_batch): return torch.randn(micro_batch, 4000)
