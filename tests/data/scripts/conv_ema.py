import copy, os, json, logging
import torch, torch.nn as nn, torch.nn.functional as F
logging.basicConfig(level=logging.INFO)
log = logging.getLogger(__name__)
os.makedirs("runs/exp1", exist_ok=True)
with open("runs/exp1/config.json", "w") as f:
    json.dump({"lr": 1e-3}, f)
assert json.load(open("runs/exp1/config.json"))["lr"] == 1e-3
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, stride=2, padding=1)
        self.bn = nn.BatchNorm2d(64)
        self.fc = nn.Linear(64, 10)
    def forward(self, x):
        return self.fc(self.bn(self.c2(F.relu(self.c1(x)))).relu().mean((2, 3)))
model = Net().cuda()
ema = copy.deepcopy(model).eval().requires_grad_(False)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=100)
for step in range(100):
    x, y = torch.randn(64, 3, 32, 32).cuda(), torch.randint(0, 10, (64,)).cuda()
    opt.zero_grad()
    loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
    loss.backward()
    opt.step(); sched.step()
    with torch.no_grad():
        for a, b in zip(ema.parameters(), model.parameters()):
            a.lerp_(b, 0.01)
    log.info("step %d loss %.3f mem %.1f", step, loss.item(), torch.cuda.max_memory_allocated() / 2**20)
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, "runs/exp1/last.pt")
