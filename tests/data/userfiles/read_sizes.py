"""Tensors where Python wants numbers."""
import torch, numpy as np
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.a = nn.Linear(32, 32)
    def forward(self, x, lengths):
        n = max(lengths)
        order = sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True)
        x = x[order][:, :n]
        z = torch.zeros(lengths.max(), 4)
        for i in range(lengths[0]):
            z[i % 3] = i
        means = torch.tensor([x[i, :l].mean() for i, l in enumerate(lengths)])
        stats = torch.stack([x[i, :l].mean(0) for i, l in enumerate(lengths)])
        arr = np.array(lengths)
        y = self.a(x) / arr.mean()
        t = torch.tensor(x.shape)
        u = torch.tensor(lengths)
        if 5 in lengths: y = y * 2
        s = sum(lengths)
        print(x.shape, lengths, f"{s}", str(u), repr(t), y)
        return y.sum() + means.sum() + stats.sum() + z.sum() + float(s) + t.prod()
def build(): return Net()
def batch(micro_batch): return {"x": torch.randn(micro_batch, 20, 32), "lengths": torch.LongTensor([10, 12, 5, 7][:micro_batch])}
