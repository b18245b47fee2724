import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 32); self.norms = []
        self.a.weight.register_hook(lambda g: g * 0.5)
        self.b.register_full_backward_hook(lambda m, gi, go: self.norms.append(go[0].norm().item()))
        self.register_forward_pre_hook(lambda m, i: (i[0] * 1.0,))
        for p in self.parameters(): p.register_post_accumulate_grad_hook(lambda p: None)
    def forward(self, x):
        h = torch.relu(self.a(x)); h.retain_grad(); h.register_hook(lambda g: torch.where(g.isnan(), torch.zeros_like(g), g))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
            y = self.b(h) ** 2
        with torch.no_grad():
            self.a.weight.clamp_(-1, 1); self.b.weight.data = self.b.weight.data / self.b.weight.data.norm()
        return y.mean()
def build(): return Net()
def batch(micro_batch): return torch.randn(micro_batch, 32)
