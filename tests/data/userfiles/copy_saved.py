import torch, os, tempfile, copy
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.a = nn.Linear(32, 32)
    def forward(self, x): return self.a(x).mean()
def build():
    net = Net()
    path = os.path.join(tempfile.mkdtemp(), "w.pt")
    torch.save(net.state_dict(), path)
    net.load_state_dict(torch.load(path, map_location="cuda"))
    other = copy.deepcopy(net); other.load_state_dict(net.state_dict()); other.a.weight.data.copy_(net.a.weight.data)
    opt = torch.optim.Adam(net.parameters(), lr=1e-3); sch = torch.optim.lr_scheduler.StepLR(opt, 1)
    for p, q in zip(net.parameters(), other.parameters()): assert torch.equal(p, q)
    opt.zero_grad(); net(torch.randn(4, 32)).backward(); opt.step(); sch.step(); opt.zero_grad()
    return net
def batch(micro_batch): return torch.randn(micro_batch, 32)
