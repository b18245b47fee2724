"""A model cast to half precision by its author, with a norm kept in fp32."""
import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class FP32Norm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.float()).type_as(x)


class Net(nn.Module):
    def __init__(self, d=256):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
        self.norm = FP32Norm(d)

    def forward(self, x):
        return self.norm(x + self.inner(x.to(torch.bfloat16)))


def build():
    net = Net().to(DEVICE, dtype=torch.bfloat16)
    net.norm.float()
    return net


def batch(micro_batch):
    return torch.randn(micro_batch, 8, 256).to(DEVICE).bfloat16()


def loss(output, batch):
    return output.float().square().mean()
