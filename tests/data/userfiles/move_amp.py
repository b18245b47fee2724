import torch
from torch import nn
from torch.cuda.amp import custom_fwd, custom_bwd, autocast, GradScaler
class F(torch.autograd.Function):
    @staticmethod
    @custom_fwd
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w); return x @ w.t()
    @staticmethod
    @custom_bwd
    def backward(ctx, g):
        x, w = ctx.saved_tensors; return g @ w, g.flatten(0, -2).t() @ x.flatten(0, -2)
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.w = nn.Parameter(torch.randn(64, 32)); self.o = nn.Linear(64, 8)
        self.scaler = GradScaler()
    @autocast()
    def forward(self, x):
        y = F.apply(x.cuda(), self.w)
        with autocast(enabled=False): z = self.o(y.float())
        with torch.autocast(device_type="cuda", dtype=torch.bfloat16): z = z + self.o(y)
        return self.scaler.scale(z.float().mean())
def build(): return Net().cuda()
def batch(micro_batch): return torch.randn(micro_batch, 10, 32)
