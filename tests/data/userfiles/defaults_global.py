"""Global defaults: device, dtype, determinism, old tensor types."""
import torch
from torch import nn

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
torch.set_float32_matmul_precision("high")
torch.use_deterministic_algorithms(True, warn_only=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 10)
        nn.init.orthogonal_(self.a.weight)
        nn.init.xavier_uniform_(self.b.weight, gain=nn.init.calculate_gain("relu"))
        print(sum(p.numel() for p in self.parameters()), next(self.parameters()).device)

    def forward(self, x):
        return self.b(torch.relu(self.a(x))) + torch.zeros(10)


def build():
    with torch.device("cuda"):
        net = Net()
    return net


def batch(micro_batch):
    return torch.randn(micro_batch, 64)


def loss(output, batch):
    return nn.functional.cross_entropy(output, torch.randint(0, 10, (output.size(0),)))
