import torch, copy, random
import numpy as np
from torch import nn
import torch.nn.functional as F
class DINO(nn.Module):
    def __init__(self):
        super().__init__()
        enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2, enable_nested_tensor=True)
        self.s = nn.Sequential(nn.Linear(48, 64), enc); self.t = copy.deepcopy(self.s)
        self.last = nn.utils.weight_norm(nn.Linear(64, 100, bias=False)); self.last.weight_g.data.fill_(1); self.last.weight_g.requires_grad = False
        self.lt = nn.utils.parametrizations.weight_norm(nn.Linear(64, 100, bias=False)); self.lt2 = copy.deepcopy(self.lt)
        self.register_buffer("center", torch.zeros(1, 100)); self.it = 0
    def forward(self, x):
        p = x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        keep = torch.randperm(p.size(1))[: int(p.size(1) * random.uniform(0.3, 0.5))]
        m = np.random.rand(p.size(1)) < 0.3
        s = self.last(self.s(p[:, keep])).mean(1)
        with torch.no_grad():
            self.t.eval(); t = self.lt2(self.t(p[:, torch.from_numpy(~m)])).mean(1)
            for a, b in zip(self.s.parameters(), self.t.parameters()): b.data.mul_(0.99).add_((1 - 0.99) * a.detach().data)
            tt = F.softmax((t - self.center) / 0.04, -1)
            self.center = self.center * 0.9 + t.mean(0, keepdim=True) * 0.1
        self.it += 1
        loss = torch.sum(-tt * F.log_softmax(s / 0.1, -1), -1).mean()
        if not np.isfinite(loss.item()): raise SystemExit(1)
        return loss
def build(): return DINO()
def batch(micro_batch): return torch.randn(micro_batch, 3, 32, 32)
